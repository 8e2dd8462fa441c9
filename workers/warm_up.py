"""Runs a version's allowed batches before anybody waits for them, and measures each. On the model pool's thread."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from shared.clock import now_s
from shared.lengths import Shapes, rows_within, sizes_within
from shared.logs import get_logger
from shared.pipeline import Pipeline
from shared.settings import BatchingSettings
from shared.tensors import Array
from workers.backends import examples
from workers.backends.base import LoadFailed, OutOfMemory, Runner

LONG_WARM_UP_S = 1.0
"""A batch whose first pass took longer is not run a second time only to measure it."""
LONG_OF_MANY_S = 0.1
"""The same where batches differ in length, too, so that there are many to run: of a longer pass, what is slow only the
first time is a small part."""
LENGTHS_S = 3.0
"""Where batches differ in length, each length is run with one row and with the most; the sizes in between follow, the
shortest lengths first, as long as all passes so far took no longer than this."""

Measured: TypeAlias = list[tuple[int, float]]
"""Seconds of a batch by its rows, rising."""

_log = get_logger()


class Warmth(NamedTuple):
    """What was measured."""

    batch_s: Measured
    """For each allowed size; of the shortest length where lengths differ."""
    buckets: list[tuple[tuple[int, ...], Measured]]
    """The same for each length, by the pipeline's bucket, shortest first; empty where all rows have one shape."""
    row_cap: int | None
    """Rows that fit the device's memory; None: all."""


class Steps(NamedTuple):
    """What is asked and told between two passes."""

    stopping: Callable[[], bool]
    give_way: Callable[[float], None]
    """With the seconds of the last pass: it may pause to let batches through."""


def warm_up(
    runner: Runner, pipeline: Pipeline[Any], batching: BatchingSettings, name: str, steps: Steps, *, graphs: bool
) -> Warmth:
    """Every allowed batch size, of every length. `graphs`: make faster plans, and measure with them.

    Ends early at the first batch that does not fit the device's memory. Raises LoadFailed when that is the smallest, or
    the worker stops.
    """
    return _WarmUp(runner, pipeline, batching, name, steps).run(graphs=graphs)


class _Length:
    """One shape of a row, and what was measured of batches of it."""

    def __init__(self, pipeline: Pipeline[Any], shapes: Shapes | None, batching: BatchingSettings) -> None:
        specs = pipeline.spec.inputs
        self.bucket = () if shapes is None else tuple(pipeline.bucket([(1, *shape) for shape in shapes]))
        self.sizes = sizes_within(batching.sizes, rows_within(batching.max_tokens, self.bucket, batching.max_rows))
        self.rows = examples.rows(specs, self.sizes[-1], shapes)
        self.seconds: dict[int, float] = {}

    @property
    def measured(self) -> Measured:
        return sorted(self.seconds.items())

    def item(self, size: int) -> list[Array]:
        return [array[:size] for array in self.rows]


class _WarmUp:
    def __init__(
        self, runner: Runner, pipeline: Pipeline[Any], batching: BatchingSettings, name: str, steps: Steps
    ) -> None:
        self._runner = runner
        self._name = name
        self._steps = steps
        shapes: Sequence[Shapes | None] = pipeline.warm_shapes() or [None]
        self._lengths = [_Length(pipeline, each, batching) for each in shapes]
        self._several = bool(pipeline.warm_shapes())
        self._row_cap: int | None = None
        self._spent_s = 0.0

    def run(self, *, graphs: bool) -> Warmth:
        first = self._lengths[0]
        self._run(first, first.sizes)
        for length in self._lengths[1:]:
            self._run(length, sorted({length.sizes[0], length.sizes[-1]}))
        for length in self._lengths[1:]:
            self._run(length, length.sizes[1:-1], until_s=LENGTHS_S)
        for length in self._lengths:
            self._warm_rescue(length)
        if graphs and not self._steps.stopping():
            for length in sorted(self._lengths, key=_elements, reverse=True):
                self._plan(length)
        buckets = [(length.bucket, length.measured) for length in self._lengths] if self._several else []
        return Warmth(first.measured, buckets, self._row_cap)

    def _run(self, length: _Length, sizes: Sequence[int], until_s: float = float("inf")) -> None:
        """These sizes, rising."""
        for size in sizes:
            if self._spent_s > until_s or size > (self._row_cap or size):
                return
            if self._steps.stopping():
                raise LoadFailed(f"model {self._name}: the worker stops")
            try:
                seconds = self._pass(length, size)
                long_s = LONG_OF_MANY_S if self._several else LONG_WARM_UP_S
                length.seconds[size] = seconds if seconds > long_s else self._pass(length, size)
            except OutOfMemory:
                self._cap(length, size)
                return

    def _cap(self, length: _Length, failed: int) -> None:
        """No batch may be larger than what has run; of another length it may be smaller still."""
        smaller = [size for size in length.seconds if size < failed]
        if not smaller:
            raise LoadFailed(f"model {self._name}: {failed} row(s) do not fit the device's memory") from None
        # Between the smallest and the largest nothing of this length has run yet: halved until it fits.
        fits = max(smaller)
        half = failed // 2
        while half > fits:
            try:
                length.seconds[half] = self._pass(length, half)
                fits = half
            except OutOfMemory:
                half //= 2
        self._row_cap = min(self._row_cap or fits, fits)
        _log.warning(
            "the device is out of memory for larger batches",
            model=self._name,
            rows=failed,
            max_rows=self._row_cap,
            **({"length": length.bucket, "advice": "set batching.max_tokens in model.yaml"} if length.bucket else {}),
        )

    def _warm_rescue(self, length: _Length) -> None:
        """The way back from an overflow is warm, too."""
        if self._runner.precision == "fp16":
            size = length.sizes[0]
            self._runner.run([length.item(size)], size, "fp32")

    def _plan(self, length: _Length) -> None:
        """What the runner makes faster plans for is measured with them."""
        for size in self._runner.prepare(length.rows, [size for size, _ in length.measured]):
            length.seconds[size] = self._pass(length, size)

    def _pass(self, length: _Length, size: int) -> float:
        """One pass, and then a pause where batches are run."""
        started_s = now_s()
        self._runner.run([length.item(size)], size, self._runner.precision)
        seconds = now_s() - started_s
        self._spent_s += seconds
        self._steps.give_way(seconds)
        return seconds


def _elements(length: _Length) -> int:
    return length.rows[0].size
