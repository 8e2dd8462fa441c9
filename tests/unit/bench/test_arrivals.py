import itertools
import math
import random
from collections import Counter

import pytest

from bench.arrivals import Phase, boundaries, parse, plan, times, weighted


def _times(phase: Phase, seed: int = 1) -> list[float]:
    return list(times(phase, random.Random(seed)))  # noqa: S311 - arrivals, not secrets


@pytest.mark.parametrize(
    "phase",
    [
        Phase("constant", 500, 10),
        Phase("poisson", 500, 10),
        Phase("bursts", 500, 10, burst=25),
        Phase("ramp", 200, 10, to=800),
        Phase("ramp", 800, 10, to=200),
        Phase("ramp", 0, 10, to=1000),
    ],
    ids=lambda phase: f"{phase.kind} {phase.rate} {phase.to}",
)
def test_times_rise_inside_the_phase_and_their_number_is_the_rate_s(phase: Phase) -> None:
    found = _times(phase)
    assert found == sorted(found)
    assert found[0] >= 0
    assert found[-1] < phase.seconds
    assert abs(len(found) - 5000) < 4 * math.sqrt(5000)


def test_the_same_seed_gives_the_same_plan_and_another_one_another() -> None:
    phases = (Phase("poisson", 100, 2), Phase("ramp", 10, 2, to=100))
    assert plan(phases, 7) == plan(phases, 7)
    assert plan(phases, 7) != plan(phases, 8)


def test_phases_follow_each_other() -> None:
    phases = (Phase("constant", 10, 1), Phase("constant", 0, 2), Phase("constant", 20, 0.5))
    found = plan(phases, 1)
    assert Counter(arrival.phase for arrival in found) == {0: 10, 2: 10}
    assert next(arrival.planned_s for arrival in found if arrival.phase == 2) == 3.0
    assert boundaries(phases) == [0.0, 1.0, 3.0, 3.5]


def test_poisson_gaps_are_exponential() -> None:
    found = _times(Phase("poisson", 1000, 20))
    gaps = [later - earlier for earlier, later in itertools.pairwise(found)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert math.isclose(mean, 0.001, rel_tol=0.05)
    assert math.isclose(spread, mean, rel_tol=0.05)  # even gaps would have none


def test_bursts_come_at_one_moment_evenly_spaced() -> None:
    found = Counter(_times(Phase("bursts", 100, 1, burst=20)))
    assert list(found.values()) == [20] * 5
    assert list(found) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])


def test_a_ramp_has_three_times_as_many_calls_in_its_second_half() -> None:
    found = _times(Phase("ramp", 0, 10, to=1000))
    late = sum(time_s >= 5 for time_s in found)
    assert math.isclose(late / len(found), 0.75, abs_tol=0.03)


@pytest.mark.parametrize(
    ("text", "phase"),
    [
        ("poisson:rate=200,seconds=8", Phase("poisson", 200, 8)),
        ("bursts:rate=300,seconds=1,burst=32,name=b", Phase("bursts", 300, 1, burst=32, name="b")),
        ("ramp:rate=0,seconds=1.5,to=9", Phase("ramp", 0, 1.5, to=9)),
    ],
)
def test_a_phase_reads_as_it_is_written(text: str, phase: Phase) -> None:
    assert parse(text) == phase


@pytest.mark.parametrize(
    "text",
    [
        "steady:rate=1,seconds=1",
        "poisson:rate=1",
        "poisson:seconds=1",
        "poisson:rate=-1,seconds=1",
        "poisson:rate=nan,seconds=1",
        "poisson:rate=x,seconds=1",
        "poisson:rate=1,seconds=1,kind=ramp",
        "bursts:rate=1,seconds=1,burst=0",
        "poisson:rate=1e9,seconds=1",
    ],
)
def test_a_bad_phase_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(text)


def test_sizes_are_drawn_by_weight() -> None:
    found = Counter(weighted({"short": 6, "long": 2}, 8000, seed=3))
    assert math.isclose(found["short"] / 8000, 0.75, abs_tol=0.03)
    assert weighted({"short": 6, "long": 2}, 50, seed=3) == weighted({"short": 6, "long": 2}, 50, seed=3)
