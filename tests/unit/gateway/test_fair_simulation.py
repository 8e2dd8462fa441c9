"""Models that share a worker, by discrete-event simulation: nobody starves, and nothing stands still for fairness."""

import pytest

from gateway.batcher import Batcher, BatchLimits, QueuedItem, QueueKey
from gateway.book import Book
from gateway.correction import Promise
from gateway.cost_model import CostModel
from gateway.forecast import Forecast
from shared.errors import Overloaded
from tests.support.simulation import STAGE_LEAD_S, Arrival, Ledger, Run, Simulation, poisson

SIZES = (1, 2)
SLOW, FAST = QueueKey(0), QueueKey(1)
COST_S = {SLOW: 0.1, FAST: 0.002}


def truth(key: QueueKey, rows: int) -> float:
    """A batch takes as long whatever its size."""
    return COST_S[key]


def simulation(*weights: float, prepare_s: float = 0.0, believed: float = 1.0) -> Simulation:
    """Both models, with a cost model that was told `believed` times the truth and learns from every batch."""
    cost = CostModel()
    batcher = Batcher(cost.predict)
    for key, weight in zip((SLOW, FAST), weights or (1.0, 1.0), strict=True):
        batcher.configure(key.model, BatchLimits(max_rows=2, max_wait_s=0.005, sizes=SIZES, weight=weight))
        cost.seed(key, [(rows, believed * truth(key, rows)) for rows in SIZES])
    made = Simulation(batcher, truth, prepare_s=prepare_s, full_rows=2)
    made.on_done = lambda run: cost.observe(run.batch.key, run.batch.rows, run.done_s - run.started_s)
    return made


def of(key: QueueKey, arrivals: list[Arrival]) -> list[Arrival]:
    return [arrival._replace(key=key) for arrival in arrivals]


def flood(key: QueueKey, seconds: float, patience_s: float = 1e3) -> list[Arrival]:
    """As many rows as would fill every batch, all at once: there is always more than can be run."""
    return [Arrival(0.0, patience_s=patience_s, key=key)] * int(2 * seconds / COST_S[key])


def until(ledger: Ledger, end_s: float) -> list[Run]:
    return [run for run in ledger.runs if run.done_s <= end_s]


def used_s(runs: list[Run], key: QueueKey) -> float:
    return sum(run.done_s - run.started_s for run in runs if run.batch.key == key)


def response_times(ledger: Ledger, first: int) -> list[float]:
    """Ascending, of the items from `first` on."""
    return sorted(served.done_s - served.arrived_s for served in ledger.served if served.item >= first)


@pytest.mark.parametrize("prepare_s", [0.0, 0.003])
@pytest.mark.parametrize("believed", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("rate", [2, 20, 100])
def test_a_rare_fast_model_waits_for_no_more_than_the_slow_batch_that_runs(
    rate: float, believed: float, prepare_s: float
) -> None:
    slow = flood(SLOW, 12.0)
    ledger = simulation(prepare_s=prepare_s, believed=believed).run(slow + of(FAST, poisson(1, rate=rate, seconds=10)))
    times = response_times(ledger, len(slow))
    waits = [time - prepare_s - COST_S[FAST] for time in times]
    assert len(times) > 5 * rate
    assert waits[int(0.99 * len(waits))] <= COST_S[SLOW] + COST_S[FAST]
    assert waits[-1] <= COST_S[SLOW] + COST_S[FAST] + STAGE_LEAD_S


def test_the_rare_one_costs_the_flooded_one_only_its_own_time() -> None:
    slow = flood(SLOW, 12.0)
    ledger = simulation().run(slow + of(FAST, poisson(1, rate=20, seconds=10)))
    runs = until(ledger, 10.0)
    assert used_s(runs, SLOW) + used_s(runs, FAST) >= 10.0 - COST_S[SLOW] - 1e-6
    assert ledger.idle_while_waiting_s == pytest.approx(0.0, abs=1e-6)
    assert all(run.batch.rows == 2 for run in runs[1:] if run.batch.key == SLOW)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (1.0, 3.0), (1.0, 10.0), (0.5, 0.1)])
@pytest.mark.parametrize("believed", [0.5, 1.0, 3.0])
def test_worker_time_follows_the_weights(weights: tuple[float, float], believed: float) -> None:
    ledger = simulation(*weights, believed=believed).run(flood(SLOW, 9.0) + flood(FAST, 9.0))
    runs = until(ledger, 8.0)
    assert used_s(runs, SLOW) / 8.0 == pytest.approx(weights[0] / sum(weights), abs=0.02)
    assert used_s(runs, SLOW) + used_s(runs, FAST) >= 8.0 - COST_S[SLOW] - 1e-6


