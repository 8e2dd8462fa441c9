import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shared.errors import Code, ExitCode, StartupError, UnknownModel
from shared.messages import Failure
from tests.support.worker_parts import FakeRunner, loaded, sequence
from workers.backends.base import DeviceLost, LoadFailed, NotAsDeclared
from workers.model_pool import Key, LoadedVersion, ModelPool

KEY = loaded(FakeRunner()).key
LIMIT_S = 10.0


@contextmanager
def pool_of(*outcomes: LoadedVersion | Exception) -> Iterator[ModelPool]:
    pool = ModelPool(sequence(*outcomes))
    yield pool
    assert pool.close(LIMIT_S)


def awaited(pool: ModelPool) -> list[tuple[Key, LoadedVersion | Failure]]:
    assert select.select([pool], [], [], LIMIT_S)[0], f"no load finished in {LIMIT_S} s"
    return pool.finished()


def test_a_loaded_version_is_told_once_and_kept() -> None:
    version = loaded(FakeRunner())
    with pool_of(version) as pool:
        assert pool.get(KEY) is None
        pool.want(KEY)
        pool.want(KEY)
        assert awaited(pool) == [(KEY, version)]
        assert pool.finished() == []
        assert pool.get(KEY) is version
        pool.want(KEY)
        assert pool.finished() == []


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (StartupError(ExitCode.MODEL_LOAD, "weights lack a"), Code.NOT_READY, "weights lack a"),
        (UnknownModel("model x is unknown"), Code.UNKNOWN_MODEL, "model x is unknown"),
        (NotAsDeclared("2 outputs, not 1"), Code.NOT_READY, "model toy: 2 outputs, not 1"),
        (LoadFailed("w can't be read", "/secret/w"), Code.NOT_READY, "w can't be read"),
        (
            FileNotFoundError(2, "No such file", "/secret/w"),
            Code.NOT_READY,
            "model toy failed its warm-up (FileNotFoundError, see the log)",
        ),
    ],
)
def test_a_failed_load_is_an_answer_and_can_be_tried_again(error: Exception, code: Code, words: str) -> None:
    version = loaded(FakeRunner())
    with pool_of(error, version) as pool:
        pool.want(KEY)
        ((_, failure),) = awaited(pool)
        assert isinstance(failure, Failure)
        assert failure.code == code
        assert failure.text == words
        pool.want(KEY)
        assert awaited(pool) == [(KEY, version)]


def test_a_version_dropped_while_it_loads_is_not_kept() -> None:
    go = threading.Event()
    version = loaded(FakeRunner())

    def load(_: Key, config: bytes) -> LoadedVersion:
        go.wait(LIMIT_S)
        return version

    pool = ModelPool(load)
    pool.want(KEY)
    pool.drop(KEY)
    go.set()
    assert awaited(pool) == []
    assert pool.get(KEY) is None
    assert pool.close(LIMIT_S)


def test_dropping_forgets() -> None:
    with pool_of(loaded(FakeRunner()), loaded(FakeRunner())) as pool:
        pool.want(KEY)
        awaited(pool)
        pool.drop(KEY)
        assert pool.get(KEY) is None
        pool.want(KEY)
        assert len(awaited(pool)) == 1


def test_only_what_is_kept_stays() -> None:
    old, new, coming = (Key("toy", digit * 16) for digit in "012")
    go = threading.Event()

    def load(key: Key, config: bytes) -> LoadedVersion:
        if key == coming:
            go.wait(LIMIT_S)
        return loaded(FakeRunner())

    pool = ModelPool(load)
    for key in (old, new):
        pool.want(key)
        awaited(pool)
    pool.want(coming)
    pool.keep({new, Key("other", "0" * 16)})
    go.set()
    assert awaited(pool) == []
    assert [key for key in (old, new, coming) if pool.get(key) is not None] == [new]
    assert pool.close(LIMIT_S)


def test_a_device_lost_while_loading_reaches_the_loop() -> None:
    with pool_of(DeviceLost("sticky")) as pool:
        pool.want(KEY)
        assert select.select([pool], [], [], LIMIT_S)[0]
        with pytest.raises(DeviceLost, match="sticky"):
            pool.finished()


def test_closing_does_not_wait_for_a_load_that_hangs() -> None:
    started, go = threading.Event(), threading.Event()

    def load(_: Key, config: bytes) -> LoadedVersion:
        started.set()
        go.wait(LIMIT_S)
        return loaded(FakeRunner())

    pool = ModelPool(load)
    pool.want(KEY)
    assert started.wait(LIMIT_S)
    assert not pool.close(0.01)
    go.set()
    assert pool.close(LIMIT_S)
