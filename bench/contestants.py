"""Starts and stops what is measured: the echo server, and `headrace serve` with a repository and ports of its own."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.repository import Meta
from shared.repository_writer import add_version

ROOT = Path(__file__).parents[1]
READY_LIMIT_S = 60.0
"""Loading and warming the real network takes a few seconds; far longer means it will not come."""
STOP_LIMIT_S = 15.0


class Contestant(NamedTuple):
    """A server that answers now."""

    address: str
    process: psutil.Process
    start_s: float
    """From the start of the process to the first moment it was ready."""
    http: str = ""
    """host:port of the HTTP side; empty where there is none."""


@contextmanager
def echo(*files: str | Path) -> Iterator[Contestant]:
    """Plain grpc.aio; `files` are the echo's arguments."""
    started_s = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "bench.echo", *files], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            if process.stdout is None:
                raise RuntimeError("the echo server has no output")
            port = int(process.stdout.readline())
            yield Contestant(f"127.0.0.1:{port}", psutil.Process(process.pid), time.monotonic() - started_s)
        finally:
            _stop(process)


@contextmanager
def headrace(repository: Path, settings: str = "", ready_limit_s: float = READY_LIMIT_S) -> Iterator[Contestant]:
    """The whole server on free ports, in a runtime folder of its own; with defaults but for `settings`, YAML."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        address, http = f"127.0.0.1:{_free_port()}", f"127.0.0.1:{_free_port()}"
        config, log = Path(folder, "headrace.yaml"), Path(folder, "log")
        config.write_text(
            f"repository: {repository.resolve()}\n"
            f"runtime_dir: {folder}/run\n"
            f"gateway:\n  grpc_address: {address}\n  http_address: {http}\n"
            f"log:\n  level: warning\n{settings}"
        )
        started_s = time.monotonic()
        with (
            log.open("wb") as output,
            subprocess.Popen(
                [sys.executable, "-m", "headrace", "serve", "--config", config],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            try:
                _wait_until_serving(address, process, log, ready_limit_s)
                yield Contestant(address, psutil.Process(process.pid), time.monotonic() - started_s, http)
            finally:
                _stop(process)


def simulated_repository(folder: Path, a_ms: float, b_ms: float, max_rows: int | None = None) -> Path:
    """A repository with one classifier of 1,000 classes whose accelerator takes a + b·rows milliseconds and no CPU.

    `max_rows` is its largest batch; the server's default without.
    """
    model = folder / "models" / "simulated"
    model.mkdir(parents=True)
    (model / "model.yaml").write_text(
        "pipeline: image_classification\nbackend: simulated\npreprocessing:\n  classes: 1000\n"
        + (f"batching:\n  max_rows: {max_rows}\n" if max_rows else "")
    )
    weights = folder / "simulated.json"
    weights.write_text(json.dumps({"a_ms": a_ms, "b_ms": b_ms}))
    add_version(model.parent, "simulated", {"simulated.json": weights}, Meta(source="bench"), make_current=True)
    return model.parent


def real_repository(folder: Path, model: str) -> Path:
    """A repository with only this model of ./models, so that nothing else is loaded beside it."""
    source, target = ROOT / "models" / model, folder / "models" / model
    if not (source / "versions").is_dir():
        raise SystemExit(f"{model} is not fetched: run 'headrace models fetch {model}' first")
    shutil.copytree(source, target)
    return target.parent


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_serving(address: str, process: subprocess.Popen[bytes], log: Path, ready_limit_s: float) -> None:
    limit_s = time.monotonic() + ready_limit_s
    with grpc.insecure_channel(address, options=[("grpc.max_reconnect_backoff_ms", 200)]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while process.poll() is None and time.monotonic() < limit_s:
            try:
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
            except grpc.RpcError:
                answer = None
            if answer is not None and answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            time.sleep(0.02)
    said = re.sub(r"\s+", " ", log.read_text(errors="replace"))[-2000:]
    raise SystemExit(f"headrace serve was not ready within {ready_limit_s:.0f} s (exit code {process.poll()}): {said}")


def _stop(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        print(f"killed after {STOP_LIMIT_S:.0f} s: {process.args!r}", file=sys.stderr)
