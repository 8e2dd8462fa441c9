"""A version's first batch runs beside those of the others, and is answered all the same, whatever happens meanwhile."""

import select
import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shared.board import Doing
from shared.messages import BatchDone, RunBatch
from tests.support.worker_parts import DEADLY, FakeRunner, TwoSidedArena, batch, item, loaded
from workers.aside import Aside
from workers.backends.base import DeviceLost, Forward, NoDevice, Precision
from workers.flight import Flight
from workers.loaded import LoadedVersion
from workers.runs import Runs
from workers.staging import Inputs

WAIT_S = 10.0


class Gate(FakeRunner):
    """Runs when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.inside = threading.Semaphore(0)
        self.most = self.now = 0

    def run(self, items: Inputs, padded_rows: int, precision: Precision) -> Forward:
        self.now += 1
        self.most = max(self.most, self.now)
        self.inside.release()
        assert self.open.wait(WAIT_S), "nobody opened the gate"
        self.now -= 1
        return super().run(items, padded_rows, precision)


class Session:
    """What `Runs` needs of one: batches that wait, with the version of each."""

    def __init__(self, arena: TwoSidedArena) -> None:
        self.link = SimpleNamespace(arena=arena.attached)
        self.cancelled: set[int] = set()
        self.waiting: deque[tuple[LoadedVersion, RunBatch]] = deque()
        self.answers: list[int] = []

    def next_version(self) -> LoadedVersion | None:
        return self.waiting[0][0] if self.waiting else None

    def next_is_aside(self) -> bool:
        return self.waiting[0][1].aside

    def next_batch(self) -> RunBatch:
        return self.waiting.popleft()[1]

    def answer(self, message: RunBatch, done: BatchDone) -> None:
        assert [answer.failure for answer in done.answers] == [None]
        self.answers.append(message.batch)

    def doing(self, doing: Doing) -> None:
        pass


@pytest.fixture
def arena() -> Iterator[TwoSidedArena]:
    arena = TwoSidedArena()
    yield arena
    arena.close()


@pytest.fixture
def session(arena: TwoSidedArena) -> Session:
    return Session(arena)


def first_of(version: LoadedVersion, number: int, first: float = 1.0) -> tuple[LoadedVersion, RunBatch]:
    return version, msgspec.structs.replace(batch(item(number, first), number=number), aside=True)


def later_of(version: LoadedVersion, number: int) -> tuple[LoadedVersion, RunBatch]:
    return version, batch(item(number, 1.0), number=number)


def runs_of(*sessions: Session, device: NoDevice | None = None) -> Runs:
    device = device or NoDevice()
    known: Any = list(sessions)
    return Runs(lambda: known, Flight(device), Aside(device), lambda: 0.0)


def until(runs: Runs, session: Session, answers: list[int]) -> None:
    poller = select.poll()
    for fd in runs.watch():
        poller.register(fd, select.POLLIN)
    while session.answers != answers:
        assert poller.poll(WAIT_S * 1e3), f"waited for {answers}, got {session.answers}"
        runs.step()


def test_others_are_answered_while_a_version_is_proven(session: Session) -> None:
    gate = Gate()
    new, serves = loaded(gate), loaded(FakeRunner())
    session.waiting.extend([first_of(new, 1), later_of(serves, 2), later_of(serves, 3)])
    runs = runs_of(session)
    while runs.step():
        pass
    assert session.answers == [2, 3]
    assert runs.running() == [new], "it is in use, and must not be given up"
    gate.open.set()
    until(runs, session, [2, 3, 1])
    assert runs.running() == []


def test_no_version_runs_twice_at_the_same_time(session: Session) -> None:
    gate = Gate()
    new = loaded(gate)
    session.waiting.extend([first_of(new, 1), later_of(new, 2), later_of(new, 3)])
    runs = runs_of(session)
    while runs.step():
        pass
    assert gate.inside.acquire(timeout=WAIT_S)
    gate.open.set()
    until(runs, session, [1, 2, 3])
    assert gate.most == 1


def test_a_gateway_that_leaves_is_let_go_of_when_its_rows_are_no_longer_read(arena: TwoSidedArena) -> None:
    gate, leaves, stays = Gate(), Session(arena), Session(arena)
    leaves.waiting.append(first_of(loaded(gate), 1))
    stays.waiting.append(first_of(loaded(FakeRunner()), 2))
    runs = runs_of(leaves, stays)
    runs.step()
    assert gate.inside.acquire(timeout=WAIT_S)
    forgetting = threading.Thread(target=runs.forget, args=(leaves,))
    forgetting.start()
    assert leaves.answers == []
    gate.open.set()
    forgetting.join(WAIT_S)
    assert not forgetting.is_alive(), "it waited for more than its batch"
    assert leaves.answers == [1]
    until(runs, stays, [2])


def test_a_stop_waits_for_what_is_aside(session: Session) -> None:
    session.waiting.append(first_of(loaded(FakeRunner()), 1))
    runs = runs_of(session)
    runs.step()
    runs.finish_all()
    assert session.answers == [1]


def test_a_device_that_is_lost_aside_ends_the_process(session: Session) -> None:
    session.waiting.append(first_of(loaded(FakeRunner()), 1, DEADLY))
    runs = runs_of(session)
    runs.step()
    with pytest.raises(DeviceLost):
        until(runs, session, [1])


def test_where_the_device_has_one_row_only_everything_runs_in_it(session: Session) -> None:
    class OneRow(NoDevice):
        runs_aside = False

    session.waiting.append(first_of(loaded(FakeRunner()), 1))
    runs = runs_of(session, device=OneRow())
    runs.step()
    assert session.answers == [1], "answered in the same step, by the loop itself"
