"""Two batches under way on a device of simulated time, as the loop drives them."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from structlog.typing import EventDict
from torch import nn

from shared.errors import Code
from shared.messages import BatchDone, BatchItem, RunBatch
from shared.tensors import Tensor, as_array
from tests.support.fake_streams import FakeDevice, FakeStreams
from tests.support.worker_parts import WIDTH, FakeRunner, ToyPipeline, TwoSidedArena, batch, item, loaded
from workers.backends.base import DeviceLost, Precision
from workers.backends.stream_runner import StreamRunner
from workers.engine import BatchRun
from workers.flight import Flight
from workers.model_pool import LoadedVersion

MATE, BAD = 1.0, 13.0


class Doubles(nn.Module):
    """x · 2; `on_rows` may raise, as launching a network's kernels may. In FP16, rows over 1000 overflow."""

    def __init__(self, on_rows: Callable[[int], None] = lambda _: None) -> None:
        super().__init__()
        self.on_rows = on_rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.on_rows(len(x))
        return x * 2


class HalfRunner(StreamRunner):
    """Overflows in FP16 where a row's first number is over 1000."""

    def forward(self, batch: object, precision: Precision) -> tuple[torch.Tensor, ...]:
        (x,) = batch  # type: ignore[misc,attr-defined]  # one input
        y = x * 2
        return y, torch.isfinite(y).all(1) & ((x[:, 0] <= 1000) if precision == "fp16" else True)


@pytest.fixture
def arena() -> Iterator[TwoSidedArena]:
    arena = TwoSidedArena()
    yield arena
    arena.close()


class Bench:
    """A flight on a fake device, and what came out of it."""

    def __init__(self, arena: TwoSidedArena, **times: float) -> None:
        self.arena = arena
        self.streams = FakeStreams(**times)
        self.device = FakeDevice(self.streams)
        self.flight = Flight(self.device)
        self.cancelled: set[int] = set()

    def version(self, network: nn.Module | None = None, kind: type[StreamRunner] = StreamRunner) -> LoadedVersion:
        precision: Precision = "fp16" if kind is HalfRunner else "fp32"
        return loaded(kind(network or Doubles(), ToyPipeline(), self.device, precision, 0))

    def run(self, message: RunBatch, version: LoadedVersion) -> BatchRun:
        return BatchRun(message, version, self.arena.attached, lambda: self.streams.now_s, self.cancelled)

    def start(self, message: RunBatch, version: LoadedVersion) -> None:
        self.flight.start(self.run(message, version))

    def finish(self) -> dict[int, list[float] | str]:
        """Per item of the first batch: its outputs' first numbers, or the failure's code."""
        return self.answers(self.flight.finish()[1])

    def answers(self, done: BatchDone) -> dict[int, list[float] | str]:
        found: dict[int, list[float] | str] = {}
        for answer in done.answers:
            assert answer.item not in found, "exactly one answer"
            if answer.failure is not None:
                found[answer.item] = answer.failure.code
            else:
                found[answer.item] = as_array(answer.tensors[0], self.arena.attached.memory)[:, 0].tolist()
        return found


def in_slot(arena: TwoSidedArena, number: int, *firsts: float, deadline_s: float = 1e9) -> tuple[BatchItem, object]:
    """An item whose rows lie in the arena, and the slot."""
    slot = arena.owner.lease(16 * len(firsts))
    assert slot is not None
    rows = arena.attached.array(slot.ref, "FP32", (len(firsts), WIDTH))
    rows[...] = 0
    rows[:, 0] = firsts
    return BatchItem(number, deadline_s, len(firsts), [Tensor("x", "FP32", rows.shape, slot.ref)], []), slot


def test_the_second_batch_is_copied_and_queued_while_the_first_one_runs(arena: TwoSidedArena) -> None:
    bench = Bench(arena, copy_s=1.0, row_s=10.0)
    version = bench.version()
    first, _keep = in_slot(arena, 1, 5, 6)
    second, _keep_too = in_slot(arena, 2, 7, 8)
    bench.start(batch(first, number=1), version)
    assert bench.flight.admits(version)
    bench.start(batch(second, number=2), version)
    assert not bench.flight.admits(version), "two are the most"
    copies, (one, other) = bench.streams.of("copies", "copy"), bench.streams.of("computing", "call")
    assert copies[1].end_s < one.end_s, "the second batch's rows have come before the first batch is computed"
    assert other.start_s == one.end_s, "and the device never waits for the host"
    assert not bench.flight.first_done()
    bench.streams.advance(one.end_s)
    assert bench.flight.first_done()
    assert bench.finish() == {1: [10, 12]}
    assert bench.flight.admits(version)
    assert not bench.flight.first_done()
    assert bench.finish() == {2: [14, 16]}


