"""What a row of EfficientNet-Lite0 costs through the server, beside the bare loop with the same settings.

    python -m bench.cpu_serving            print the table
    python -m bench.cpu_serving --write    and put it into docs/benchmarks/cpu_forward.md

The bare loop runs whole batches of 32 rows with the worker's own code, threads and allocator settings, and nothing
else. The server gets one JPEG again and again, 128 calls in flight, so that its batches are full. They take turns; what
is compared is the CPU time of a row in the loop and in the worker's process, everything that it does included. On the
same cores the pool decodes and the load generator runs, so rows per second can't be compared; end to end, the table
also has all processes beside the bare loop that decodes each image, too.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.contestants import ROOT, Contestant, headrace, real_repository
from bench.photo import photo
from bench.processes import cpu_s_by_role
from protos.headrace.v1 import inference_pb2 as pb

MODEL = "efficientnet-lite0"
ROWS = 32
IN_FLIGHT = 128
WARM_S, WINDOW_S = 2.5, 5.0
RESULT = ROOT / "docs" / "benchmarks" / "cpu_forward.md"
HEADING = "## Through the server"


class Round(NamedTuple):
    """CPU milliseconds per row."""

    bare: float
    """The network alone, with everything around it that the worker does per batch."""
    bare_with_decode: float
    worker: float
    """The worker's process."""
    server: float
    """All processes of the server."""
    batch_rows: float
    """Mean rows of the server's batches."""


def bare() -> dict[str, float]:
    """Milliseconds of CPU per row of whole batches, without and with decoding; in a process of its own."""
    from bench.bare import measure, real  # noqa: PLC0415 - imports torch with the worker's settings

    forward, pipeline = real(ROOT / "models", MODEL)
    rows = np.random.default_rng(0).integers(0, 256, (ROWS, *pipeline.spec.inputs[0].shape), np.uint8)
    alone = _cpu_ms(lambda: forward(rows)) / ROWS
    decoding = measure(pipeline, forward, ROWS, WINDOW_S / 2)
    return {"bare": alone, "bare_with_decode": decoding["cpu_s"] * 1e3 / decoding["requests"]}


def _cpu_ms(call: Callable[[], object]) -> float:
    """Mean CPU milliseconds of one call, over half a window."""
    call()
    calls, until_s, started_s = 0, time.monotonic() + WINDOW_S / 2, time.process_time()
    while calls < 2 or time.monotonic() < until_s:
        call()
        calls += 1
    return (time.process_time() - started_s) * 1e3 / calls


def through(server: Contestant, request: Path) -> dict[str, float]:
    """Milliseconds of CPU per row, of the worker and of the whole server, while it is kept busy."""
    command = [sys.executable, "-m", "bench.load", "--address", server.address]
    command += ["--method", "/headrace.v1.Inference/Predict", "--payload", str(request), "--in-flight", str(IN_FLIGHT)]
    command += ["--warm-s", str(WARM_S), "--window-s", str(WINDOW_S), "--json"]
    seen: list[tuple[dict[str, float], float, float]] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as generator:
        for line in generator.stdout or ():
            said: dict[str, Any] = json.loads(line)
            if said["event"] != "result":
                seen.append((cpu_s_by_role(server.process), *_ran(server)))
            elif said.get("errors"):
                raise SystemExit(f"calls failed: {said['errors']}")
    if generator.returncode or len(seen) != 2:
        raise SystemExit(f"the load generator failed (exit code {generator.returncode})")
    (before, rows_before, batches_before), (after, rows_after, batches_after) = seen
    rows = rows_after - rows_before
    spent = {role: (after[role] - before.get(role, 0.0)) * 1e3 / rows for role in after}
    return {
        "worker": spent["worker"],
        "server": sum(spent.values()),
        "batch_rows": rows / max(1.0, batches_after - batches_before),
    }


def _ran(server: Contestant) -> tuple[float, float]:
    """Rows and batches that the worker has run so far."""
    with urllib.request.urlopen(f"http://{server.http}/metrics", timeout=5) as answer:
        return totals(answer.read().decode())


def totals(metrics: str) -> tuple[float, float]:
    """Rows and batches of all workers, from `/metrics`."""
    samples = [line.rpartition(" ") for line in metrics.splitlines() if line.startswith("headrace_worker_")]
    rows, batches = (
        sum(float(value) for name, _, value in samples if name.startswith(f"headrace_worker_{what}_total"))
        for what in ("rows", "batches")
    )
    return rows, batches


def section(rounds: list[Round], facts: str) -> str:
    """The section of the page, from the best round of each: what disturbs on a shared machine only ever adds."""
    best = Round(*(min(values) for values in zip(*rounds, strict=True)))
    rows = sum(each.batch_rows for each in rounds) / len(rounds)
    lines = [
        HEADING,
        "",
        f"Made by `python -m bench.cpu_serving --write`; {facts}.",
        f"The server's batches had {rows:.1f} rows.",
        "",
        "| CPU ms a row | bare loop | server | ratio |",
        "| --- | ---: | ---: | ---: |",
        _line(f"the network ({ROWS} rows a batch; the worker's process)", best.bare, best.worker),
        _line("end to end, JPEG to labels (all processes)", best.bare_with_decode, best.server),
    ]
    return "\n".join(lines) + "\n"


def _line(what: str, bare: float, server: float) -> str:
    return f"| {what} | {bare:.2f} | {server:.2f} | {server / bare:.3f} × |"


def inserted(page: str, new: str) -> str:
    """The page with this section in place of an earlier one, before the tables of the forward pass."""
    before, results, after = page.partition("## Results")
    return f"{before.partition(HEADING)[0].rstrip()}\n\n{new}\n{results}{after}"


def main() -> None:
    """Measure in turns, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"put the table into {RESULT.relative_to(ROOT)}")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bare:
        print(json.dumps(bare()))
        return
    rounds = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        request = Path(folder, "request")
        request.write_bytes(pb.PredictRequest(inputs=[pb.Input(image=photo())]).SerializeToString())
        with headrace(real_repository(Path(folder), MODEL)) as server:
            for _ in range(given.rounds):
                command = [sys.executable, "-m", "bench.cpu_serving", "--bare"]
                done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
                rounds.append(Round(**json.loads(done.stdout), **through(server, request)))
                print(rounds[-1], file=sys.stderr)
    from bench.cpu_forward import machine  # noqa: PLC0415 - imports torch, after all is measured

    text = section(rounds, f"best of {given.rounds} rounds, {machine()}")
    print(text)
    if given.write:
        RESULT.write_text(inserted(RESULT.read_text(encoding="utf-8"), text), encoding="utf-8")


if __name__ == "__main__":
    main()