def test_a_flood_of_the_fast_model_does_not_starve_the_slow_one() -> None:
    fast = flood(FAST, 12.0)
    slow = [Arrival(1.0 + number, key=SLOW) for number in range(8)]
    ledger = simulation().run(fast + slow)
    assert response_times(ledger, len(fast))[-1] <= COST_S[SLOW] + COST_S[FAST] + 0.005


def test_with_deadlines_under_overload_both_models_keep_their_half() -> None:
    slow = of(SLOW, poisson(2, rate=4 * 20, seconds=5, patience_s=0.5))
    fast = of(FAST, poisson(3, rate=2 * 1000, seconds=5, patience_s=0.25))
    ledger = simulation().run(slow + fast)
    runs = [run for run in until(ledger, 5.0) if run.started_s > 0.5]
    assert used_s(runs, SLOW) / 4.5 == pytest.approx(0.5, abs=0.05)
    assert used_s(runs, FAST) / 4.5 == pytest.approx(0.5, abs=0.05)


# ------------------------------------------------------------------ with the door in front


class Gate:
    """The forecast in front of the simulation, fed as `gateway/flow.py` does."""

    class Load:
        """One model, as the door sees it."""

        max_rows = SIZES[-1]
        prepare_s = 0.0
        unprepared_items = preparing_rows = 0
        workers = 1

        def __init__(self, key: QueueKey, weight: float) -> None:
            self.key = key
            self.weight, self.goes_on = weight, False
            self.rows_in_flight = 0
            self.book = Book()

        def batch_s(self, rows: int) -> float:
            return truth(self.key, rows)

    def __init__(self, made: Simulation, *weights: float) -> None:
        self.loads = {key: self.Load(key, weight) for key, weight in zip((SLOW, FAST), weights, strict=True)}
        self.forecast = Forecast(1, self.loads.values())
        self.admitted: dict[int, tuple[Arrival, Promise]] = {}
        learn = made.on_done

        def done(run: Run) -> None:
            learn(run)
            for served in run.batch.items:
                arrival, promise = self.left(served.item)
                load = self.loads[arrival.key]
                self.forecast.answered(load, promise, run.done_s - arrival.at_s)

        made.on_done = done
        made.on_expired = self.expired
        made.door = self.admit

    def admit(self, item: int, arrival: Arrival) -> bool:
        load = self.loads[arrival.key]
        try:
            self.admitted[item] = arrival, self.forecast.check(load, 1, arrival.patience_s)
        except Overloaded:
            return False
        load.rows_in_flight += 1
        return True

    def expired(self, late: QueuedItem, _now_s: float) -> None:
        arrival, promise = self.left(late.item)
        self.forecast.missed(self.loads[arrival.key], promise)

    def left(self, item: int) -> tuple[Arrival, Promise]:
        arrival, promise = self.admitted[item]
        self.loads[arrival.key].rows_in_flight -= 1
        return arrival, promise


def outcomes(ledger: Ledger, first: int, last: int) -> tuple[int, int, int]:
    """(in time, admitted but late, refused) of the items from `first` to before `last`."""
    served = [one for one in ledger.served if first <= one.item < last]
    in_time = sum(one.done_s <= one.deadline_s for one in served)
    expired = sum(first <= item < last for item in ledger.expired)
    return in_time, len(served) - in_time + expired, sum(first <= item < last for item in ledger.refused)


def test_the_door_lets_a_rare_model_in_while_another_one_is_flooded() -> None:
    made = simulation()
    Gate(made, 1.0, 1.0)
    slow = of(SLOW, poisson(4, rate=100, seconds=20, patience_s=1.0))  # five times what the worker can do
    fast = of(FAST, poisson(5, rate=30, seconds=20, patience_s=0.25))
    ledger = made.run(slow + fast)
    in_time, late, refused = outcomes(ledger, len(slow), len(slow + fast))
    assert (late, refused) == (0, 0)
    assert in_time == len(fast)
    in_time, late, refused = outcomes(ledger, 0, len(slow))
    assert in_time >= 0.85 * 20 * 20 * (1 - 30 * COST_S[FAST])
    assert late <= 0.1 * in_time


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0)])
def test_of_two_flooded_models_each_is_let_in_as_far_as_its_share_goes(weights: tuple[float, float]) -> None:
    made = simulation(*weights)
    Gate(made, *weights)
    slow = of(SLOW, poisson(6, rate=100, seconds=10, patience_s=1.0))
    fast = of(FAST, poisson(7, rate=3000, seconds=10, patience_s=0.5))
    ledger = made.run(slow + fast)
    for key, first, last in ((SLOW, 0, len(slow)), (FAST, len(slow), len(slow + fast))):
        in_time, _, refused = outcomes(ledger, first, last)
        peak = 2 / COST_S[key] * 10 * weights[key.model] / sum(weights)
        assert in_time >= 0.9 * peak
        assert refused >= 0.7 * (last - first - peak)  # what has no chance is told so at once