def test_a_third_batch_takes_the_lane_that_is_free(arena: TwoSidedArena) -> None:
    bench = Bench(arena, copy_s=1.0, row_s=10.0)
    version = bench.version()
    for number in range(2):
        bench.start(batch(item(number, number)), version)
    answers = []
    for number in range(2, 8):
        answers.append(bench.finish())
        bench.start(batch(item(number, number)), version)
    answers += [bench.finish(), bench.finish()]
    assert answers == [{number: [2.0 * number]} for number in range(8)]


def test_what_nobody_wants_any_more_is_not_copied(arena: TwoSidedArena) -> None:
    bench = Bench(arena, copy_s=1.0, row_s=10.0)
    version = bench.version()
    bench.start(batch(item(1, 1)), version)
    bench.streams.advance(5.0)
    bench.cancelled.add(3)
    steps = len(bench.streams.steps)
    bench.start(batch(item(2, 2, deadline_s=5.0), item(3, 3)), version)
    assert len(bench.streams.steps) == steps
    assert bench.finish() == {1: [2]}
    assert bench.finish() == {2: Code.DEADLINE_EXCEEDED, 3: Code.CANCELLED}


def test_a_batch_that_raises_between_two_others_costs_them_nothing(
    arena: TwoSidedArena, logged: list[EventDict]
) -> None:
    def on_rows(rows: int) -> None:
        if rows == 3:
            raise ValueError("three")

    bench = Bench(arena, copy_s=1.0, row_s=10.0)
    version = bench.version(Doubles(on_rows))
    bench.start(batch(item(1, 1)), version)
    bench.start(batch(item(2, 2), item(3, 3), item(4, 4), padded_rows=3), version)
    assert bench.finish() == {1: [2]}
    bench.start(batch(item(5, 5)), version)
    assert bench.finish() == {2: [4], 3: [6], 4: [8]}
    assert bench.finish() == {5: [10]}
    assert [line["event"] for line in logged] == ["a batch failed and is halved"]


def test_an_overflow_of_the_first_batch_runs_again_beside_the_second(arena: TwoSidedArena) -> None:
    bench = Bench(arena, copy_s=1.0, row_s=10.0)
    version = bench.version(kind=HalfRunner)
    bench.start(batch(item(1, 2000), item(2, 2)), version)
    bench.start(batch(item(3, 3), item(4, 4000)), version)
    assert bench.finish() == {1: [4000], 2: [4]}
    assert bench.finish() == {3: [6], 4: [8000]}
    assert version.guard.total_rescued == 2


def test_running_out_of_memory_beside_another_batch_teaches_no_cap(arena: TwoSidedArena) -> None:
    bench = Bench(arena, copy_s=1.0, row_s=10.0)
    bench.streams.memory_rows = 6
    version = bench.version()
    bench.start(batch(*(item(n, n) for n in range(4))), version)
    bench.start(batch(*(item(n, n) for n in range(4, 8))), version)
    assert bench.finish() == {n: [2 * n] for n in range(4)}
    bench.start(batch(*(item(n, n) for n in range(8, 12))), version)
    assert bench.finish() == {n: [2 * n] for n in range(4, 8)}
    assert bench.finish() == {n: [2 * n] for n in range(8, 12)}
    assert version.row_cap is None, "each of them fits by itself"
    assert bench.streams.refused == 1, "the second try waits for the batch that was started meanwhile"


def test_more_rows_than_fit_are_halved_answered_and_remembered(arena: TwoSidedArena) -> None:
    bench = Bench(arena, copy_s=1.0, row_s=10.0)
    bench.streams.memory_rows = 5
    version = bench.version()
    bench.start(batch(*(item(n, n) for n in range(8))), version)
    assert bench.finish() == {n: [2 * n] for n in range(8)}
    assert version.row_cap == 4
    bench.streams.steps.clear()
    bench.start(batch(*(item(n, n) for n in range(8))), version)
    assert bench.finish() == {n: [2 * n] for n in range(8)}
    assert [step.rows for step in bench.streams.of("computing", "call")] == [4, 4]


