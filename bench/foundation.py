"""`make bench`: what the server costs beside the bare loop and plain gRPC, measured in one go on one machine.

(a) bare loop   decode + resize + batched forward, one process, no server
(b) echo        plain grpc.aio: the same request bytes in; out, the same bytes (`echo`) or a real answer (`grpc`)
(c) headrace    `headrace serve` with default settings

for one 500×375 JPEG, with the `simulated` accelerator (2 ms + 0.05 ms a row, no CPU) and with the real network on the
CPU; 1, 16 and 64 calls in flight. Rounds are interleaved, every figure is the median of the rounds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.contestants import ROOT, Contestant, echo, headrace, real_repository, simulated_repository
from bench.photo import photo
from bench.processes import ALONE, cpu_s_by_role, rss_mb
from bench.report import CLIENT, Sample, medians, write
from protos.headrace.v1 import inference_pb2 as pb

A_MS, B_MS = 2.0, 0.05
MODEL = "efficientnet-lite0"
PREDICT = "/headrace.v1.Inference/Predict"
IN_FLIGHT = (1, 16, 64)
MAX_ROWS = 32


class Window(NamedTuple):
    """How long one figure is measured."""

    warm_s: float
    window_s: float


FAST = Window(0.5, 3.0)
SLOW = Window(2.5, 6.0)
"""The real network answers some 30 rows a second: 64 in flight take two seconds to come round."""


def main() -> None:
    """Run all rounds, print the tables, write JSON and markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=["simulated", "real"], choices=["simulated", "real"])
    parser.add_argument("--in-flight", nargs="+", type=int, default=IN_FLIGHT)
    parser.add_argument("--no-write", action="store_true", help="only print")
    given = parser.parse_args()
    started_s = time.monotonic()
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        bench = Bench(Path(folder), given.in_flight)
        for number in range(1, given.rounds + 1):
            print(f"round {number} of {given.rounds}, {time.monotonic() - started_s:.0f} s", file=sys.stderr)
            for kind in given.kinds:
                samples += bench.round(kind)
    command = " ".join(["make bench"] if len(sys.argv) == 1 else ["python -m bench.foundation", *sys.argv[1:]])
    facts = {"command": command, "rounds": given.rounds, "seconds": round(time.monotonic() - started_s)}
    write(medians(samples), samples, facts, folder=None if given.no_write else ROOT)
    failed = [sample for sample in samples if sample.errors]
    if failed:
        raise SystemExit(f"calls failed: {[(s.name, s.kind, s.in_flight, s.errors) for s in failed]}")


class Bench:
    """The files of one run, and its contestants."""

    def __init__(self, folder: Path, in_flight: Iterable[int]) -> None:
        self._in_flight = tuple(in_flight)
        self._request = folder / "request"
        self._request.write_bytes(pb.PredictRequest(inputs=[pb.Input(image=photo())]).SerializeToString())
        labels = [pb.Label(index=n, name="a name of twenty chars", score=0.2) for n in range(5)]
        answer = pb.PredictResponse(model=MODEL, version="0" * 16, request_id="0" * 32)
        answer.results.add(classification=pb.Classification(labels=labels))
        self._answer = folder / "answer"
        self._answer.write_bytes(answer.SerializeToString())
        self._folder = folder
        self._repositories: dict[str, Path] = {}

    def round(self, kind: str) -> list[Sample]:
        """(a), (b) and (c) once."""
        window = FAST if kind == "simulated" else SLOW
        found = self._bare(kind)
        if kind == "simulated":
            with echo("--answer", self._answer) as server:
                for name, method in (("echo", "/bench.Echo/Same"), ("grpc", "/bench.Echo/Answer")):
                    found += [self._load(server, method, calls, window, (name, "")) for calls in self._in_flight]
        with headrace(self._repository(kind)) as server:
            found += [self._load(server, PREDICT, calls, window, ("headrace", kind)) for calls in self._in_flight]
        return found

    def _repository(self, kind: str) -> Path:
        if kind not in self._repositories:
            folder = self._folder / kind
            folder.mkdir()
            made = simulated_repository(folder, A_MS, B_MS) if kind == "simulated" else real_repository(folder, MODEL)
            self._repositories[kind] = made
        return self._repositories[kind]

    def _bare(self, kind: str) -> list[Sample]:
        rows = {calls: min(calls, MAX_ROWS) for calls in self._in_flight}
        command = [sys.executable, "-m", "bench.bare", "--window-s", "2" if kind == "simulated" else "3"]
        command += ["--a-ms", str(A_MS), "--b-ms", str(B_MS)] if kind == "simulated" else ["--model", MODEL]
        done = subprocess.run(
            [*command, "--rows", *(str(value) for value in rows.values())],
            cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        by_rows = json.loads(done.stdout)
        return [
            Sample.of(("bare", kind), calls, by_rows[str(value)], {ALONE: by_rows[str(value)]["cpu_s"]})
            for calls, value in rows.items()
        ]

    def _load(self, server: Contestant, method: str, calls: int, window: Window, name: tuple[str, str]) -> Sample:
        command = [sys.executable, "-m", "bench.load", "--address", server.address, "--method", method]
        command += ["--payload", str(self._request), "--in-flight", str(calls)]
        command += ["--warm-s", str(window.warm_s), "--window-s", str(window.window_s), "--json"]
        clocks: list[dict[str, float]] = []
        result: dict[str, float] = {}
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as generator:
            for line in generator.stdout or ():
                said = json.loads(line)
                if said["event"] == "result":
                    result = said
                else:
                    clocks.append(cpu_s_by_role(server.process))
        if generator.returncode or len(clocks) != 2:
            raise SystemExit(f"the load generator failed (exit code {generator.returncode}) against {name}")
        before, after = clocks
        spent = {role: after[role] - before.get(role, 0.0) for role in after}
        sample = Sample.of(name, calls, result, {**spent, CLIENT: result["cpu_s"]})
        return msgspec.structs.replace(sample, rss_mb=rss_mb(server.process), start_s=server.start_s)


if __name__ == "__main__":
    main()
