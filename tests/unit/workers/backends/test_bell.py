import select
import threading

from workers.backends.bell import Bell

LIMIT_S = 10


class Mark:
    """Reached when the test says so, or broken."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        self.event = threading.Event()
        self.error = error

    def wait(self) -> None:
        assert self.event.wait(LIMIT_S), "the test has let the mark be reached"
        if self.error is not None:
            raise self.error

    def reached(self) -> bool:
        return self.event.is_set()

    def after_s(self, earlier: object) -> float:
        return 0.0


def readable(bell: Bell, limit_s: float = LIMIT_S) -> bool:
    return bool(select.select([bell.fileno()], [], [], limit_s)[0])


def test_it_rings_when_the_mark_is_reached_and_is_quiet_until_then() -> None:
    bell, first, second = Bell(), Mark(), Mark()
    bell.ring_at(first)
    bell.ring_at(second)
    assert not readable(bell, 0)
    first.event.set()
    assert readable(bell), "rung for the first mark"
    bell.quiet()
    bell.quiet()
    assert not readable(bell, 0)
    second.event.set()
    assert readable(bell), "rung for the second mark"


def test_a_device_that_is_lost_rings_too_and_later_marks_are_still_waited_for() -> None:
    bell, lost, fine = Bell(), Mark(RuntimeError("unspecified launch failure")), Mark()
    bell.ring_at(lost)
    bell.ring_at(fine)
    lost.event.set()
    assert readable(bell), "rung for the broken mark"
    bell.quiet()
    fine.event.set()
    assert readable(bell), "rung for the mark behind it"
