"""Models that share a worker, by discrete-event simulation: nobody starves, and nothing stands still for fairness."""

import pytest

from gateway.batcher import Batcher, BatchLimits, QueueKey
from gateway.cost_model import CostModel
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
