"""The statistics behind the guard: evidence is honest however often it is looked at, bounds hold, and are no wonder."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sequential import Comparison, Tally, log_evidence, most_evidence, upper_bound
from tests.support.simulation import repeatable

RATES = st.floats(min_value=1e-4, max_value=0.999)


@st.composite
def tallies(draw: st.DrawFn) -> Tally:
    total = draw(st.integers(0, 5000))
    return Tally(draw(st.integers(0, total)), total)


@pytest.mark.parametrize("rate", [0.002, 0.02, 0.3, 0.9])
def test_evidence_against_what_is_true_rarely_ever_grows(rate: float) -> None:
    """A hundred looks or a thousand: at most one in ten reaches 10, one in a hundred 100."""
    random, runs = repeatable(11), 2000
    highest = []
    for _ in range(runs):
        tally, top = Tally(), -math.inf
        for _ in range(300):
            bad = random.random() < rate
            tally.add(bad=bad)
            if bad:
                top = max(top, log_evidence(tally, rate))
        highest.append(top)
    for wanted in (10, 100):
        assert sum(top >= math.log(wanted) for top in highest) <= runs / wanted


@pytest.mark.parametrize("rate", [0.0, 0.02, 0.3])
def test_the_upper_bound_holds_at_all_times_at_once(rate: float) -> None:
    random, runs, doubt, broken = repeatable(12), 500, 0.05, 0
    for _ in range(runs):
        tally = Tally()
        for step in range(200):
            tally.add(bad=random.random() < rate)
            if step % 5 == 0 and upper_bound(tally, doubt) < rate:
                broken += 1
                break
    assert broken <= runs * doubt


def test_the_upper_bound_closes_in() -> None:
    bounds = [upper_bound(Tally(total // 50, total), 1e-4) for total in (0, 50, 500, 5_000, 500_000)]
    assert bounds[0] == 1.0
    assert all(later < earlier for earlier, later in pairwise(bounds))
    assert bounds[-1] == pytest.approx(0.02, rel=0.1)
    assert upper_bound(Tally(7, 7), 0.1) == 1.0


@given(tallies(), RATES)
def test_the_quick_bound_is_never_below_the_evidence(tally: Tally, allowed: float) -> None:
    assert most_evidence(tally, allowed) >= log_evidence(tally, allowed) - 1e-9


@given(tallies(), RATES, RATES)
def test_more_tolerance_is_less_evidence(tally: Tally, one: float, other: float) -> None:
    assert log_evidence(tally, max(one, other)) <= log_evidence(tally, min(one, other)) + 1e-9


@given(tallies(), st.floats(min_value=1e-9, max_value=0.5))
def test_the_bound_is_above_what_was_seen(tally: Tally, doubt: float) -> None:
    assert tally.rate <= upper_bound(tally, doubt) <= 1


def test_an_unknown_rate_allows_everything() -> None:
    comparison = Comparison(0.02)
    comparison.canary = Tally(20, 20)
    assert comparison.evidence(math.log(100), 0.01) is None
    assert comparison.evidence_alone(math.log(100)) is not None


def test_a_rate_that_the_current_version_has_too_is_no_evidence() -> None:
    comparison = Comparison(0.02)
    comparison.canary, comparison.current = Tally(50, 100), Tally(500, 1000)
    assert comparison.evidence(math.log(10), 0.1) is None
    comparison.current = Tally(10, 1000)
    found = comparison.evidence(math.log(10), 0.1)
    assert found is not None
    assert 0.01 < found.allowed < 0.05
