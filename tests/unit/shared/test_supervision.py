from hypothesis import given
from hypothesis import strategies as st

from shared.supervision import Backoff


def backoff() -> Backoff:
    return Backoff(first_s=0.1, max_s=10.0, stable_s=10.0)


def test_the_first_start_has_no_delay() -> None:
    assert backoff().next_delay_s(0.0) == 0.0


def test_delays_double_up_to_the_maximum() -> None:
    policy = backoff()
    now_s, delays = 100.0, []
    for _ in range(9):
        policy.started(now_s)
        policy.failed(now_s)
        delays.append(round(policy.next_delay_s(now_s), 6))
        now_s += delays[-1]
        assert policy.next_delay_s(now_s) == 0.0
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert policy.failures_in_a_row == 9


def test_one_that_was_stable_starts_again_at_once_and_is_forgiven() -> None:
    policy = backoff()
    for _ in range(5):
        policy.failed(0.0)
    policy.started(20.0)
    policy.failed(30.0)
    assert policy.next_delay_s(30.0) == 0.0
    assert policy.failures_in_a_row == 1
    policy.started(30.0)
    policy.failed(30.1)
    assert round(policy.next_delay_s(30.1), 6) == 0.2


def test_a_start_that_never_came_about_is_a_failure() -> None:
    policy = backoff()
    policy.failed(0.0)
    policy.failed(5_000.0)
    assert policy.failures_in_a_row == 2


def test_thousands_of_failures_stay_at_the_maximum() -> None:
    policy = backoff()
    for _ in range(5_000):
        policy.failed(1.0)
    assert policy.next_delay_s(1.0) == 10.0


@given(st.lists(st.floats(0.0, 9.9), min_size=20, max_size=60))
def test_never_more_than_one_start_a_second_in_the_long_run(lifetimes_s: list[float]) -> None:
    policy = backoff()
    now_s = 0.0
    for lifetime_s in lifetimes_s:
        now_s += policy.next_delay_s(now_s)
        policy.started(now_s)
        now_s += lifetime_s
        policy.failed(now_s)
    assert now_s >= len(lifetimes_s) - 10
