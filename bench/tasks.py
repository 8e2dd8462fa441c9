"""`make bench-tasks`: every task through the whole server beside the bare loop of its model, then all of them at once.

Bare: one process that prepares, runs and reads batches of 8 with the worker's own code, threads and allocator settings,
and nothing else. The server: a closed loop of 32 calls in flight, whose generator shares the cores. Both in turn in
each round, while the other one is idle. At last all tasks ask one worker at the same time, within a budget of memory.
Text that grows has a page of its own (`bench.generation`); in the mixed load it takes part.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.contestants import ROOT, Contestant, headrace
from bench.records import percentile
from bench.tasks_report import Mixed, Round, page
from headrace import zoo
from headrace.client import Client
from headrace.zoo_samples import fetch_photos, fetch_pictures
from protos.headrace.v1 import inference_pb2 as pb
from shared.clock import now_s
from shared.pipeline import RawInput
from shared.pipeline_loader import load_pipeline
from shared.repository import Repository
from shared.settings import Settings
from shared.tensors import DTYPES
from workers import host
from workers.loaded import Key
from workers.loading import Loader

PAGE = ROOT / "docs" / "benchmarks" / "tasks.md"
ROWS, IN_FLIGHT, MIXED_IN_FLIGHT = 8, 32, 8
WARM_S, WINDOW_S, MIXED_S = 2.0, 5.0, 20.0
BUDGET_BYTES = 1_500_000_000
"""Of all five models together."""
GENERATOR, QUESTION = "smollm2-135m", [{"role": "user", "content": "What is the capital of France?"}]
RIGHT = "The capital of France is Paris."
TEXT = "How do I reset my password? I forgot my login credentials, and nobody answers the telephone."


class Task(NamedTuple):
    """What is asked of a model."""

    model: str
    kind: str
    """The field of an input."""
    data: Callable[[], bytes]


def _photo() -> bytes:
    return fetch_photos(ROOT / "models")[16].path.read_bytes()


def _picture() -> bytes:
    return fetch_pictures(ROOT / "models")[0].read_bytes()


TASKS = {
    "image classification": Task(zoo.DEFAULT_MODEL, "image", _photo),
    "object detection": Task("yolov3-tiny", "image", _picture),
    "text embedding": Task("all-minilm-l6-v2", "text", TEXT.encode),
    "text classification": Task("toxic-comment", "text", TEXT.encode),
}


def bare(repository: Path, task: Task, window_s: float) -> dict[str, float]:
    """Items a second of whole batches, preparation and reading included; to run in a process by itself."""
    host.keep_batch_memory()
    host.prepare_threads(host.cores())
    from workers.backends import torch_device  # noqa: PLC0415 - torch, only after the settings above

    settings = Settings(repository=repository)
    version = Repository(repository).open(task.model)
    loaded = Loader(settings, torch_device.find("cpu", 0, host.cores())).load(Key(task.model, version.version))
    pipeline = load_pipeline(version, torch_allowed=True)
    options = pipeline.parse_options({})
    raw = RawInput(kind=task.kind, data=task.data())  # type: ignore[arg-type]  # one of the kinds
    fixed = [spec for spec in pipeline.spec.inputs if spec.row_nbytes is not None]
    outs = [[np.empty((1, *spec.shape), DTYPES[spec.datatype]) for spec in fixed] for _ in range(ROWS)]

    def once() -> None:
        prepared = [pipeline.preprocess(raw, options, out) for out in outs]
        outputs = loaded.runner.run([one.tensors for one in prepared], ROWS, "fp32").outputs
        for row, one in enumerate(prepared):
            pipeline.postprocess([output[row : row + 1] for output in outputs], one.context, options)

    once()
    once()
    done, started_s, started_cpu_s = 0, now_s(), time.process_time()
    while now_s() - started_s < window_s:
        once()
        done += ROWS
    return {"rate": done / (now_s() - started_s), "cpu_ms": (time.process_time() - started_cpu_s) * 1e3 / done}


def asked(server: Contestant, request: Path, in_flight: int, window_s: float) -> "subprocess.Popen[str]":
    """The load generator, begun."""
    command = [sys.executable, "-m", "bench.load", "--address", server.address, "--json"]
    command += ["--method", "/headrace.v1.Inference/Predict", "--payload", str(request)]
    command += ["--in-flight", str(in_flight), "--warm-s", str(WARM_S), "--window-s", str(window_s)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def told(generator: "subprocess.Popen[str]") -> dict[str, Any]:
    """Its result. Ends the benchmark when a call failed."""
    with generator:
        lines = [json.loads(line) for line in generator.stdout or ()]
    result = next((line for line in lines if line["event"] == "result"), None)
    if generator.returncode or result is None or result.get("errors"):
        raise SystemExit(f"the load generator failed: {result or generator.returncode}")
    return {**result, "rate": result["requests"] / result["window_s"]}


def all_at_once(server: Contestant, requests: dict[str, Path]) -> list[Mixed]:
    """Every task in a closed loop of its own for the same window, text that grows among them."""
    texts: list[float] = []
    wrong: set[str] = set()
    stop = threading.Event()

    def grow() -> None:
        with Client(server.address, timeout_s=300.0) as client:
            while not stop.is_set():
                started_s = now_s()
                wrong.update({client.generate(QUESTION, model=GENERATOR, max_tokens=16).whole().text} - {RIGHT})
                texts.append(now_s() - started_s)

    threads = [threading.Thread(target=grow) for _ in range(2)]
    with ExitStack() as stack:
        generators = {
            name: stack.enter_context(asked(server, request, MIXED_IN_FLIGHT, MIXED_S))
            for name, request in requests.items()
        }
        for thread in threads:
            thread.start()
        found = {name: told(generator) for name, generator in generators.items()}
        seconds = WARM_S + MIXED_S
        stop.set()
        for thread in threads:
            thread.join()
    if wrong:
        raise SystemExit(f"a text came out wrong: {wrong}")
    texts.sort()
    return [
        *(Mixed(name, one["rate"], one["p50_ms"], one["p99_ms"]) for name, one in found.items()),
        Mixed("text generation", len(texts) / seconds, *(percentile(texts, q) * 1e3 for q in (0.5, 0.99))),
    ]


def main() -> None:
    """Measure in turns, print the page, write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--window-s", type=float, default=WINDOW_S, help="of each measurement (default: %(default)g)")
    parser.add_argument("--no-write", action="store_true", help="only print")
    parser.add_argument("--bare", choices=TASKS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    repository = ROOT / ".cache" / "demo" / "models"
    if given.bare:
        print(json.dumps(bare(repository, TASKS[given.bare], given.window_s)))
        return
    for model in (*(task.model for task in TASKS.values()), GENERATOR):
        zoo.fetch(model, repository, cache=ROOT / ".cache")
    started_s = now_s()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        requests = _requests(Path(folder))
        settings = f"worker:\n  memory_budget_bytes: {BUDGET_BYTES}\n"
        with headrace(repository, settings, 300.0) as server:
            rounds = [
                _round(server, name, requests[name], given.window_s) for _ in range(given.rounds) for name in TASKS
            ]
            mixed = all_at_once(server, requests)
    words = " ".join(sys.argv[1:])
    command = f"python -m bench.tasks {words}" if words else "make bench-tasks"
    text = page(rounds, mixed, command, round(now_s() - started_s))
    print(text)
    if not given.no_write:
        PAGE.write_text(text)


def _requests(folder: Path) -> dict[str, Path]:
    """One serialised request for each task."""
    found = {}
    for name, task in TASKS.items():
        data = task.data()
        one = pb.Input(image=data) if task.kind == "image" else pb.Input(text=data.decode())
        found[name] = folder / task.model
        found[name].write_bytes(pb.PredictRequest(model=task.model, inputs=[one]).SerializeToString())
    return found


def _round(server: Contestant, name: str, request: Path, window_s: float) -> Round:
    command = [sys.executable, "-m", "bench.tasks", "--bare", name, "--window-s", str(window_s)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    alone = json.loads(done.stdout.splitlines()[-1])
    served = told(asked(server, request, IN_FLIGHT, window_s))
    one = Round(name, alone["rate"], served["rate"], served["p50_ms"], served["p99_ms"])
    print(one, file=sys.stderr)
    return one


if __name__ == "__main__":
    main()
