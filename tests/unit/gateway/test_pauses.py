import pytest

from gateway.pauses import KEPT, LATE_S, Pauses


def ticked(*ticks: float) -> Pauses:
    pauses = Pauses()
    for now_s in ticks:
        pauses.noticed(now_s)
    return pauses


def test_only_a_tick_that_comes_far_too_late_is_a_pause() -> None:
    pauses = Pauses()
    told = [pauses.noticed(now_s) for now_s in (100.0, 100.25, 100.25 + LATE_S, 130.0, 130.25)]
    assert told == [0.0, 0.0, 0.0, 130.0 - 100.25 - LATE_S, 0.0]


@pytest.mark.parametrize(
    ("since_s", "age_s"),
    [(90.0, 11.0), (100.0, 1.0), (110.0, 1.0), (130.0, 1.0), (130.5, 0.5)],
    ids=["before", "at the last tick", "in between", "at the first tick", "after"],
)
def test_what_we_did_not_see_makes_nothing_older(since_s: float, age_s: float) -> None:
    assert ticked(99.75, 100.0, 130.0, 130.25).age_s(since_s, 131.0) == age_s


def test_several_pauses_add_up_and_old_ones_are_forgotten() -> None:
    assert ticked(0.0, 10.0, 10.25, 20.0).age_s(-1.0, 21.0) == pytest.approx(1.0 + 0.25 + 1.0)
    many = ticked(*(2.0 * number for number in range(KEPT + 2)))
    assert len(many._pauses) == KEPT
