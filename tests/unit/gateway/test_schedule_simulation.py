"""The batcher under load, by discrete-event simulation: when callers wait, and what the worker gets.

The worker takes 2 ms + 0.05 ms a row (the stand-in model of the benchmarks); its peak is 32 rows per 3.6 ms.
"""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.batcher import Batcher, BatchLimits, QueueKey
from gateway.cost_model import CostModel
from tests.support.simulation import Arrival, Ledger, Run, Simulation, bursts, poisson, repeatable

SIZES = (1, 2, 4, 8, 16, 32)
LIMITS = BatchLimits(max_rows=32, max_wait_s=0.005, sizes=SIZES)
MODELS = 2


def truth(key: QueueKey, rows: int) -> float:
    return 0.002 + 0.00005 * rows


FULL_S = truth(QueueKey(0), 32)
PEAK = 32 / FULL_S


def simulation(
    cost: Callable[[QueueKey, int], float] = truth, *, limits: BatchLimits = LIMITS, prepare_s: float = 0.0
) -> Simulation:
    """A batcher with its cost model as in the gateway: seeded by warm-up, fed with every finished batch."""
    model = CostModel()
    batcher = Batcher(model.predict)
    for number in range(MODELS):
        batcher.configure(number, limits)
        model.seed(QueueKey(number), [(rows, truth(QueueKey(number), rows)) for rows in SIZES])
    made = Simulation(batcher, cost, prepare_s=prepare_s)
    made.on_done = lambda run: model.observe(run.batch.key, run.batch.rows, run.done_s - run.started_s)
    return made


def play(arrivals: list[Arrival], made: Simulation | None = None) -> Ledger:
    made = made or simulation()
    ledger = made.run(arrivals)
    assert sorted([served.item for served in ledger.served] + ledger.expired) == list(range(len(arrivals)))
    assert len(made.batcher) == 0
    assert all(served.sent_s < served.deadline_s for served in ledger.served)
    return ledger


def closed_loop(callers: int, requests: int, *, prepare_s: float = 0.0) -> Ledger:
    """Callers that each send their next request when the last one is answered."""
    made = simulation(prepare_s=prepare_s)
    learn = made.on_done
    sent = callers

    def answered(run: Run) -> None:
        nonlocal sent
        learn(run)
        for _ in run.batch.items:
            if sent < requests:
                made.arrive(Arrival(run.done_s), sent)
                sent += 1

    made.on_done = answered
    return made.run([Arrival(0.0)] * callers)


def late(ledger: Ledger, more_s: float = 0.0) -> list[int]:
    """Items that were run and yet answered after their deadline; an answer takes `more_s` after its batch."""
    return [served.item for served in ledger.served if served.done_s + more_s > served.deadline_s]


def share(times: list[float], part: float) -> float:
    """The value below which `part` of the ascending times lie."""
    return times[min(int(len(times) * part), len(times) - 1)]


# ------------------------------------------------------------------ one caller at a time


@pytest.mark.parametrize("prepare_s", [0.0, 0.003])
def test_one_caller_at_a_time_never_waits(prepare_s: float) -> None:
    ledger = closed_loop(1, 500, prepare_s=prepare_s)
    assert len(ledger.served) == 500
    assert ledger.queue_times()[-1] == 0.0
    assert {run.batch.padded_rows for run in ledger.runs} == {1}
    took_s = max(served.done_s - served.arrived_s for served in ledger.served)
    assert took_s == pytest.approx(prepare_s + truth(QueueKey(0), 1))


def test_sparse_independent_callers_hardly_wait() -> None:
    ledger = play(poisson(1, rate=20, seconds=60))
    times = ledger.queue_times()
    assert share(times, 0.90) == 0.0
    assert times[-1] <= LIMITS.max_wait_s + 1e-9


# ------------------------------------------------------------------ saturation


def test_at_saturation_batches_fill_and_the_worker_never_stands_still() -> None:
    ledger = play(poisson(2, rate=3 * PEAK, seconds=0.5))
    assert ledger.mean_rows() >= 31
    assert ledger.idle_while_waiting_s <= 2 * FULL_S
    seconds = ledger.runs[-1].done_s
    assert len(ledger.served) / seconds >= 0.97 * PEAK


def test_64_callers_in_a_closed_loop_reach_the_peak_with_the_same_settings() -> None:
    ledger = closed_loop(64, 10_000)
    assert ledger.mean_rows() >= 30
    assert 10_000 / ledger.runs[-1].done_s >= 0.95 * PEAK


def test_two_models_at_saturation_both_fill_their_batches_and_share_the_worker() -> None:
    one = poisson(3, rate=PEAK, seconds=0.5)
    two = [arrival._replace(key=QueueKey(1)) for arrival in poisson(4, rate=PEAK, seconds=0.5)]
    ledger = play(one + two)
    assert ledger.mean_rows() >= 30
    runs = [run.batch.key.model for run in ledger.runs]
    assert runs.count(0) == pytest.approx(len(runs) / 2, rel=0.1)


# ------------------------------------------------------------------ below the peak


