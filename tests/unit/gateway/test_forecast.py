import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.book import Book
from gateway.correction import MOST, START, Promise
from gateway.forecast import GLANCE_S, RETRY_MS, Forecast, Place
from shared.errors import DeadlineExceeded, Overloaded


class FakeLoad:
    """A model with a linear cost."""

    def __init__(
        self,
        *,
        prepare_s: float = 0.001,
        a_s: float = 0.002,
        b_s: float = 0.001,
        max_rows: int = 8,
        weight: float = 1.0,
    ) -> None:
        self.rows_in_flight = 0
        self.book = Book()
        self.unprepared_items = 0
        self.workers = 1
        self.preparing_rows = 0
        self.workers = 1
        self.weight = weight
        self.prepare_s = prepare_s
        self.max_rows = max_rows
        self.goes_on = False
        self._a_s, self._b_s = a_s, b_s

    def batch_s(self, rows: int) -> float:
        return self._a_s + self._b_s * rows


def test_an_idle_server_is_its_own_work_only() -> None:
    load = FakeLoad()
    assert Forecast(2, [load]).predict_s(load, 1) == pytest.approx(0.001 + 0.003)


def test_a_deadline_that_has_passed_is_refused_by_an_idle_server_too() -> None:
    load = FakeLoad()
    with pytest.raises(DeadlineExceeded, match="had passed when the request arrived"):
        Forecast(2, [load]).check(load, 1, 0.0)


def test_texts_take_their_share_step_by_step_however_few_they_are() -> None:
    load, texts = FakeLoad(), FakeLoad(a_s=0.004, b_s=0.0)
    forecast = Forecast(2, [load, texts])
    texts.rows_in_flight = 1
    texts.goes_on = True
    own_s = load.prepare_s + load.batch_s(1)
    assert forecast.predict_s(load, 1) == pytest.approx(0.004 / 2 + own_s)  # of the step that runs a part is done
    load.rows_in_flight = 16
    assert forecast.predict_s(load, 1) == pytest.approx(2 * 2 * 0.010 + own_s)  # half of the time goes to the text


def test_the_longer_backlog_decides() -> None:
    load = FakeLoad()
    forecast = Forecast(2, [load])
    load.rows_in_flight = load.unprepared_items = 16
    assert forecast.predict_s(load, 1) == pytest.approx(2 * 0.010 + 0.004)  # two full batches ahead
    load.prepare_s = 0.1
    assert forecast.predict_s(load, 1) == pytest.approx(16 * 0.1 / 2 + 0.1 + 0.003)  # the pool is slower now


def test_other_models_are_ahead_too() -> None:
    mine, other = FakeLoad(), FakeLoad(a_s=0.5)
    forecast = Forecast(1, [mine, other])
    other.rows_in_flight = 8
    assert forecast.predict_s(mine, 1) > 0.5


def test_a_rare_model_has_only_the_batch_that_runs_ahead_of_it() -> None:
    rare, flooded = FakeLoad(prepare_s=0.0), FakeLoad(a_s=0.1, b_s=0.0)
    forecast = Forecast(1, [rare, flooded])
    flooded.rows_in_flight = 800  # ten seconds
    assert forecast.predict_s(rare, 1) == pytest.approx(0.05 + 0.003)  # on average it is half done
    rare.rows_in_flight = 1
    assert forecast.predict_s(rare, 1) == pytest.approx(0.003 + 0.05 + 0.003)
    forecast.check(rare, 1, 0.25)
    flooded.workers = 3
    assert forecast.predict_s(rare, 1) == pytest.approx(0.003 + 0.025 + 0.003)  # of three the first to be free


def test_of_several_flooded_models_one_is_running_and_each_gets_its_share() -> None:
    mine, heavy, light = FakeLoad(prepare_s=0.0), FakeLoad(a_s=0.1, b_s=0.0, weight=3.0), FakeLoad(a_s=0.05, b_s=0.0)
    heavy.rows_in_flight = light.rows_in_flight = 800
    mine.rows_in_flight = 8
    forecast = Forecast(1, [mine, heavy, light])
    assert forecast.predict_s(mine, 1) == pytest.approx(0.010 + 0.05 + 0.003)  # the shares of the two are less
    mine.rows_in_flight = 80
    assert forecast.predict_s(mine, 1) == pytest.approx(0.100 * (1 + 3 + 1) + 0.003)


