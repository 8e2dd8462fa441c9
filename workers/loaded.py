"""One loaded version, and how much it is used. Of the worker's loop alone, once the loader has handed it over."""

import math
from typing import Any, NamedTuple

from shared.logs import Seldom, get_logger
from shared.model_messages import GenerationLimits
from shared.pipeline import Pipeline
from workers.backends.base import Precision, Runner
from workers.precision import OverflowGuard

MEMORY_OF_USE_S = 60.0
"""How far back the moving average of `Use.per_minute` looks: a batch counts for 1/e of itself after that time."""

_log = get_logger()


class Key(NamedTuple):
    """Which version."""

    name: str
    version: str
    revision: str = ""
    """Of model.yaml."""


class Use:
    """How often a version has run, and when last."""

    def __init__(self, now_s: float) -> None:
        self.since_s = now_s
        """When it was loaded."""
        self.last_s = now_s
        """When its last batch ended; before its first one, when it was loaded."""
        self.batches = 0
        self.rows = 0
        self._weight = 0.0

    def ran(self, rows: int, now_s: float) -> None:
        """A batch has ended."""
        self._weight = self.per_minute(now_s) + 60.0 / MEMORY_OF_USE_S
        self.last_s = now_s
        self.batches += 1
        self.rows += rows

    def per_minute(self, now_s: float) -> float:
        """Batches a minute, of late."""
        return self._weight * math.exp(-max(0.0, now_s - self.last_s) / MEMORY_OF_USE_S)

    def __repr__(self) -> str:
        return f"<Use batches={self.batches} rows={self.rows} last={self.last_s:.3f}>"


class LoadedVersion:
    """One version, ready to run. Used by the loop's thread only."""

    def __init__(self, key: Key, runner: Runner, pipeline: Pipeline[Any], batch_s: list[tuple[int, float]]) -> None:
        """`batch_s`: measured (rows, seconds) for each allowed batch size, rising."""
        self.key = key
        self.runner = runner
        self.spec = pipeline.spec
        self.raw = pipeline.passthrough
        """Raw tensors: what is not finite in them is the caller's to judge."""
        self.batch_s = batch_s
        self.buckets: list[tuple[tuple[int, ...], list[tuple[int, float]]]] = []
        """The same for each length of rows, where they differ (`ModelLoaded.buckets`)."""
        self.load_s = 0.0
        self.stages_s: dict[str, float] = {}
        """`load_s` by stage, and what it waited for memory."""
        self.estimated_bytes = 0
        """What was expected of the runner's `memory_bytes` before the load."""
        self.generation: GenerationLimits | None = None
        """Of one that generates text: the runner is a `workers.generation.runner.GenerationRunner` then."""
        self.use = Use(0.0)
        self.precision: Precision = runner.precision
        self.guard = OverflowGuard(self._give_up_fp16)
        self.failed_items, self.failed_batches = Seldom(), Seldom()
        """A network that raises on every row must not fill the log."""
        self.row_cap: int | None = None
        """Rows that fit the device's memory, learned from running out of it; None: no limit met."""

    @property
    def memory_bytes(self) -> int:
        """As measured."""
        return self.runner.memory_bytes

    def padded(self, rows: int) -> int:
        """The smallest allowed batch size that holds `rows`."""
        return next((size for size, _ in self.batch_s if size >= rows), rows)

    def lower_row_cap(self, failed_rows: int) -> None:
        """A batch of `failed_rows` did not fit: no larger ones than half of it from now on.

        Where batches are padded up, no larger ones than the next allowed size down: what would be padded beyond half
        of the rows would not fit either.
        """
        half = max(1, failed_rows // 2)
        if self.runner.pads:
            half = max((size for size, _ in self.batch_s if size <= half), default=half)
        self.row_cap = min(self.row_cap or failed_rows, half)
        _log.warning(
            "the device is out of memory", model=self.key.name, rows=failed_rows, max_rows_from_now=self.row_cap
        )

    def _give_up_fp16(self, rescued: int, rows: int) -> None:
        self.precision = "fp32"
        _log.warning(
            "switched to FP32",
            model=self.key.name,
            version=self.key.version,
            reason=f"{rescued} of {rows} rows overflowed in FP16 and were fine in FP32",
            advice="set `precision: fp32` in this model's model.yaml",
        )

    def __repr__(self) -> str:
        return f"<LoadedVersion {self.key.name}@{self.key.version} {self.precision} cap={self.row_cap}>"
