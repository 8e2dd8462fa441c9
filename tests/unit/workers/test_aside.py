"""A version's first batch runs beside those of the others, and is answered all the same, whatever happens meanwhile."""

import gc
import select
import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shared.board import Doing
from shared.clock import now_s
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
        self.threads: list[str] = []

    def run(self, items: Inputs, padded_rows: int, precision: Precision) -> Forward:
        self.now += 1
        self.threads.append(threading.current_thread().name)
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
        self.noted: list[int | None] = []

    def next(self, apart: Collection[LoadedVersion]) -> tuple[LoadedVersion, RunBatch] | None:
        return next((each for each in self.waiting if each[0] not in apart), None)

    def begin(self, batch: RunBatch) -> None:
        self.waiting.remove(next(each for each in self.waiting if each[1] is batch))

    def answer(self, message: RunBatch, done: BatchDone) -> None:
        assert not any(answer.failure for answer in done.answers)
        self.answers.append(message.batch)

    def doing(self, doing: Doing) -> None:
        pass

    def note(self, version: LoadedVersion) -> None:
        self.noted.append(version.row_cap)


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
        if not runs.step():
            assert poller.poll(WAIT_S * 1e3), f"waited for {answers}, got {session.answers}"


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


def test_only_what_proves_a_version_runs_aside_and_others_overtake_what_waits_for_it(session: Session) -> None:
    gate = Gate()
    new, serves = loaded(gate), loaded(FakeRunner())
    session.waiting.extend([first_of(new, 1), later_of(new, 2), later_of(serves, 3)])
    runs = runs_of(session)
    while runs.step():
        pass
    assert session.answers == [3]
    assert [each.message.batch for each in runs._aside._under_way] == [1]
    assert len(session.waiting) == 1
    gate.open.set()
    until(runs, session, [3, 1, 2])
    assert gate.threads == ["aside", "MainThread"]


def test_a_version_is_held_by_nobody_once_it_has_run_aside(session: Session) -> None:
    version = loaded(FakeRunner())
    gone = weakref.ref(version)
    session.waiting.append(first_of(version, 1))
    runs = runs_of(session)
    runs.step()
    until(runs, session, [1])
    del version
    limit_s = now_s() + WAIT_S
    while gone() is not None:  # the thread has said what came of it, and is about to wait for the next one
        assert now_s() < limit_s, "the thread holds it while it waits"
        gc.collect()


def test_what_a_version_learns_aside_is_told(session: Session) -> None:
    version, proof = loaded(FakeRunner(memory_rows=1)), batch(item(1, 1.0), item(2, 1.0))
    session.waiting.append((version, msgspec.structs.replace(proof, aside=True)))
    runs = runs_of(session)
    runs.step()
    until(runs, session, [1])
    assert session.noted == [1]


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
    runs = runs_of(leaves, stays)
    runs.step()
    stays.waiting.append(later_of(loaded(FakeRunner()), 2))
    assert gate.inside.acquire(timeout=WAIT_S)
    gone: Any = leaves
    assert not runs.forget(gone), "its memory is still read"
    until(runs, stays, [2])  # meanwhile the others are served
    assert not runs.forget(gone)
    gate.open.set()
    until(runs, leaves, [1])
    assert runs.forget(gone)


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