def test_a_heavier_model_is_held_up_less() -> None:
    mine, other = FakeLoad(prepare_s=0.0, weight=4.0), FakeLoad(a_s=0.1, b_s=0.0)
    mine.rows_in_flight = other.rows_in_flight = 80
    assert Forecast(1, [mine, other]).predict_s(mine, 1) == pytest.approx(0.100 + 0.05 + 0.003)
    mine.rows_in_flight = 800
    assert Forecast(1, [mine, other]).predict_s(mine, 1) == pytest.approx(1.000 * 1.25 + 0.003)


def test_others_take_no_more_than_what_waits_unless_they_are_flooded() -> None:
    mine, other = FakeLoad(prepare_s=0.0), FakeLoad()
    mine.rows_in_flight, other.rows_in_flight = 80, 15
    forecast = Forecast(1, [mine, other])
    assert forecast.predict_s(mine, 1) == pytest.approx(0.100 + 0.019 + 0.003)
    other.rows_in_flight = 16
    assert forecast.predict_s(mine, 1) == pytest.approx(0.100 + 0.100 + 0.003)


def test_in_the_pool_only_what_holds_slots_of_others_is_ahead() -> None:
    mine, other = FakeLoad(), FakeLoad(prepare_s=0.01)
    other.rows_in_flight = other.unprepared_items = 1000
    forecast = Forecast(2, [mine, other])
    assert forecast.predict_s(mine, 1) == pytest.approx(0.005 + 0.004)  # a batch of the other runs
    other.preparing_rows = 24
    assert forecast.predict_s(mine, 1) == pytest.approx(24 * 0.01 / 2 + 0.004)


def test_workers_that_have_the_model_share_its_backlog() -> None:
    load = FakeLoad()
    load.rows_in_flight, load.workers = 16, 2
    assert Forecast(2, [load]).predict_s(load, 1) == pytest.approx(0.010 + 0.004)  # one full batch ahead of ours


def test_what_is_too_late_is_refused_with_a_time_to_come_back() -> None:
    load = FakeLoad()
    forecast = Forecast(2, [load])
    load.rows_in_flight = 80  # ten full batches of 10 ms
    with pytest.raises(
        Overloaded, match=f"an answer would take about {104 * START:.0f} ms, the deadline leaves 50 ms"
    ) as caught:
        forecast.check(load, 1, 0.05)
    assert caught.value.retry_after_ms == round((0.104 * START - 0.05) * 1e3)
    assert forecast.check(load, 1, 0.2) == Promise(pytest.approx(0.104), 0.2, 0)


def test_a_budget_too_small_from_the_start_is_the_callers() -> None:
    load = FakeLoad(a_s=1.0)
    load.rows_in_flight = 1
    with pytest.raises(DeadlineExceeded, match="the deadline leaves 50 ms, and the model takes 1002 ms alone"):
        Forecast(1, [load]).check(load, 1, 0.05)


def test_with_nothing_in_flight_everything_is_tried() -> None:
    load = FakeLoad(a_s=100.0)
    Forecast(1, [load]).check(load, 1, 0.001)  # a wrong forecast must be able to prove itself wrong


def test_however_slow_the_last_answers_were_a_full_batch_may_be_in_flight() -> None:
    load = FakeLoad()  # batches of 8, 10 ms each
    forecast = Forecast(2, [load])
    for _ in range(100):
        forecast.missed(load, forecast.check(load, 1, 10.0))
    assert forecast.correction(load) == MOST
    load.rows_in_flight = 7
    forecast.check(load, 1, 0.030)
    load.rows_in_flight = 8
    with pytest.raises(Overloaded):
        forecast.check(load, 1, 0.030)
    load.rows_in_flight = 7
    with pytest.raises(Overloaded):  # not even the uncorrected forecast is in time
        forecast.check(load, 1, 0.010)