def test_a_version_of_the_host_waits_for_the_device_and_the_other_way_round(arena: TwoSidedArena) -> None:
    bench = Bench(arena, copy_s=1.0, row_s=10.0)
    on_device, on_host = bench.version(), loaded(FakeRunner())
    assert bench.flight.admits(on_host)
    bench.start(batch(item(1, 1)), on_device)
    assert not bench.flight.admits(on_host)
    assert bench.finish() == {1: [2]}
    bench.start(batch(item(2, 2)), on_host)
    assert not bench.flight.admits(on_device)
    assert bench.flight.first_done()
    assert bench.finish() == {2: [4]}


def test_two_versions_share_the_device_in_order(arena: TwoSidedArena) -> None:
    bench = Bench(arena, copy_s=1.0, row_s=10.0)
    one, other = bench.version(), bench.version()
    bench.start(batch(item(1, 1)), one)
    assert bench.flight.admits(other)
    bench.start(batch(item(2, 2)), other)
    assert [bench.finish(), bench.finish()] == [{1: [2]}, {2: [4]}]


def test_a_staged_batch_is_not_charged_for_the_one_before_it(arena: TwoSidedArena) -> None:
    bench = Bench(arena, copy_s=1.0, row_s=10.0)
    version = bench.version()
    bench.start(batch(item(1, 1)), version)
    bench.start(batch(item(2, 2)), version)
    bench.flight.finish()
    _, done = bench.flight.finish()
    assert (done.copy_s, done.run_s) == (1.0, 10.0)
    assert done.started_s == 10.0, "it waited from 0 to 10, and had the device from 11 to 21"


def test_a_device_lost_under_a_staged_batch_is_told(arena: TwoSidedArena) -> None:
    def lost(_: int) -> None:
        raise DeviceLost("device-side assert")

    bench = Bench(arena)
    bench.start(batch(item(1, 1)), bench.version())
    with pytest.raises(DeviceLost):
        bench.start(batch(item(2, 2)), bench.version(Doubles(lost)))


def test_there_is_something_to_watch_only_while_the_device_works(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    assert bench.flight.watch() == ()
    bench.device.fileno = lambda: 77  # type: ignore[method-assign]  # a real one
    bench.start(batch(item(1, 1)), bench.version())
    assert bench.flight.watch() == (77,)
    bench.finish()
    assert bench.flight.watch() == ()


def test_a_ring_between_two_looks_is_not_lost(arena: TwoSidedArena) -> None:
    bench = Bench(arena, row_s=10.0)
    order: list[str] = []
    bench.device.quiet = lambda: order.append("quiet")  # type: ignore[method-assign]  # looks on
    bench.start(batch(item(1, 1)), bench.version())
    first = bench.flight._runs[0]
    first.done = lambda: bool(order.append("done"))  # type: ignore[method-assign,func-returns-value]  # looks on
    bench.flight.first_done()
    assert order == ["quiet", "done"]


@pytest.mark.parametrize("seed", range(10))
def test_any_interleaving_gives_every_item_its_own_answer_once(
    arena: TwoSidedArena, seed: int, logged: list[EventDict]
) -> None:
    random = np.random.default_rng(seed)
    bench = Bench(arena, copy_s=float(random.choice([0.1, 5.0])), row_s=float(random.choice([0.1, 5.0])), host_s=0.3)
    bench.streams.memory_rows = int(random.integers(2, 12))

    def on_rows(rows: int) -> None:
        if rows == 3:
            raise ValueError("three")

    version = bench.version(Doubles(on_rows))
    expected: list[dict[int, list[float]]] = []
    answers: list[dict[int, list[float] | str]] = []
    for number in range(30):
        values = [float(value) for value in random.integers(1, 900, random.integers(1, 7))]
        items = [item(100 * number + n, value) for n, value in enumerate(values)]
        while not bench.flight.admits(version) or (len(bench.flight) and random.random() < 0.3):
            answers.append(bench.finish())
        bench.start(batch(*items, number=number), version)
        expected.append({one.item: [2 * value] for one, value in zip(items, values, strict=True)})
    while len(bench.flight):
        answers.append(bench.finish())
    assert answers == expected
