import pytest

from gateway.generation import Limits, Places, Ticket
from gateway.generation_pace import Ask, Pace
from shared.errors import DeadlineExceeded, Overloaded


def ticket(number: int, *, rows: int = 1, answer: int = 10, deadline_s: float = 100.0, began_s: float = 0.0) -> Ticket:
    made = Ticket(number, rows, answer, 100, deadline_s)
    made.prompt_tokens, made.began_s = 2, began_s
    return made


def busy(*running: Ticket, sequences: int = 2) -> Places:
    places = Places()
    places.open(b"worker-0.1", Limits(sequences, 1000))
    for one in running:
        places.wait(one)
        assert places.next() is not None
    return places


def seeded(token_s: float = 0.1) -> Pace:
    pace = Pace()
    pace.seed(token_s, 0.0)
    return pace


def test_warm_up_counts_until_texts_have_shown_otherwise() -> None:
    pace = seeded(0.1)
    assert (pace.token_s, pace.share) == (0.1, 1.0)
    pace.ended(ticket(1, answer=10, began_s=5.0), 5, 6.0)
    assert pace.token_s == pytest.approx(0.2)
    assert pace.share == pytest.approx(0.5)
    pace.ended(ticket(2), 0, 7.0)  # says nothing
    assert pace.token_s == pytest.approx(0.2)


def test_the_newest_texts_count_for_more() -> None:
    pace = seeded(0.1)
    for number in range(100):
        pace.ended(ticket(number, began_s=0.0), 10, 1.0)
    for number in range(60):
        pace.ended(ticket(number, began_s=0.0), 10, 3.0)
    assert 0.28 < pace.token_s < 0.3


def test_a_free_place_is_free_now() -> None:
    assert seeded().begins_in_s(busy(ticket(1)), [], 0.0) == 0.0


def test_a_full_worker_is_free_when_the_first_of_its_texts_ends() -> None:
    places = busy(ticket(1, answer=10), ticket(2, answer=30))
    assert seeded().begins_in_s(places, [], 0.4) == pytest.approx(0.6)


def test_who_is_ahead_takes_the_first_free_place() -> None:
    places = busy(ticket(1, answer=10), ticket(2, answer=30))
    assert seeded().begins_in_s(places, [ticket(3, answer=10)], 0.0) == pytest.approx(2.0)
    assert seeded().begins_in_s(places, [ticket(3, answer=40)], 0.0) == pytest.approx(3.0)


def test_a_beam_search_takes_several_places() -> None:
    places = busy(ticket(1, rows=2, answer=10))
    assert seeded().begins_in_s(places, [ticket(3, rows=2, answer=10)], 0.0) == pytest.approx(2.0)


def test_one_that_is_late_may_end_at_any_time() -> None:
    places = busy(ticket(1, answer=10), ticket(2, answer=10))
    assert seeded().begins_in_s(places, [], 50.0) == pytest.approx(0.5)


def test_a_deadline_too_near_for_the_whole_text_is_no_reason() -> None:
    seeded().check(busy(ticket(1)), Ask(100, 0.2, 1), 0.0)


def test_one_too_near_to_begin_is_refused_with_the_time_to_come_back() -> None:
    places = busy(ticket(1), ticket(2))
    with pytest.raises(Overloaded, match="would begin in about 1000 ms, the deadline leaves 200 ms") as refused:
        seeded().check(places, Ask(100, 0.2, 1), 0.0)
    assert refused.value.retry_after_ms == 800


def test_only_who_goes_first_is_ahead() -> None:
    places = busy(ticket(1), ticket(2))
    for number in range(3, 7):
        places.wait(ticket(number, deadline_s=50.0))
    with pytest.raises(Overloaded, match="would begin"):
        seeded().check(places, Ask(200, 2.0, 1), 0.0)
    seeded().check(places, Ask(100, 2.0, 1), 0.0)


def test_a_time_that_is_over() -> None:
    with pytest.raises(DeadlineExceeded):
        seeded().check(Places(), Ask(100, 1.0, 1), 1.0)


def test_an_idle_server_takes_what_comes_whatever_it_has_learned() -> None:
    pace = seeded(1e6)
    pace.check(busy(), Ask(100, 0.1, 1000), 0.0)


def test_no_more_wait_than_may() -> None:
    places = busy(ticket(1), ticket(2))
    for number in range(3, 11):
        places.wait(ticket(number))
    with pytest.raises(Overloaded, match="8 texts wait to be begun; at most 8 may") as refused:
        seeded().check(places, Ask(1, 1000.0, 1), 0.0)
    assert refused.value.retry_after_ms == 1000


def test_how_long_a_text_may_be_silent() -> None:
    pace = Pace()
    pace.seed(0.1, 0.01)
    assert pace.quiet_s(ticket(1)) == pytest.approx(0.12)
    assert pace.quiet_s(ticket(1, rows=2)) == pytest.approx(1.02)
