"""`make bench-small`: 16 floats through `identity`, one call each and as messages of one stream, over both protocols.

Beside them plain grpc.aio in the same run, a call and a message of a stream: what gRPC for Python costs by itself.
Rounds are interleaved, every figure is the median of the rounds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.contestants import ROOT, Contestant, echo, headrace
from bench.processes import ALONE, cpu_s_by_role
from bench.report import CLIENT, machine_facts, table
from headrace import builtin_models
from protos.headrace.v1 import inference_pb2 as native
from protos.inference import grpc_service_pb2 as oip

PAGE = ROOT / "docs" / "benchmarks" / "small_tensors.md"
IN_FLIGHT = (1, 16, 64)
WARM_S, WINDOW_S = 0.4, 1.5


class Way(NamedTuple):
    """One way for 16 floats to the model and back."""

    title: str
    method: str
    request: bytes
    is_stream: bool = False
    is_echo: bool = False


class Figures(NamedTuple):
    """One way at one number in flight."""

    requests_per_s: float
    p50_ms: float
    server_ms: float
    """CPU milliseconds a request of all server processes; then of some of them, and of the load generator."""
    gateway_ms: float
    worker_ms: float
    client_ms: float


def main() -> None:
    """Run all rounds, print the table, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-flight", nargs="+", type=int, default=IN_FLIGHT)
    parser.add_argument("--no-write", action="store_true", help="only print")
    given = parser.parse_args()
    found: dict[tuple[int, str], list[Figures]] = {}
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        folder = Path(name)
        answer = folder / "answer"
        answer.write_bytes(_answer())
        builtin_models.fetch(folder / "models")
        with headrace(folder / "models") as server, echo("--answer", answer) as plain:
            for _ in range(given.rounds):
                for calls in given.in_flight:
                    for way in _ways():
                        figures = _measure(plain if way.is_echo else server, way, calls, folder / "request")
                        found.setdefault((calls, way.title), []).append(figures)
    text = _page(found, sys.argv[1:], round(time.monotonic() - started_s))
    print(text)
    if not given.no_write:
        PAGE.write_text(text)


def _ways() -> list[Way]:
    tensor = native.Tensor(name="INPUT0", datatype="FP32", shape=[1, 16], data=bytes(64))
    one = native.PredictRequest(model="identity", inputs=[native.Input(tensors=native.TensorList(tensors=[tensor]))])
    given = oip.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 16])
    infer = oip.ModelInferRequest(model_name="identity", inputs=[given], raw_input_contents=[bytes(64)])
    request, message = infer.SerializeToString(), native.PredictStreamRequest(id=1, request=one).SerializeToString()
    theirs, ours = "/inference.GRPCInferenceService/", "/headrace.v1.Inference/"
    return [
        Way("Predict", ours + "Predict", one.SerializeToString()),
        Way("PredictStream", ours + "PredictStream", message, is_stream=True),
        Way("ModelInfer", theirs + "ModelInfer", request),
        Way("ModelStreamInfer", theirs + "ModelStreamInfer", request, is_stream=True),
        Way("plain grpc.aio, call", "/bench.Echo/Answer", request, is_echo=True),
        Way("plain grpc.aio, stream", "/bench.Echo/Stream", request, is_stream=True, is_echo=True),
    ]


def _answer() -> bytes:
    given = oip.ModelInferResponse.InferOutputTensor(name="OUTPUT0", datatype="FP32", shape=[1, 16])
    return oip.ModelInferResponse(
        model_name="identity", model_version="0" * 16, outputs=[given], raw_output_contents=[bytes(64)]
    ).SerializeToString()


def _measure(server: Contestant, way: Way, calls: int, request: Path) -> Figures:
    request.write_bytes(way.request)
    program = ["bench.stream_load"] if way.is_stream else ["bench.load", "--json"]
    command = [sys.executable, "-m", *program, "--address", server.address, "--method", way.method]
    command += ["--payload", str(request), "--in-flight", str(calls)]
    command += ["--warm-s", str(WARM_S), "--window-s", str(WINDOW_S)]
    clocks: list[dict[str, float]] = []
    result: dict[str, Any] = {}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as generator:
        for line in generator.stdout or ():
            said = json.loads(line)
            if said["event"] == "result":
                result = said
            else:
                clocks.append(cpu_s_by_role(server.process))
    if generator.returncode or len(clocks) != 2 or result["errors"] or not result["requests"]:
        raise SystemExit(f"{way.title}, {calls} in flight: {result or generator.returncode}")
    before, after = clocks
    cpu_ms = {role: (after[role] - before.get(role, 0.0)) * 1e3 / result["requests"] for role in after}
    return Figures(
        result["requests"] / result["window_s"],
        result["p50_ms"],
        sum(cpu_ms.values()),
        cpu_ms.get("gateway", cpu_ms.get(ALONE, 0.0)),
        cpu_ms.get("worker", 0.0),
        result["cpu_s"] * 1e3 / result["requests"],
    )


def _page(found: dict[tuple[int, str], list[Figures]], arguments: list[str], seconds: int) -> str:
    command = f"python -m bench.small_tensors {' '.join(arguments)}".strip() if arguments else "make bench-small"
    rounds = len(next(iter(found.values())))
    rows = []
    for (calls, title), samples in found.items():
        rate, p50, *cpu = (median(values) for values in zip(*samples, strict=True))
        rows.append([title, str(calls), f"{rate:.0f}", f"{p50:.2f}", *(f"{value:.3f}" for value in cpu)])
    facts = ", ".join(f"{key} {value}" for key, value in machine_facts(("grpcio", "pyzmq", "uvloop")).items())
    headings = ["", "in flight", "req/s", "p50 ms", "CPU ms/req", "gateway", "worker", CLIENT]
    return (
        "# Small tensors: calls and streams beside plain gRPC\n\n"
        f"Written by `{command}` in {seconds} s. Every figure is the median of {rounds} interleaved rounds.\n"
        f"Machine: {facts}. One-minute load when it ended: {os.getloadavg()[0]:.1f}.\n"
        "The load generator runs on the same cores; its CPU is counted apart.\n\n"
        "16 floats in, 16 out, through `identity`: each a unary call (Predict, ModelInfer), or a message of one\n"
        "stream (PredictStream, ModelStreamInfer) with so many in flight. *Plain grpc.aio* parses nothing and sends\n"
        "the bytes of an answer; its one process stands under *gateway*. *CPU ms/req*: all server processes.\n\n"
        + table(headings, rows)
        + "\n"
    )


if __name__ == "__main__":
    main()
