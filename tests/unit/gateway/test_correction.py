import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.correction import BURST, HALF_LIFE_S, LATE, LEAST, MOST, START, Correction


@given(st.lists(st.one_of(st.none(), st.tuples(st.floats(0.005, 10), st.floats(0, 100))), max_size=200))
def test_the_factor_stays_within_its_bounds(observations: list[tuple[float, float] | None]) -> None:
    correction = Correction()
    for seen in observations:
        if seen is None:
            correction.missed(correction.promise(0.5, 1.0))
        else:
            correction.answered(correction.promise(seen[0], 1.0), seen[1])
        assert LEAST <= correction.factor <= MOST


@pytest.mark.parametrize("truth", [0.7, 1.0, 2.5])
def test_it_learns_what_all_but_a_few_stay_within(truth: float) -> None:
    dice = random.Random(2)  # noqa: S311 - a simulation, the same every time
    correction, longer = Correction(), 0
    for n in range(20_000):
        actual_s = truth * 0.1 * dice.uniform(0.5, 1.0)
        longer += n >= 10_000 and actual_s > 0.1 * correction.factor
        correction.answered(correction.promise(0.1, 0.1), actual_s)
    assert correction.factor == pytest.approx(truth, rel=0.1)
    assert longer / 10_000 == pytest.approx(LATE, rel=0.5)


def test_what_was_let_in_together_counts_as_one_bad_time() -> None:
    correction = Correction()
    together = [correction.promise(0.5, 1.0) for _ in range(1000)]
    for promise in together:
        correction.missed(promise)
    assert correction.factor == pytest.approx(START * BURST)
    for _ in range(1000):
        correction.missed(correction.promise(0.5, 1.0))
    assert correction.factor == MOST


def test_a_try_against_the_forecast_proves_nothing() -> None:
    correction = Correction()
    for _ in range(100):
        correction.missed(correction.promise(0.020, 0.001))
    assert correction.factor == START


def test_forecasts_far_inside_their_budget_teach_nothing() -> None:
    correction = Correction()
    correction.answered(correction.promise(0.005, 1.0), 0.5)
    assert correction.factor == START


def test_a_slow_time_is_soon_known_and_soon_forgiven() -> None:
    correction = Correction()
    for _ in range(15):
        correction.missed(correction.promise(0.5, 1.0))
    assert correction.factor > 2.0
    for _ in range(5000):
        correction.answered(correction.promise(0.5, 1.0), 0.1)
    assert correction.factor < 1.0


def test_what_was_learned_of_a_bad_time_fades_without_traffic() -> None:
    correction = Correction()
    for _ in range(1000):
        correction.missed(correction.promise(0.5, 1.0))
    correction.forget(HALF_LIFE_S)
    assert correction.factor == pytest.approx((MOST + START) / 2)
    correction.forget(20 * HALF_LIFE_S)
    assert correction.factor == pytest.approx(START, rel=1e-3)


def test_what_was_learned_of_a_good_time_stays() -> None:
    correction = Correction()
    for _ in range(5000):
        correction.answered(correction.promise(0.5, 1.0), 0.1)
    learned = correction.factor
    correction.forget(60.0)
    assert correction.factor == learned < START
