"""A device of simulated time: what is queued runs, on CPU tensors, only when the host's clock has come to its end.

So a buffer that is written while a queued step still has to read it gives wrong answers here, as on a real device. The
clock moves only when the host waits for a mark, or by `host_s` per queued step.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from shared.tensors import Array
from workers.backends.streams import Function, Mark, Streams
from workers.backends.torch_device import TorchDevice

Queue: TypeAlias = Literal["copies", "computing"]


class Step(NamedTuple):
    """One queued step in simulated seconds."""

    queue: Queue
    what: str
    """`copy`, `fill`, `call` or `replay`."""
    rows: int
    start_s: float
    end_s: float


class FakeMark:
    """A place in a queue, which is reached at `at_s`."""

    def __init__(self, streams: "FakeStreams", at_s: float) -> None:
        self._streams = streams
        self.at_s = at_s

    def wait(self) -> None:
        """The host sleeps until then."""
        self._streams.advance(max(self._streams.now_s, self.at_s))

    def reached(self) -> bool:
        """Whether it is later than that."""
        return self._streams.now_s >= self.at_s

    def after_s(self, earlier: Mark) -> float:
        """Simulated seconds."""
        if not isinstance(earlier, FakeMark) or not (self.reached() and earlier.reached()):
            raise RuntimeError("both events must have been recorded and completed")
        return self.at_s - earlier.at_s


class FakeGraph:
    """Runs the function again at each replay, with the tensors that it was captured with."""

    def __init__(self, streams: "FakeStreams", function: Function, inputs: Sequence[Tensor]) -> None:
        self._streams = streams
        self._function = function
        self._inputs = list(inputs)
        self.outputs = streams.captured(function, inputs)

    def replay(self) -> None:
        """Queue it."""
        self._streams.queue_function("replay", self._function, self._inputs, self.outputs)


class FakeStreams(Streams):
    """See the module's docstring. `copy_s` and `row_s` are per row."""

    def __init__(self, *, copy_s: float = 1.0, row_s: float = 10.0, host_s: float = 0.0) -> None:
        self.copy_s, self.row_s, self.host_s = copy_s, row_s, host_s
        self.now_s = 0.0
        self.steps: list[Step] = []
        """Everything queued so far, in that order."""
        self.memory_rows: int | None = None
        """More rows than these, of all steps that are not done, do not fit."""
        self.no_graph: Exception | None = None
        """What a capture raises."""
        self.changed_by_graph = 0.0
        """Added to what a graph computes."""
        self.graphs = 0
        self.pools: list[object] = []
        """That of each graph."""
        self.refused = 0
        """Calls that did not fit."""
        self.settled_after: list[int] = []
        """Per call of `settle`, how many steps there were before it."""
        self.rung: list[FakeMark] = []
        self._queue: Queue = "computing"
        self._free_s: dict[Queue, float] = {"copies": 0.0, "computing": 0.0}
        self._pending: list[tuple[float, int, Callable[[], object]]] = []

    # ---------------------------------------------------------------- the port

    def buffer(self, nbytes: int) -> Tensor:
        """Filled with what is no row of anybody."""
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def pinned(self, nbytes: int) -> Tensor:
        """Ordinary memory."""
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """See Streams."""
        before, self._queue = self._queue, "copies"
        try:
            yield
        finally:
            self._queue = before

    @contextlib.contextmanager
    def computing(self, after: Mark) -> Iterator[None]:
        """See Streams."""
        if not isinstance(after, FakeMark):
            raise TypeError(f"{after} is not this device's")
        before, self._queue = self._queue, "computing"
        self._free_s["computing"] = max(self._free_s["computing"], after.at_s)
        try:
            yield
        finally:
            self._queue = before

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Takes time only between host and device, that is in the queue for copies."""
        seconds = self.copy_s * len(target) if self._queue == "copies" else 0.0
        self._put("copy", len(target), seconds, lambda: target.copy_(source))

    def fill(self, target: Tensor, value: int) -> None:
        """See Streams."""
        self._put("fill", len(target), 0.0, lambda: target.fill_(value))

    def call(self, function: Function, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The shapes come from running it now, the numbers from running it when its time has come."""
        rows = len(inputs[0])
        under_way = sum(step.rows for step in self.steps if step.what == "call" and step.end_s > self.now_s)
        if self.memory_rows is not None and under_way + rows > self.memory_rows:
            self.refused += 1
            raise torch.OutOfMemoryError(f"no memory for {rows} rows beside {under_way}")
        outputs = tuple(torch.full_like(output, 0) for output in function(inputs))
        self.queue_function("call", function, inputs, outputs)
        return outputs

    def mark(self) -> FakeMark:
        """See Streams."""
        return FakeMark(self, max(self._free_s[self._queue], self.now_s))

    def pool(self) -> object:
        """See Streams."""
        return object()

    def capture(self, function: Function, inputs: Sequence[Tensor], pool: object) -> FakeGraph:
        """See Streams."""
        if self.no_graph is not None:
            raise self.no_graph
        self.graphs += 1
        self.pools.append(pool)
        return FakeGraph(self, function, inputs)

    def settle(self) -> None:
        """See Streams."""
        self.settled_after.append(len(self.steps))
        self.advance(max(self.now_s, *self._free_s.values()))

    def pool_bytes(self, pool: object) -> int:
        """1,000 bytes per graph."""
        return 1000 * self.pools.count(pool)

    def give_back(self) -> None:
        """Nothing is kept."""

    def ring_at(self, mark: Mark) -> None:
        """Remembered."""
        if isinstance(mark, FakeMark):
            self.rung.append(mark)

    def fileno(self) -> int:
        """None of the system's."""
        return -1

    def quiet(self) -> None:
        """Nothing to forget."""

    # ---------------------------------------------------------------- simulation

    def captured(self, function: Function, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Where a graph will write."""
        return tuple(torch.full_like(output, 0) for output in function(inputs))

    def queue_function(
        self, what: str, function: Function, inputs: Sequence[Tensor], outputs: tuple[Tensor, ...]
    ) -> None:
        """Let it write into `outputs` when its time has come."""
        inputs, change = list(inputs), self.changed_by_graph if what == "replay" else 0.0

        def run() -> None:
            for target, result in zip(outputs, function(inputs), strict=True):
                target.copy_(result + change if result.is_floating_point() else result)

        self._put(what, len(inputs[0]), self.row_s * len(inputs[0]), run)

    def advance(self, to_s: float) -> None:
        """Let simulated time pass; steps take effect in the order in which they end."""
        self.now_s = to_s
        due = sorted(entry for entry in self._pending if entry[0] <= to_s)
        self._pending = [entry for entry in self._pending if entry[0] > to_s]
        with torch.inference_mode():
            for _, _, effect in due:
                effect()

    def _put(self, what: str, rows: int, seconds: float, effect: Callable[[], object]) -> None:
        self.advance(self.now_s + self.host_s)
        start_s = max(self.now_s, self._free_s[self._queue])
        step = Step(self._queue, what, rows, start_s, start_s + seconds)
        self._free_s[self._queue] = step.end_s
        self._pending.append((step.end_s, len(self.steps), effect))
        self.steps.append(step)

    def of(self, queue: Queue, what: str) -> list[Step]:
        """The steps of one kind."""
        return [step for step in self.steps if (step.queue, step.what) == (queue, what)]


class FakeDevice(TorchDevice):
    """A device of simulated time; `pinned` says whether it copies from arenas by itself."""

    def __init__(self, streams: FakeStreams, *, pinned: bool = True) -> None:
        super().__init__(torch.device("cpu"))
        self.streams: FakeStreams = streams
        self.name = "fake"
        self.pinned = pinned

    def is_pinned(self, array: Array) -> bool:
        """What is writable lies in the arena."""
        return self.pinned and array.flags.writeable

    def judge(self, error: Exception) -> Exception:
        """Waits for the device, as CUDA's does."""
        self.streams.settle()
        return super().judge(error)
