"""One network on the device without a server, in a process of its own. Prints one JSON line. See `bench/gpu.py`.

`plain`: what one writes first: pinned rows to the device, normalise, network, head, back to the host, one after
another. `worker`: the worker's own runner, with its graphs and two passes under way.
"""

import argparse
import json
import time
from collections import deque
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from bench import gpu_facts
from bench.gpu_facts import Passed
from bench.photo import photo
from shared.arena import Arena, AttachedArena
from shared.settings import BatchingSettings, Settings, WorkerSettings
from shared.tensors import Array, SlotRef
from workers import host

AGREEMENT_ROWS = 64


def main() -> None:
    """Load the version as a worker does, and measure it at each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--precision", choices=["fp16", "fp32"], required=True)
    parser.add_argument("--rows", type=int, nargs="+", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--no-graphs", action="store_true")
    given = parser.parse_args()
    host.keep_batch_memory()
    host.prepare_threads(host.cores())
    print(json.dumps(Loop(given).run()))


class Loop:
    """A loaded version and its rows."""

    def __init__(self, given: argparse.Namespace) -> None:
        import torch  # noqa: PLC0415 - only after the settings of `main`

        from shared.repository import Repository  # noqa: PLC0415 - beside torch
        from workers.backends import examples, torch_device  # noqa: PLC0415 - as above
        from workers.backends.torch_runner import TorchRunner  # noqa: PLC0415 - as above
        from workers.loading import Loader  # noqa: PLC0415 - as above
        from workers.model_pool import Key  # noqa: PLC0415 - as above

        self._torch = torch
        self._given = given
        rows = sorted(given.rows)
        settings = Settings(
            repository=given.repository,
            batching=BatchingSettings(max_rows=rows[-1], sizes=tuple(rows)),
            worker=WorkerSettings(precision=given.precision, cuda_graphs=not given.no_graphs),
        )
        self._device = torch_device.find(given.device, 0, host.cores())
        version = Repository(given.repository).current(given.model)
        self._loaded = Loader(settings, self._device).load(Key(given.model, version))
        if not isinstance(self._loaded.runner, TorchRunner):
            raise TypeError(f"{given.model} does not run on torch")
        self._runner = self._loaded.runner
        # The rows lie in a pinned arena, as the server's do.
        (example,) = examples.rows(self._loaded.spec.inputs, AGREEMENT_ROWS)
        (spec,) = self._loaded.spec.inputs
        owner = Arena.create(max(1 << 20, 4 * example.nbytes))
        arena = AttachedArena.attach(owner.fd, owner.nbytes)
        self._device.attach(arena.memory)
        self._rows = arena.array(SlotRef(0, example.nbytes), spec.datatype, example.shape)
        self._rows[...] = crops(AGREEMENT_ROWS, example.shape[1])

    def run(self) -> dict[str, Any]:
        """Everything that one line of the report needs."""
        sizes = {rows: self._sizes(rows) for rows in self._given.rows}
        return {
            "model": self._given.model,
            "precision": self._runner.precision,
            "graphs": list(getattr(getattr(self._runner, "graphs", None), "sizes", ())),
            "memory_bytes": self._runner.memory_bytes,
            "peak_bytes": self._peak_bytes(),
            "sizes": sizes,
            "classes": self._classes(),
        }

    def _sizes(self, rows: int) -> dict[str, float]:
        passes = self._worker(rows)
        return {
            "plain_per_s": self._plain(rows),
            "worker_per_s": gpu_facts.per_s(passes, rows),
            "p99_ms": gpu_facts.p99_ms(passes),
            "idle": gpu_facts.idle_share(passes),
            "overlap": gpu_facts.overlap_share(passes),
        }

    def _plain(self, rows: int) -> float:
        torch, device = self._torch, self._device.device
        source = torch.from_numpy(self._rows[:rows])
        passes, started_s = 0, time.perf_counter()
        with torch.inference_mode():
            while passes < 3 or time.perf_counter() - started_s < self._given.seconds:
                outputs = self._runner.forward([source.to(device, non_blocking=True)], self._runner.precision)
                for output in outputs:
                    output.cpu()
                passes += 1
        return passes * rows / (time.perf_counter() - started_s)

    def _worker(self, rows: int) -> list[Passed]:
        runner, items = self._runner, [[self._rows[row : row + 1]] for row in range(rows)]
        under_way: deque[tuple[float, Any]] = deque()
        passed: list[Passed] = []
        first: Any = None
        started = 0
        until_s = time.perf_counter() + self._given.seconds
        while time.perf_counter() < until_s or len(passed) < 3:
            while len(under_way) < runner.lanes:
                asked_s = time.perf_counter()
                under_way.append((asked_s, runner.start(items, rows, runner.precision, started % runner.lanes)))
                started += 1
            asked_s, one = under_way.popleft()
            forward = one.wait()
            answered_s = time.perf_counter()
            first = first or one
            passed.append(Passed(asked_s, answered_s, *_spans(first, one, answered_s, forward)))
        for _, one in under_way:
            one.wait()
        return passed

    def _classes(self) -> list[int]:
        """The likeliest class of each example row."""
        most = max(self._given.rows)
        found: list[int] = []
        for row in range(0, AGREEMENT_ROWS, most):
            part = self._rows[row : row + most]
            outputs = self._runner.run([[part]], len(part), self._runner.precision).outputs
            found += outputs[1][:, 0].tolist() if len(outputs) > 1 else outputs[0].argmax(1).tolist()
        return found

    def _peak_bytes(self) -> int:
        return int(self._torch.cuda.max_memory_reserved(self._device.device)) if self._device.is_cuda else 0


def crops(count: int, pixels: int) -> Array:
    """uint8 `[count, pixels, pixels, 3]`: parts of the photo at places that are the same each time."""
    image = cv2.imdecode(np.frombuffer(photo(), np.uint8), cv2.IMREAD_COLOR_RGB)
    if image is None:
        raise RuntimeError("OpenCV can't read the test image")
    random = np.random.default_rng(0)
    tops = random.integers(0, image.shape[0] - pixels + 1, count)
    lefts = random.integers(0, image.shape[1] - pixels + 1, count)
    return np.stack([image[t : t + pixels, left : left + pixels] for t, left in zip(tops, lefts, strict=True)])


def _spans(first: Any, one: Any, answered_s: float, forward: Any) -> tuple[tuple[float, float], tuple[float, float]]:  # noqa: ANN401 - passes of any runner
    """When a pass was copied and computed: by the device's clock where it has one, else by the host's."""
    marks = getattr(one, "marks", None)
    if marks is None:
        run = (answered_s - forward.run_s, answered_s)
        return (run[0] - forward.copy_s, run[0]), run
    began, copied, started, ended = (
        mark.after_s(first.marks.began) for mark in (marks.began, marks.copied, marks.started, marks.ended)
    )
    return (began, copied), (started, ended)


if __name__ == "__main__":
    main()
