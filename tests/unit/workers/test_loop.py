from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workers.backends.base import DeviceLost, NoDevice
from workers.jobs import Inbox
from workers.loop import Worker
from workers.model_pool import News


class Stop:
    requested = False

    def fileno(self) -> int:
        return 0


class Pool:
    def fileno(self) -> int:
        return 0

    def get(self, key: object) -> None:
        return None

    def ran(self, loaded: object, rows: int) -> None:
        pass

    def sleep_s(self) -> float | None:
        return None

    def turn(self) -> News:
        return News()


@pytest.fixture
def worker() -> Worker:
    return Worker("worker-0", [Path("nowhere.sock")], NoDevice(), Pool(), Stop())  # type: ignore[arg-type]  # fakes


def raises(error: Exception) -> Callable[[], Any]:
    def call() -> None:
        raise error

    return call


def test_a_lost_device_stays_the_reason_when_it_can_not_be_detached_either(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker._runs, "step", raises(DeviceLost("in the forward pass")))
    monkeypatch.setattr(worker._links, "close", raises(DeviceLost("in the end")))
    with pytest.raises(DeviceLost, match="in the forward pass"):
        worker.run()


def test_a_device_that_is_lost_in_the_end_is_lost(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker._stop.requested = True  # type: ignore[misc]  # a fake
    monkeypatch.setattr(worker._links, "close", raises(DeviceLost("in the end")))
    with pytest.raises(DeviceLost, match="in the end"):
        worker.run()


def test_what_has_come_before_a_stop_is_taken_in(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    session = SimpleNamespace(drain=lambda: done.append("drain"), inbox=Inbox())
    monkeypatch.setattr(worker._links, "sessions", lambda: [session])
    monkeypatch.setattr(worker._links, "close", lambda: None)
    monkeypatch.setattr(worker._work, "finish_all", lambda: done.append("finish"))
    worker._stop.requested = True  # type: ignore[misc]  # a fake
    worker.run()
    assert done == ["drain", "finish"]


def test_a_stop_answers_what_is_under_way_and_leaves(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    def step() -> bool:
        worker._stop.requested = True  # type: ignore[misc]  # a fake
        steps.append("step")
        return True

    monkeypatch.setattr(worker._runs, "step", step)
    monkeypatch.setattr(worker._runs, "finish_all", lambda: steps.append("finish"))
    monkeypatch.setattr(worker._links, "close", lambda: steps.append("close"))
    worker.run()
    assert steps == ["step", "finish", "close"]