@pytest.mark.parametrize(
    "arrivals",
    [
        pytest.param(poisson(5, rate=0.6 * PEAK, seconds=1.0), id="poisson"),
        pytest.param(bursts(32, every_s=32 / (0.6 * PEAK), seconds=1.0), id="bursts of a batch"),
        pytest.param(bursts(50, every_s=50 / (0.6 * PEAK), seconds=1.0), id="bursts of a batch and a half"),
    ],
)
def test_at_60_percent_load_the_queue_time_stays_below_one_batch_and_the_wait(arrivals: list[Arrival]) -> None:
    ledger = play(arrivals)
    assert ledger.expired == []
    assert share(ledger.queue_times(), 0.99) <= FULL_S + LIMITS.max_wait_s


# ------------------------------------------------------------------ deadlines


def test_a_wait_for_company_never_makes_a_request_late() -> None:
    """The prepare stage announces company all the time and the wait is long; the deadline alone sends the batch."""
    patient = BatchLimits(max_rows=32, max_wait_s=0.5, sizes=SIZES)
    made = simulation(limits=patient, prepare_s=0.001)
    ledger = play([Arrival(0.001 * number, patience_s=0.020) for number in range(2000)], made)
    assert ledger.expired == []
    assert late(ledger) == []
    assert ledger.mean_rows() > 4


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("load", [1.2, 2.0, 4.0])
def test_overload_leaves_goodput_at_its_peak_and_almost_nothing_is_run_for_nobody(load: float, noise: float) -> None:
    """Open loop, deadlines of 250 ms, no admission in front; a batch's time varies, an answer needs 1 ms more."""
    random = repeatable(7)
    made = simulation(lambda key, rows: truth(key, rows) * abs(random.gauss(1, noise)))
    ledger = play(poisson(8, rate=load * PEAK, seconds=0.4, patience_s=0.25), made)
    for_nobody = late(ledger, more_s=0.001)
    assert len(for_nobody) <= 0.02 * len(ledger.served)
    assert (len(ledger.served) - len(for_nobody)) / ledger.runs[-1].done_s >= 0.95 * PEAK


def test_after_an_overload_the_very_next_requests_are_served_as_ever() -> None:
    rush = poisson(9, rate=4 * PEAK, seconds=0.4, patience_s=0.25)
    calm = [Arrival(0.4 + 0.25 + FULL_S + 0.02 * number, patience_s=0.25) for number in range(20)]
    ledger = play(rush + calm)
    afterwards = [served for served in ledger.served if served.item >= len(rush)]
    assert len(afterwards) == len(calm)
    assert max(served.done_s - served.arrived_s for served in afterwards) <= 2 * FULL_S


def test_the_impatient_overtake_the_patient() -> None:
    patient = [Arrival(0.0, patience_s=10.0)] * 320
    impatient = [Arrival(0.001, patience_s=0.013)] * 32
    ledger = play(patient + impatient)
    assert ledger.expired == []
    assert [item for item in late(ledger) if item >= len(patient)] == []


def test_what_can_not_be_served_in_time_expires_and_costs_the_worker_nothing() -> None:
    ledger = play([Arrival(0.0, patience_s=0.010)] * 1000)
    assert len(ledger.served) + len(ledger.expired) == 1000
    assert sum(run.batch.rows for run in ledger.runs) == len(ledger.served)
    assert ledger.runs[-1].sent_s < 0.010


def test_a_worker_ten_times_slower_than_its_warm_up_is_learned_and_deadlines_hold_again() -> None:
    """Company is always announced and the wait is long, so only the predicted cost sends a batch in time."""
    patient = BatchLimits(max_rows=32, max_wait_s=0.5, sizes=SIZES)
    made = simulation(lambda key, rows: 10 * truth(key, rows), limits=patient, prepare_s=0.02)
    ledger = play([Arrival(0.012 * number, patience_s=0.2) for number in range(4000)], made)
    missed = late(ledger) + ledger.expired
    assert 0 < len(missed) < 500
    assert max(missed) < 1000


def test_a_cost_overestimated_a_hundred_times_does_not_keep_callers_out_for_good() -> None:
    """By the prediction nothing can be served; the idle worker's tries teach the truth."""
    made = simulation(lambda key, rows: truth(key, rows) / 100)
    ledger = play(bursts(4, every_s=0.002, seconds=1.0, patience_s=0.003), made)
    assert len(ledger.expired) > 10
    assert max(ledger.expired) < 1000


# ------------------------------------------------------------------ always


def test_suspects_run_alone_at_once_beside_full_traffic() -> None:
    crowd = poisson(6, rate=PEAK, seconds=0.2)
    suspects = [Arrival(0.02 * number, alone=True) for number in range(10)]
    ledger = play(suspects + crowd)
    for run in ledger.runs:
        assert len(run.batch.items) == 1 or not any(item.alone for item in run.batch.items)


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        at_s=st.floats(0, 0.05),
        rows=st.integers(1, 32),
        patience_s=st.floats(0, 0.05),
        key=st.sampled_from([QueueKey(0), QueueKey(0, (64,)), QueueKey(1)]),
        alone=st.booleans(),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(ARRIVALS, st.sampled_from([0.0, 0.002]))
def test_any_arrivals_end_exactly_once_and_without_a_spinning_driver(arrivals: list[Arrival], prepare_s: float) -> None:
    ledger = play(arrivals, simulation(prepare_s=prepare_s))
    assert all(run.batch.rows <= run.batch.padded_rows <= 32 for run in ledger.runs)
    assert ledger.wake_ups <= 4 * len(arrivals)