def waits(load: FakeLoad, rows: int, deadline_s: float, priority: int = 100) -> None:
    load.rows_in_flight += rows
    load.book.add(priority, deadline_s, rows)


def test_an_urgent_request_overtakes_patient_ones_that_can_wait() -> None:
    load = FakeLoad()  # 8 rows in 10 ms
    forecast = Forecast(2, [load])
    waits(load, 800, deadline_s=30.0)  # a second of work
    promise = forecast.check(load, 1, 0.2, Place(100, 0.2))
    assert promise.raw_s == pytest.approx(0.034)  # three batches hold slots, and its own
    with pytest.raises(Overloaded):
        forecast.check(load, 1, 0.2)
    assert forecast.refusal(0.2, 0, 0.0) is None, "unread, it may be the urgent one"
    with pytest.raises(Overloaded):
        forecast.check(load, 1, 0.03, Place(100, 0.03))


def test_nobody_overtakes_those_whose_time_would_then_be_over() -> None:
    load = FakeLoad()
    forecast = Forecast(2, [load])
    waits(load, 800, deadline_s=1.27)  # a second of work, and START is 1.25
    with pytest.raises(Overloaded):
        forecast.check(load, 8, 0.2, Place(100, 0.2))


def test_what_comes_before_it_can_not_be_overtaken() -> None:
    load = FakeLoad()
    forecast = Forecast(2, [load])
    waits(load, 800, deadline_s=0.1)
    with pytest.raises(Overloaded):
        forecast.check(load, 1, 0.2, Place(100, 0.2))
    assert forecast.refusal(0.2, 0, 0.0) is not None


def test_a_better_priority_goes_first_at_the_expense_of_the_others() -> None:
    load = FakeLoad()
    forecast = Forecast(2, [load])
    waits(load, 800, deadline_s=0.9)
    assert forecast.check(load, 1, 1.0, Place(1, 1.0)).raw_s == pytest.approx(0.034)
    with pytest.raises(Overloaded):
        forecast.check(load, 1, 1.0, Place(100, 1.0))
    assert isinstance(forecast.refusal(1.0, 0, 0.0), Overloaded)
    waits(load, 1, deadline_s=5.0, priority=1)
    assert forecast.refusal(1.0, 0, 0.0) is None, "somebody uses priorities, so an unread call may have a better one"


def test_an_overload_is_forgotten_with_time() -> None:
    load = FakeLoad()
    forecast = Forecast(1, [load])
    forecast.tick(5.0)
    for _ in range(1000):
        forecast.missed(load, forecast.check(load, 1, 10.0))
    forecast.tick(65.0)
    assert forecast.correction(load) == pytest.approx(START, rel=0.01)


def test_a_burst_that_its_deadlines_leave_time_for_is_let_in_whole() -> None:
    load = FakeLoad()  # batches of 8 in 10 ms: 500 take 0.63 s
    forecast = Forecast(2, [load])
    for _ in range(500):
        forecast.check(load, 1, 2.0)
        load.rows_in_flight += 1


def test_before_a_call_is_read_any_model_that_could_answer_it_lets_it_in() -> None:
    full, idle = FakeLoad(), FakeLoad()
    full.rows_in_flight = 80
    assert Forecast(2, [full, idle]).refusal(0.05, 0, 0.0) is None
    assert isinstance(Forecast(2, [full]).refusal(0.05, 0, 0.0), Overloaded)
    assert Forecast(2, [full]).refusal(0.2, 0, 0.0) is None
    assert Forecast(2, []).refusal(0.05, 0, 0.0) is None  # what is not served is for the one who reads the name to say


