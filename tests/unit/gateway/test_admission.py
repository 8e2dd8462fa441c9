"""The door: room is counted exactly, refusals name their limit and say when to come back."""

from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission import Admission, Permit
from shared.errors import Draining, HeadraceError, Overloaded, TooLarge
from shared.settings import AdmissionSettings


def admission(max_requests: int = 4, max_rows: int = 100, max_bytes: int = 1000) -> Admission:
    return Admission(AdmissionSettings(max_requests=max_requests, max_rows=max_rows, max_bytes=max_bytes))


def in_flight(door: Admission) -> tuple[int, int, int]:
    return door.in_flight_requests, door.in_flight_rows, door.in_flight_bytes


def refusal(door: Admission, rows: int = 1, nbytes: int = 0, now_s: float = 0.0) -> HeadraceError:
    with pytest.raises(HeadraceError) as caught:
        door.admit(rows, nbytes, now_s)
    return caught.value


def retry_ms(door: Admission, rows: int = 1, now_s: float = 0.0) -> int:
    error = refusal(door, rows, now_s=now_s)
    assert isinstance(error, Overloaded)
    assert error.retry_after_ms is not None
    return error.retry_after_ms


def test_a_permit_takes_room_and_leaving_its_block_gives_it_back() -> None:
    door = admission()
    with door.admit(3, 50, 0.0) as permit:
        assert in_flight(door) == (1, 3, 50)
        assert (permit.rows, permit.nbytes) == (3, 50)
        with door.admit(2, 0, 0.0):
            assert in_flight(door) == (2, 5, 50)
        assert in_flight(door) == (1, 3, 50)
    assert in_flight(door) == (0, 0, 0)


def test_an_error_inside_the_block_gives_the_room_back_and_passes() -> None:
    door = admission()
    with pytest.raises(KeyError), door.admit(1, 1, 0.0):
        raise KeyError
    assert in_flight(door) == (0, 0, 0)


def test_releasing_twice_gives_back_once() -> None:
    door = admission()
    other = door.admit(1, 1, 0.0)
    with door.admit(3, 50, 0.0) as permit:
        permit.release()
        permit.release()
        assert in_flight(door) == (1, 1, 1)
    assert in_flight(door) == (1, 1, 1)
    other.release()
    assert in_flight(door) == (0, 0, 0)


@pytest.mark.parametrize(
    ("held", "asked", "words"),
    [
        ([(1, 0)] * 4, (1, 0), "limit of 4 requests at one time (admission.max_requests)"),
        ([(99, 0)], (2, 0), "limit of 100 rows at one time (admission.max_rows)"),
        ([(1, 999)], (1, 2), "limit of 1000 payload bytes at one time (admission.max_bytes)"),
    ],
)
def test_without_room_the_first_limit_names_itself(
    held: list[tuple[int, int]], asked: tuple[int, int], words: str
) -> None:
    door = admission()
    permits = [door.admit(rows, nbytes, 0.0) for rows, nbytes in held]
    before = in_flight(door)
    error = refusal(door, *asked)
    assert isinstance(error, Overloaded)
    assert words in error.text
    assert in_flight(door) == before
    permits[0].release()
    door.admit(*asked, 0.0)


def test_a_request_that_fits_exactly_is_admitted() -> None:
    door = admission()
    with door.admit(100, 1000, 0.0):
        assert in_flight(door) == (1, 100, 1000)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ((101, 0), "the request has 101 rows; the limit is 100 (admission.max_rows)"),
        ((1, 1001), "the request has 1001 payload bytes; the limit is 1000 (admission.max_bytes)"),
    ],
)
def test_what_could_never_fit_is_too_large_also_when_full(asked: tuple[int, int], words: str) -> None:
    door = admission()
    with ExitStack() as stack:
        for _ in range(5):
            error = refusal(door, *asked)
            assert isinstance(error, TooLarge)
            assert error.text == words
            assert error.retry_after_ms is None
            if door.in_flight_requests < 4:
                stack.enter_context(door.admit(1, 1, 0.0))


def test_closed_doors_refuse_all_and_keep_what_is_inside() -> None:
    door = admission()
    with door.admit(1, 1, 0.0):
        door.close_doors()
        door.close_doors()
        assert not door.is_open
        error = refusal(door)
        assert isinstance(error, Draining)
        assert error.retry_after_ms == 1000
        assert in_flight(door) == (1, 1, 1)
        assert repr(door) == "<Admission 1/4 requests, 1/100 rows, 1/1000 bytes, closed>"
    assert in_flight(door) == (0, 0, 0)


# ------------------------------------------------------------------ when to come back


