"""From a name and version to a warm, measured, ready version. Runs on the model pool's thread."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from shared.clock import now_s
from shared.errors import HeadraceError, StartupError
from shared.logs import get_logger
from shared.model_config import ModelConfig
from shared.pipeline import Pipeline
from shared.pipeline_loader import load_pipeline
from shared.repository import ModelVersion, Repository
from shared.settings import Settings
from workers import estimates
from workers.backends import numpy_backend, simulated
from workers.backends.base import Device, LoadFailed, Runner
from workers.loaded import Key, LoadedVersion
from workers.precision import choose
from workers.stages import Stages
from workers.warm_up import Steps, Warmth, warm_up

if TYPE_CHECKING:
    from workers.generation.runner import GenerationRunner

_log = get_logger()


class Loader:
    """Holds what every load needs."""

    def __init__(
        self,
        settings: Settings,
        device: Device,
        stopping: Callable[[], bool] = lambda: False,
        give_way: Callable[[float], None] = lambda _: None,
        budget_bytes: int | None = None,
    ) -> None:
        """Two things are called between the steps of a load.

        `stopping`, so that a stop need not wait for all of them, and `give_way` with the seconds of the last step: it
        may pause to let batches through. `budget_bytes`: what all models may take together; bounds the caches of those
        that generate text.
        """
        self._settings = settings
        self._device = device
        self._stopping = stopping
        self._give_way = give_way
        self._budget_bytes = budget_bytes

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
            batching = version.batching(self._settings.batching)
        with stages("build"):
            runner = self._runner(version, pipeline, stages)
        with stages("warm_up"):
            graphs = self._settings.worker.cuda_graphs
            steps = Steps(self._stopping, self._give_way)
            if pipeline.generates:
                generation = cast("GenerationRunner", runner).warm_up(version.name, *steps)
                warmth = Warmth([], [], None)
            else:
                generation, warmth = None, warm_up(runner, pipeline, batching, version.name, steps, graphs=graphs)
            runner.weigh()
        loaded = LoadedVersion(key, runner, pipeline, warmth.batch_s)
        loaded.generation = generation
        loaded.buckets, loaded.row_cap = warmth.buckets, warmth.row_cap
        loaded.stages_s = stages.seconds
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
        return Repository(self._settings.repository, only=key.name).open(key.name, key.version, config or None)

    def _runner(self, version: ModelVersion, pipeline: Pipeline[Any], stages: Stages) -> Runner:
        _agree(version.config, version.name, generates=pipeline.generates)
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
        if pipeline.generates:
            from workers.generation import loading as generation  # noqa: PLC0415 - as above

            return generation.load(version, pipeline, generation.Place(self._device, self._budget_bytes), stages)
        worker = self._settings.worker
        precision = choose(worker.precision, version.config.precision, on_cuda=self._device.is_cuda)
        sizes = version.batching(self._settings.batching).sizes if worker.compile else ()
        return torch_backend.load(version, pipeline, self._device, precision, compile_for=sizes, stages=stages)


def _agree(config: ModelConfig, name: str, *, generates: bool) -> None:
    """Raises LoadFailed where model.yaml says what does not go with its pipeline."""
    if generates and config.backend != "torch":
        raise LoadFailed(f"model {name}: backend is {config.backend}; text is generated with backend torch alone")
    if not generates and "generation" in config.model_fields_set:
        raise LoadFailed(
            f"model {name}: generation is given, but pipeline {config.pipeline} generates no text: remove it"
        )


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
