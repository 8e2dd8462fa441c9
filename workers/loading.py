"""From a name and version to a warm, measured, ready version. Runs on the model pool's thread."""

import contextlib
from collections.abc import Callable
from typing import Any

from shared.clock import now_s
from shared.errors import HeadraceError, StartupError
from shared.logs import get_logger
from shared.pipeline import Pipeline
from shared.pipeline_loader import load_pipeline
from shared.repository import ModelVersion, Repository
from shared.settings import Settings
from shared.tensors import Array
from workers import estimates
from workers.backends import examples, numpy_backend, simulated
from workers.backends.base import Device, LoadFailed, OutOfMemory, Runner
from workers.loaded import Key, LoadedVersion
from workers.precision import choose
from workers.stages import Stages

LONG_WARM_UP_S = 1.0
"""A size whose first pass took longer is not run a second time only to measure it."""

_log = get_logger()


class Loader:
    """Holds what every load needs."""

    def __init__(
        self,
        settings: Settings,
        device: Device,
        stopping: Callable[[], bool] = lambda: False,
        give_way: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Two things are called between the steps of a load.

        `stopping`, so that a stop need not wait for all of them, and `give_way` with the seconds of the last step: it
        may pause to let batches through.
        """
        self._settings = settings
        self._device = device
        self._stopping = stopping
        self._give_way = give_way

    def estimate(self, key: Key, config: bytes = b"") -> int:
        """Bytes that a version will need, as its files tell. Raises StartupError, HeadraceError or OSError."""
        return estimates.of(self._open(key, config))

    def load(self, key: Key, config: bytes = b"") -> LoadedVersion:
        """Read, verify, build, warm up and measure.

        Raises StartupError or HeadraceError with a sentence, DeviceLost, or whatever the user's code raises.
        """
        started_s, stages = now_s(), Stages()
        self._device.enter_thread()
        with stages("read"):
            version = self._open(key, config)
            pipeline = load_pipeline(version, torch_allowed=True)
            sizes = version.batching(self._settings.batching).sizes
        with stages("build"):
            runner = self._runner(version, pipeline, stages)
        with stages("warm_up"):
            batch_s = self._warm_up(runner, pipeline, sizes, version.name)
            runner.weigh()
        loaded = LoadedVersion(key, runner, pipeline, batch_s)
        loaded.stages_s = stages.seconds
        if len(batch_s) < len(sizes):
            loaded.row_cap = batch_s[-1][0]
        loaded.load_s = now_s() - started_s
        _log.info(
            "model loaded",
            model=key.name,
            version=version.version,
            device=self._device.name,
            precision=runner.precision,
            memory_bytes=runner.memory_bytes,
            load_s=round(loaded.load_s, 3),
            stages_s={name: round(seconds, 3) for name, seconds in stages.seconds.items()},
        )
        return loaded

    def _open(self, key: Key, config: bytes) -> ModelVersion:
        """Read anew: the version may have been written after this process started."""
        return Repository(self._settings.repository).open(key.name, key.version, config or None)

    def _runner(self, version: ModelVersion, pipeline: Pipeline[Any], stages: Stages) -> Runner:
        if version.config.backend == "simulated":
            return simulated.load(version, pipeline.spec)
        if version.config.backend == "numpy":
            return numpy_backend.load(version, pipeline.spec)
        # Not at the top: a worker with simulated models only must start without torch.
        from workers.backends import torch_backend, torch_device  # noqa: PLC0415

        if not isinstance(self._device, torch_device.TorchDevice):
            raise LoadFailed(f"model {version.name} needs torch; this worker started without it: restart it")
        if version.config.backend == "onnxruntime":
            from workers.backends import onnx_backend  # noqa: PLC0415 - as above

            max_rows = version.batching(self._settings.batching).max_rows
            return onnx_backend.load(version, pipeline, self._device, max_rows=max_rows, stages=stages)
        worker = self._settings.worker
        precision = choose(worker.precision, version.config.precision, on_cuda=self._device.is_cuda)
        sizes = version.batching(self._settings.batching).sizes if worker.compile else ()
        return torch_backend.load(version, pipeline, self._device, precision, compile_for=sizes, stages=stages)

    def _warm_up(
        self, runner: Runner, pipeline: Pipeline[Any], sizes: tuple[int, ...], name: str
    ) -> list[tuple[int, float]]:
        """Run every allowed batch size, so that no caller pays for a first time; (rows, seconds) of each.

        Ends early at the first size that does not fit the device's memory. What the runner makes faster plans for is
        measured with them.
        """
        rows = examples.rows(pipeline.spec.inputs, sizes[-1])
        measured = self._run_all(runner, rows, sizes, name)
        if runner.precision == "fp16":  # the way back from an overflow is warm, too
            _time(runner, [array[: sizes[0]] for array in rows], sizes[0], fp32=True)
        if not self._settings.worker.cuda_graphs or self._stopping():
            return measured
        planned = set(runner.prepare(rows, [size for size, _ in measured]))
        return [
            (size, self._pass(runner, [array[:size] for array in rows], size) if size in planned else seconds)
            for size, seconds in measured
        ]

    def _run_all(self, runner: Runner, rows: list[Array], sizes: tuple[int, ...], name: str) -> list[tuple[int, float]]:
        measured: list[tuple[int, float]] = []
        for size in sizes:
            if self._stopping():
                raise LoadFailed(f"model {name}: the worker stops")
            item = [array[:size] for array in rows]
            try:
                first_s = self._pass(runner, item, size)
                measured.append((size, first_s if first_s > LONG_WARM_UP_S else self._pass(runner, item, size)))
            except OutOfMemory:
                if not measured:
                    raise LoadFailed(f"model {name}: {size} row(s) do not fit the device's memory") from None
                _log.warning(
                    "the device is out of memory for larger batches", model=name, rows=size, max_rows=measured[-1][0]
                )
                break
        return measured

    def _pass(self, runner: Runner, item: list[Any], size: int) -> float:
        """One pass, and then a pause where batches are run."""
        seconds = _time(runner, item, size)
        self._give_way(seconds)
        return seconds


def _time(runner: Runner, item: list[Any], size: int, *, fp32: bool = False) -> float:
    started_s = now_s()
    runner.run([item], size, "fp32" if fp32 else runner.precision)
    return now_s() - started_s


def served(settings: Settings) -> list[tuple[Key, bytes]]:
    """The current version of every model that is loaded at the start, with its model.yaml.

    What can't be read is left out: a LoadModel will say why.
    """
    keys: list[tuple[Key, bytes]] = []
    with contextlib.suppress(StartupError):
        repository = Repository(settings.repository)
        for name in settings.models or repository.names():
            with contextlib.suppress(StartupError, HeadraceError):
                version = repository.open(name)
                if version.config.load == "at_start":
                    keys.append((Key(name, version.version, version.revision), version.config_bytes))
    return keys


def needs_torch(settings: Settings) -> bool:
    """Whether any served model runs on torch. An empty or unreadable repository does: it can be filled later."""
    with contextlib.suppress(StartupError, HeadraceError):
        repository = Repository(settings.repository)
        names = settings.models or repository.names()
        return not names or any(repository.open(name).config.needs_torch for name in names)
    return True
