"""Two gateways share a device that works beside the host: what is staged, who is answered, and who leaves meanwhile."""

from collections import deque
from collections.abc import Collection, Iterator
from types import SimpleNamespace

import pytest
from torch import nn

from shared.board import ELSEWHERE, IDLE, Doing
from shared.messages import BatchDone, RunBatch
from shared.tensors import as_array
from tests.support.fake_streams import FakeDevice, FakeStreams
from tests.support.worker_parts import ToyPipeline, TwoSidedArena, batch, item, loaded
from workers.aside import Aside
from workers.backends.stream_runner import StreamRunner
from workers.flight import Flight
from workers.model_pool import LoadedVersion
from workers.runs import Runs


class Session:
    """What `Runs` needs of a session: batches that wait, and what it was told."""

    def __init__(self, version: LoadedVersion, arena: TwoSidedArena, *batches: RunBatch) -> None:
        self.link = SimpleNamespace(arena=arena.attached)
        self.cancelled: set[int] = set()
        self.waiting = deque(batches)
        self.answers: list[tuple[int, list[float]]] = []
        self.shown: list[int] = []
        self._version = version
        self._arena = arena

    def next(self, apart: Collection[LoadedVersion]) -> tuple[LoadedVersion, RunBatch] | None:
        return (self._version, self.waiting[0]) if self.waiting and self._version not in apart else None

    def begin(self, batch: RunBatch) -> None:
        assert self.waiting.popleft() is batch

    def answer(self, message: RunBatch, done: BatchDone) -> None:
        rows = [as_array(each.tensors[0], self._arena.attached.memory)[0, 0] for each in done.answers]
        self.answers.append((message.batch, [float(row) for row in rows]))

    def note(self, version: LoadedVersion) -> None:
        raise AssertionError("nothing has changed")

    def doing(self, doing: Doing) -> None:
        self.shown.append(doing.batch)


@pytest.fixture
def arena() -> Iterator[TwoSidedArena]:
    arena = TwoSidedArena()
    yield arena
    arena.close()


class Twice(nn.Module):
    def forward(self, x: object) -> object:
        return x * 2  # type: ignore[operator]  # a tensor


def one(number: int) -> RunBatch:
    return batch(item(number, float(number)), number=number)


def test_the_next_batch_is_staged_behind_the_running_one_whoever_sent_it(arena: TwoSidedArena) -> None:
    streams = FakeStreams(copy_s=1.0, row_s=10.0)
    device = FakeDevice(streams)
    version = loaded(StreamRunner(Twice(), ToyPipeline(), device, "fp32", 0))
    first, second = Session(version, arena, one(1), one(2)), Session(version, arena, one(11), one(12))
    runs = Runs(lambda: [first, second], Flight(device), Aside(device), lambda: streams.now_s)  # type: ignore[list-item,return-value]  # fakes
    assert runs.step()
    assert not runs.step(), "both lanes are taken, and nothing is done"
    assert [len(first.waiting), len(second.waiting)] == [1, 1], "one of each"
    assert (first.shown[-1], second.shown[-1]) == (1, ELSEWHERE)
    assert [step.start_s for step in streams.of("copies", "copy")] == [0, 1]
    streams.advance(11.0)
    assert runs.step()
    assert first.answers == [(1, [2])]
    assert second.shown[-1] == 11
    runs.step()
    assert streams.of("copies", "copy")[-1].start_s == 11, "its lane is free as soon as the first batch is answered"
    while first.waiting or second.waiting:
        streams.advance(streams.now_s + 10.0)
        while runs.step():
            pass
    runs.finish_all()
    assert (first.answers, second.answers) == ([(1, [2]), (2, [4])], [(11, [22]), (12, [24])])
    computed = streams.of("computing", "call")
    assert [step.start_s for step in computed] == [1, 11, 21, 31], "the device was never idle"
    assert (first.shown[-1], second.shown[-1]) == (IDLE, IDLE)


def test_a_gateway_that_leaves_is_let_go_of_when_its_rows_are_no_longer_read(arena: TwoSidedArena) -> None:
    streams = FakeStreams(copy_s=1.0, row_s=10.0)
    device = FakeDevice(streams)
    version = loaded(StreamRunner(Twice(), ToyPipeline(), device, "fp32", 0))
    stays, leaves = Session(version, arena, one(1)), Session(version, arena, one(11))
    sessions = [stays, leaves]
    runs = Runs(lambda: sessions, Flight(device), Aside(device), lambda: streams.now_s)  # type: ignore[list-item,return-value,arg-type]  # fakes
    runs.step()
    runs.forget(leaves)  # type: ignore[arg-type]  # a fake
    assert streams.now_s >= streams.of("computing", "call")[-1].end_s
    assert stays.answers == [(1, [2])], "what was ahead of it is answered, too"