def saturated(rate: float, *, limit: int = 4, seconds: float = 2.0) -> tuple[Admission, list[Permit]]:
    """A full server that gives one request back every 1/rate seconds and takes the next one in."""
    door = admission(max_requests=limit)
    permits = [door.admit(1, 0, 0.0) for _ in range(limit)]
    for step in range(1, int(rate * seconds) + 1):
        permits.pop(0).release()
        permits.append(door.admit(1, 0, step / rate))
    return door, permits


def test_before_any_release_the_delay_is_a_first_guess() -> None:
    door = admission(max_requests=1)
    with door.admit(1, 0, 50.0):
        assert [retry_ms(door, now_s=50.0 + step / 100) for step in range(100)] == [100] * 100


@pytest.mark.parametrize(("rate", "expected_ms"), [(20.0, 50), (50.0, 20), (2.0, 500)])
def test_one_refused_caller_comes_back_when_the_next_request_should_leave(rate: float, expected_ms: int) -> None:
    door, _held = saturated(rate)
    assert retry_ms(door, now_s=2.0) == pytest.approx(expected_ms, rel=0.1)


def test_callers_refused_together_come_back_one_after_another() -> None:
    door, _held = saturated(50.0)
    delays = [retry_ms(door, now_s=2.0) for _ in range(50)]
    assert delays == sorted(delays)
    assert delays[0] == pytest.approx(20, abs=2)
    assert delays[-1] == pytest.approx(1000, rel=0.1)


def test_the_delay_has_a_floor_and_a_ceiling() -> None:
    door, _held = saturated(2000.0)
    delays = [retry_ms(door, now_s=2.0) for _ in range(10_000)]
    assert (delays[0], delays[-1]) == (10, 2000)


def test_those_who_were_promised_room_are_forgotten_as_room_is_given_back() -> None:
    door, held = saturated(50.0)
    for _ in range(40):
        retry_ms(door, now_s=2.0)
    for step in range(1, 51):
        held.pop(0).release()
        held.append(door.admit(1, 0, 2.0 + step / 50))
    assert retry_ms(door, now_s=3.0) <= 40


def test_a_stalled_server_sends_callers_further_and_further_away() -> None:
    door, _held = saturated(50.0)
    delays = [retry_ms(door, now_s=2.0 + 0.2 * step) for step in range(1, 30)]
    assert delays == sorted(delays)
    assert delays[-1] == 2000


def test_a_quiet_time_before_the_rush_does_not_count_as_slowness() -> None:
    door, held = saturated(50.0)
    for permit in held:
        permit.release()
    again = [door.admit(1, 0, 1000.0) for _ in range(4)]
    assert retry_ms(door, now_s=1000.0) == pytest.approx(20, rel=0.1)
    assert len(again) == 4


def test_the_delay_is_counted_in_the_unit_that_is_missing() -> None:
    door = admission(max_requests=100, max_rows=100)
    held = [door.admit(10, 0, 0.0) for _ in range(10)]
    for step in range(1, 41):  # 10 requests of 10 rows a second
        held.pop(0).release()
        held.append(door.admit(10, 0, step / 10))
    assert retry_ms(door, rows=30, now_s=4.0) == pytest.approx(300, rel=0.1)


ASKED = st.tuples(st.just("admit"), st.integers(1, 120), st.integers(0, 1200))
RELEASED = st.tuples(st.just("release"), st.integers(0, 20), st.just(0))


@settings(deadline=None)
@given(st.lists(st.one_of(ASKED, RELEASED), max_size=60), st.floats(0, 0.5))
def test_the_counters_are_always_the_sum_of_the_open_permits(steps: list[tuple[str, int, int]], gap_s: float) -> None:
    door = admission()
    held: list[Permit] = []
    delays: list[int] = []
    for number, (action, first, nbytes) in enumerate(steps):
        if action == "release":
            for permit in held[first : first + 1] * 2:
                permit.release()
            del held[first : first + 1]
        else:
            try:
                held.append(door.admit(first, nbytes, number * gap_s))
            except TooLarge:
                assert first > 100 or nbytes > 1000
            except Overloaded as error:
                delays.append(error.retry_after_ms or 0)
                rows, total = sum(p.rows for p in held), sum(p.nbytes for p in held)
                assert len(held) == 4 or rows + first > 100 or total + nbytes > 1000
        assert in_flight(door) == (len(held), sum(p.rows for p in held), sum(p.nbytes for p in held))
        assert len(held) <= 4
        assert door.in_flight_rows <= 100
        assert door.in_flight_bytes <= 1000
    assert all(10 <= delay_ms <= 2000 for delay_ms in delays)
