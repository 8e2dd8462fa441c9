import gc
import os
import select
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from structlog.typing import EventDict

from shared.errors import Code, ExitCode, StartupError, UnknownModel
from shared.messages import Failure
from tests.support.worker_parts import FakeRunner, loaded
from workers.backends.base import DeviceLost, LoadFailed, NotAsDeclared
from workers.backends.device_memory import DeviceMemory
from workers.loaded import Key, LoadedVersion
from workers.loader_thread import Estimated, Finished, GaveBack, LoaderThread, Outcome
from workers.pace import NICE, Pace

KEY = loaded(FakeRunner()).key
LIMIT_S = 10.0


class Memory(DeviceMemory):
    """Falls by a thousand whenever something is given back, unless someone still holds the version."""

    def __init__(self) -> None:
        self.used = 5000
        self.watched: weakref.ref[LoadedVersion] | None = None
        self.gave_back = 0

    def total_bytes(self) -> int:
        return 10_000

    def used_bytes(self) -> int:
        return self.used

    def give_back(self) -> None:
        gc.collect()
        self.gave_back += 1
        if self.watched is not None and self.watched() is None:
            self.used -= 1000


class Loads:
    """Gives or raises these, one per call; an estimate is the length of model.yaml."""

    def __init__(self, *outcomes: LoadedVersion | Exception | Callable[[], LoadedVersion]) -> None:
        self._left = list(outcomes)

    def estimate(self, key: Key, config: bytes) -> int:
        if not config:
            raise UnknownModel("model toy is unknown")
        return len(config)

    def load(self, key: Key, config: bytes) -> LoadedVersion:
        outcome = self._left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome() if callable(outcome) else outcome


@contextmanager
def thread_of(
    *outcomes: LoadedVersion | Exception | Callable[[], LoadedVersion], memory: Memory | None = None
) -> Iterator[LoaderThread]:
    thread = LoaderThread(Loads(*outcomes), memory or Memory(), Pace(lambda: 0.0))
    yield thread
    assert thread.close(LIMIT_S)


def awaited(thread: LoaderThread) -> Outcome:
    assert select.select([thread], [], [], LIMIT_S)[0], f"nothing came about in {LIMIT_S} s"
    (outcome,) = thread.outcomes()
    return outcome


def test_a_loaded_version_is_told_once() -> None:
    version = loaded(FakeRunner())
    with thread_of(version) as thread:
        assert thread.outcomes() == []
        thread.load(KEY, b"")
        assert awaited(thread) == Finished(KEY, [version], 5000)
        assert thread.outcomes() == []


def test_a_size_is_estimated() -> None:
    with thread_of() as thread:
        thread.estimate(KEY, b"12345")
        assert awaited(thread) == Estimated(KEY, 5)
        thread.estimate(KEY, b"")
        assert awaited(thread) == Estimated(KEY, Failure(Code.UNKNOWN_MODEL, "model toy is unknown"))


TOY = f"model toy version {KEY.version}"


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            StartupError(ExitCode.MODEL_LOAD, "model toy: the weights lack a"),
            Code.NOT_READY,
            f"{TOY}: the weights lack a",
        ),
        (UnknownModel("model x is unknown"), Code.UNKNOWN_MODEL, "model x is unknown"),
        (NotAsDeclared("2 outputs, not 1"), Code.NOT_READY, f"{TOY}: 2 outputs, not 1"),
        (LoadFailed("w can't be read", "/secret/w"), Code.NOT_READY, f"{TOY}: w can't be read"),
        (
            FileNotFoundError(2, "No such file", "/secret/w"),
            Code.NOT_READY,
            f"{TOY}: failed its warm-up (FileNotFoundError, see the log)",
        ),
    ],
)
def test_a_failed_load_is_an_answer_and_what_it_had_built_is_given_back(
    error: Exception, code: Code, words: str
) -> None:
    memory = Memory()
    with thread_of(error, memory=memory) as thread:
        thread.load(KEY, b"")
        assert awaited(thread) == Finished(KEY, Failure(code, words), 5000)
        assert memory.gave_back == 1


def test_the_thread_is_the_last_to_hold_a_version_and_tells_both_figures(logged: list[EventDict]) -> None:
    memory = Memory()

    def build() -> LoadedVersion:
        version = loaded(FakeRunner())
        memory.watched = weakref.ref(version)
        return version

    with thread_of(build, memory=memory) as thread:
        thread.load(KEY, b"")
        outcome = awaited(thread)
        assert isinstance(outcome, Finished)
        assert isinstance(outcome.outcome, list)
        thread.give_back(KEY, outcome.outcome, "model evicted")
        assert awaited(thread) == GaveBack(freed_bytes=1000, expected_bytes=123, process_bytes=4000)
    assert logged[-1] == {
        "event": "model evicted",
        "log_level": "info",
        "model": "toy",
        "version": "0" * 16,
        "measured_bytes": 123,
        "freed_bytes": 1000,
    }


def test_a_device_lost_while_loading_reaches_the_loop() -> None:
    with thread_of(DeviceLost("sticky")) as thread:
        thread.load(KEY, b"")
        assert select.select([thread], [], [], LIMIT_S)[0]
        with pytest.raises(DeviceLost, match="sticky"):
            thread.outcomes()


class Stuck(Memory):
    """Can't give anything back."""

    def give_back(self) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize("outcome", ["fails", "is given back"])
def test_memory_that_can_not_be_given_back_ends_the_process_and_not_the_thread_alone(
    outcome: str, logged: list[EventDict]
) -> None:
    """Else whoever wants a version would wait for ever."""
    with thread_of(LoadFailed("no"), memory=Stuck()) as thread:
        if outcome == "fails":
            thread.load(KEY, b"")
        else:
            thread.give_back(KEY, [loaded(FakeRunner())], "model evicted")
        assert select.select([thread], [], [], LIMIT_S)[0], f"nothing came about in {LIMIT_S} s"
        for _ in range(2):
            with pytest.raises(DeviceLost, match=r"the loader failed \(RuntimeError, see the log\)"):
                thread.outcomes()
    assert logged[-1]["event"] == "the loader failed"


def test_closing_does_not_wait_for_a_load_that_hangs() -> None:
    started, go = threading.Event(), threading.Event()

    def hang() -> LoadedVersion:
        started.set()
        go.wait(LIMIT_S)
        return loaded(FakeRunner())

    with thread_of(hang) as thread:
        thread.load(KEY, b"")
        assert started.wait(LIMIT_S)
        assert not thread.close(0.01)
        go.set()


def test_a_load_and_the_threads_it_starts_have_a_lower_priority_and_the_loop_has_not() -> None:
    found: list[int] = []

    def look() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def build() -> LoadedVersion:
        look()
        helper = threading.Thread(target=look)
        helper.start()
        helper.join(LIMIT_S)
        return loaded(FakeRunner())

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with thread_of(build) as thread:
        thread.load(KEY, b"")
        awaited(thread)
    assert found == [min(19, own + NICE)] * 2
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
