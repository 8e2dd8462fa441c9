"""The floor: decode, resize and one batched forward in a loop, one process, no server. Prints one JSON line.

It uses the server's own decoding and network, so that the difference to the server is the serving alone.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.photo import photo
from bench.records import percentile
from shared.pipeline import RawInput
from shared.pipeline_loader import load_pipeline
from shared.pipelines.image_classification import ImageClassification, ImageClassificationConfig
from shared.repository import Repository
from shared.tensors import Array

Forward = Callable[[Array], object]
"""uint8 [n, 224, 224, 3] → the best classes."""


def simulated(a_ms: float, b_ms: float) -> Forward:
    """The stand-in of the `simulated` backend: an accelerator that takes a + b·rows and no CPU."""

    def forward(batch: Array) -> object:
        time.sleep((a_ms + b_ms * len(batch)) / 1e3)
        return None

    return forward


def real(repository: Path, model: str) -> tuple[Forward, ImageClassification]:
    """A model of the repository in float32 on the CPU, loaded and run by the worker's own backend."""
    from workers import host  # noqa: PLC0415 - the worker's code only where it is measured

    host.keep_batch_memory()
    host.prepare_threads(host.cores())
    from workers.backends import torch_backend, torch_device  # noqa: PLC0415 - torch, only after the settings above

    version = Repository(repository).open(model)
    pipeline = load_pipeline(version, torch_allowed=True)
    if not isinstance(pipeline, ImageClassification):
        raise TypeError(f"{model} is no image classifier")
    device = torch_device.find("cpu", 0, host.cores())
    runner = torch_backend.load(version, pipeline, device, "fp32")

    def forward(batch: Array) -> object:
        return runner.run([[batch]], len(batch), "fp32").outputs

    return forward, pipeline


def measure(pipeline: ImageClassification, forward: Forward, rows: int, window_s: float) -> dict[str, float]:
    """Whole batches for about `window_s`; a request's latency is its batch's."""
    item = RawInput(kind="image", data=photo())
    options = pipeline.parse_options({})
    batch = np.zeros((rows, *pipeline.spec.inputs[0].shape), np.uint8)

    def once() -> None:
        for row in range(rows):
            pipeline.preprocess(item, options, [batch[row : row + 1]])
        forward(batch)

    once()
    once()
    latencies: list[float] = []
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    while time.perf_counter() - started_s < window_s or len(latencies) < 2:
        before_s = time.perf_counter()
        once()
        latencies.append(time.perf_counter() - before_s)
    window_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    latencies.sort()
    return {
        "requests": len(latencies) * rows,
        "window_s": window_s,
        "cpu_s": cpu_s,
        "p50_ms": percentile(latencies, 0.5) * 1e3,
        "p99_ms": percentile(latencies, 0.99) * 1e3,
    }


def main() -> None:
    """Measure one kind of forward at each batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", required=True, type=int, nargs="+")
    parser.add_argument("--window-s", type=float, default=2.0)
    parser.add_argument("--repository", type=Path, default=Path("models"))
    parser.add_argument("--model", help="a real model of the repository; else the simulated accelerator")
    parser.add_argument("--a-ms", type=float, default=2.0)
    parser.add_argument("--b-ms", type=float, default=0.05)
    given = parser.parse_args()
    if given.model:
        forward, pipeline = real(given.repository, given.model)
    else:
        forward = simulated(given.a_ms, given.b_ms)
        pipeline = ImageClassification(ImageClassificationConfig(classes=1000), Path(), ())
    print(json.dumps({rows: measure(pipeline, forward, rows, given.window_s) for rows in given.rows}))


if __name__ == "__main__":
    main()
