"""What a row of EfficientNet-Lite0 costs through the server, beside the bare loop with the same settings.

    python -m bench.cpu_serving            print the table
    python -m bench.cpu_serving --write    and put it into docs/benchmarks/cpu_forward.md

The bare loop runs whole batches of 32 rows with the worker's own code, threads and allocator settings, and nothing
else; in turns with it, in the same process, the worker's engine runs the same rows as items of a batch. The server gets
one JPEG again and again, 128 calls in flight, so that it is never idle. Loop and server take turns; what is compared is
the CPU time of a row in the loop and in the worker's process, everything that it does included. On the same cores the
pool decodes and the load generator runs, so rows per second can't be compared; end to end, the table also has all
processes beside the bare loop that decodes each image, too.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.bare import measure
from bench.contestants import ROOT, Contestant, headrace, real_repository
from bench.photo import photo
from bench.processes import cpu_s_by_role
from protos.headrace.v1 import inference_pb2 as pb
from shared.arena import Arena, AttachedArena
from shared.clock import FOREVER_S, now_s
from shared.messages import BatchItem, RunBatch
from shared.pipeline_loader import load_pipeline
from shared.pipelines.image_classification import ImageClassification
from shared.repository import Repository
from shared.settings import Settings
from shared.tensors import Array, SlotRef, Tensor
from workers import host
from workers.engine import run_batch
from workers.loading import Loader
from workers.model_pool import Key

MODEL = "efficientnet-lite0"
ROWS = 32
IN_FLIGHT = 128
WARM_S, WINDOW_S = 2.5, 5.0
RESULT = ROOT / "docs" / "benchmarks" / "cpu_forward.md"
HEADING = "## Through the server"


class Round(NamedTuple):
    """CPU milliseconds per row."""

    bare: float
    """The network, from a batch of pixels to its classes."""
    engine: float
    """The same by the worker's engine, from items in an arena to their answers."""
    bare_with_decode: float
    worker: float
    """The worker's process."""
    server: float
    """All processes of the server."""
    batch_rows: float
    """Mean rows of the server's batches."""


def bare() -> dict[str, float]:
    """Milliseconds of CPU per row of whole batches: alone, in the worker's engine, with decoding; to run by itself."""
    host.keep_batch_memory()
    host.prepare_threads(host.cores())
    from workers.backends import torch_device  # noqa: PLC0415 - torch, only after the settings above

    settings = Settings(repository=ROOT / "models")
    key = Key(MODEL, Repository(settings.repository).current(MODEL))
    loaded = Loader(settings, torch_device.find("cpu", 0, host.cores())).load(key)
    pipeline = load_pipeline(Repository(settings.repository).open(MODEL), torch_allowed=True)
    if not isinstance(pipeline, ImageClassification):
        raise TypeError(f"{MODEL} is no image classifier")
    rows = np.random.default_rng(0).integers(0, 256, (ROWS, *pipeline.spec.inputs[0].shape), np.uint8)

    def forward(batch: Array) -> object:
        return loaded.runner.run([[batch]], len(batch), "fp32").outputs

    with _arena(rows) as (arena, items):
        engine = partial(run_batch, RunBatch(1, 1, items, ROWS), loaded, arena, now_s, set())
        alone, engined = _cpu_ms(partial(forward, rows), engine)
    decoding = measure(pipeline, forward, ROWS, WINDOW_S / 2)
    with_decode = decoding["cpu_s"] * 1e3 / decoding["requests"]
    return {"bare": alone / ROWS, "engine": engined / ROWS, "bare_with_decode": with_decode}


@contextmanager
def _arena(rows: Array) -> Iterator[tuple[AttachedArena, list[BatchItem]]]:
    """The rows as the gateway hands them over: each one an item in a slot."""
    owner = Arena.create(1 << (2 * rows.nbytes - 1).bit_length())
    arena = AttachedArena.attach(owner.fd, owner.nbytes)
    items = []
    for number, row in enumerate(rows):
        slot = SlotRef(number * row.nbytes, row.nbytes)
        shape = (1, *row.shape)
        arena.array(slot, "UINT8", shape)[...] = row
        items.append(BatchItem(number, FOREVER_S, 1, [Tensor("image", "UINT8", shape, slot)], []))
    yield arena, items
    arena.close()
    owner.close()


def _cpu_ms(*calls: Callable[[], object]) -> list[float]:
    """Mean CPU milliseconds of each call, in turns over a window."""
    spent = [0.0] * len(calls)
    turns, until_s = 0, time.monotonic() + WINDOW_S
    while turns < 3 or time.monotonic() < until_s:
        for number, call in enumerate(calls):
            started_s = time.process_time()
            call()
            spent[number] += time.process_time() - started_s
        turns += 1
    return [seconds * 1e3 / turns for seconds in spent]


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
        _line(f"the worker's engine by itself, {ROWS} rows a batch", best.bare, best.engine),
        _line("the worker's process in the server", best.bare, best.worker),
        _line("end to end, JPEG to labels, all processes", best.bare_with_decode, best.server),
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
                rounds.append(Round(**json.loads(done.stdout.splitlines()[-1]), **through(server, request)))
                print(rounds[-1], file=sys.stderr)
    from bench.cpu_forward import machine  # noqa: PLC0415 - imports torch, after all is measured

    text = section(rounds, f"best of {given.rounds} rounds, {machine()}")
    print(text)
    if given.write:
        RESULT.write_text(inserted(RESULT.read_text(encoding="utf-8"), text), encoding="utf-8")


if __name__ == "__main__":
    main()
