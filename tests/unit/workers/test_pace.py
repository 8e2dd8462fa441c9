import threading

import pytest

from workers.pace import LATELY_S, LONGEST_PAUSE_S, PAUSE, Pace


class Flag:
    def __init__(self) -> None:
        self.waited: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waited.append(seconds)
        return False


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def pace(now: list[float], monkeypatch: pytest.MonkeyPatch) -> Pace:
    pace = Pace(lambda: now[0])
    monkeypatch.setattr(pace, "_closing", Flag())
    return pace


def waited(pace: Pace) -> list[float]:
    assert isinstance(pace._closing, Flag)
    return pace._closing.waited


def test_without_traffic_there_is_no_pause(pace: Pace, now: list[float]) -> None:
    pace.give_way(0.1)
    pace.ran()
    now[0] += LATELY_S + 0.01
    pace.give_way(0.1)
    assert waited(pace) == []


def test_beside_traffic_each_step_is_followed_by_a_longer_pause(pace: Pace, now: list[float]) -> None:
    pace.ran()
    now[0] += LATELY_S
    pace.give_way(0.1)
    pace.give_way(60.0)
    assert waited(pace) == [0.1 * PAUSE, LONGEST_PAUSE_S]


def test_a_stop_ends_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.pace.LONGEST_PAUSE_S", 1000.0)
    pace = Pace(lambda: 0.0)
    pace.ran()
    thread = threading.Thread(target=pace.give_way, args=(1000.0,))
    thread.start()
    pace.close()
    thread.join(10.0)
    assert not thread.is_alive()