def test_of_several_models_that_could_not_the_one_that_can_soonest_says_when_to_come_back() -> None:
    slow, slower, hopeless = FakeLoad(), FakeLoad(), FakeLoad(a_s=100.0)
    slow.rows_in_flight, slower.rows_in_flight, hopeless.rows_in_flight = 80, 160, 8
    alone, all_of_them = Forecast(2, [slow]).refusal(0.05, 0, 0.0), Forecast(2, [slower, slow]).refusal(0.05, 0, 0.0)
    assert alone is not None
    assert all_of_them is not None
    assert all_of_them.retry_after_ms is not None
    assert isinstance(Forecast(2, [hopeless]).refusal(0.05, 0, 0.0), DeadlineExceeded)
    assert isinstance(Forecast(2, [hopeless, slower, slow]).refusal(0.05, 0, 0.0), Overloaded)


def test_however_many_calls_ask_the_models_are_looked_at_once_in_a_while() -> None:
    load = FakeLoad()
    load.rows_in_flight = 80
    forecast = Forecast(2, [load])
    assert forecast.refusal(0.05, 0, 0.0) is not None
    load.rows_in_flight = 0
    assert forecast.refusal(0.05, 0, GLANCE_S / 2) is not None
    assert forecast.refusal(0.05, 0, GLANCE_S) is None


@given(st.integers(0, 10_000), st.floats(0.001, 10))
def test_the_retry_hint_stays_within_its_bounds(rows: int, budget_s: float) -> None:
    load = FakeLoad()
    load.rows_in_flight = rows
    hint = None
    try:
        Forecast(1, [load]).check(load, 1, budget_s)
    except Overloaded as error:
        hint = error.retry_after_ms or 0
    except DeadlineExceeded:
        return
    assert hint is None or RETRY_MS[0] <= hint <= RETRY_MS[1]


def test_each_model_has_its_own_correction() -> None:
    mine, other = FakeLoad(), FakeLoad()
    forecast = Forecast(1, [mine, other])
    forecast.missed(mine, forecast.check(mine, 1, 10.0))
    assert forecast.correction(mine) > START == forecast.correction(other)


def goodput(rate: float, *, door: bool, truth: float = 1.0) -> tuple[float, float]:
    """(answers in time, answers late) a second: one worker, batches of 8 at 10 ms, deadlines of 100 ms, 20 s."""
    dice = random.Random(1)  # noqa: S311 - a simulation, the same every time
    load = FakeLoad(prepare_s=0.0)
    forecast = Forecast(1, [load])
    now, free_s, in_time, late = 0.0, 0.0, 0, 0
    waiting: list[tuple[float, Promise]] = []
    ends: list[tuple[float, int, list[tuple[float, Promise]]]] = []
    while now < 20.0:
        now += dice.expovariate(rate)
        while (ends and ends[0][0] <= now) or (waiting and free_s <= now):
            if waiting and (not ends or free_s <= ends[0][0]) and free_s <= now:
                batch, waiting = waiting[:8], waiting[8:]
                start_s = max(free_s, batch[-1][0])
                free_s = start_s + truth * load.batch_s(len(batch))
                heapq.heappush(ends, (free_s, len(ends), batch))
                continue
            end_s, _, batch = heapq.heappop(ends)
            load.rows_in_flight -= len(batch)
            for arrived_s, promise in batch:
                in_time += end_s - arrived_s <= 0.1
                late += end_s - arrived_s > 0.1
                forecast.answered(load, promise, end_s - arrived_s)
        try:
            promise = forecast.check(load, 1, 0.1 if door else 1e9)
        except Overloaded:
            continue
        load.rows_in_flight += 1
        waiting.append((now, promise))
    return in_time / 20, late / 20


@pytest.mark.parametrize("truth", [1.0, 2.0])
@pytest.mark.parametrize("overload", [2, 4, 10])
def test_under_overload_goodput_stays_near_the_peak(overload: int, truth: float) -> None:
    peak = 800 / truth
    answered, late = goodput(overload * peak, door=True, truth=truth)
    assert answered >= 0.9 * peak
    assert late <= 0.02 * answered
    collapsed, _ = goodput(overload * peak, door=False, truth=truth)
    assert collapsed < 0.2 * peak  # what the door is for
