"""The gateway's own code under load in virtual time: what is promised for overload, queueing and overlap.

A batch of up to eight rows takes 10 ms + 1.25 ms a row; a pool process takes 0.5 ms for an item, or is the bottleneck.
"""

import pytest

from gateway.served import ServedModel
from tests.support.simulation import Arrival, bursts, poisson, repeatable
from tests.support.virtual_load import Book, closed_loop, play
from tests.support.virtual_server import VirtualServer, model

ROWS = 8
WAIT_S = 0.005
FULL_S = 0.020
PEAK = ROWS / FULL_S
PATIENCE_S = 0.25


def seconds(_model: int, rows: int) -> float:
    return 0.010 + 0.00125 * rows


def server(prepare_s: float = 0.0005, workers: int = 1, *models: ServedModel) -> VirtualServer:
    chosen = list(models) or [model(max_rows=ROWS, max_wait_s=WAIT_S)]
    return VirtualServer(chosen, seconds, prepare_s=lambda: prepare_s, workers=workers)


def share(times: list[float], part: float) -> float:
    return times[min(int(len(times) * part), len(times) - 1)]


def admitted(book: Book) -> int:
    return len(book.calls) - len(book.refused)


# ------------------------------------------------------------------ overload


@pytest.mark.parametrize(
    ("prepare_s", "peak"),
    [pytest.param(0.0005, PEAK, id="device"), pytest.param(0.005, 200.0, id="decoding")],
)
@pytest.mark.parametrize("load", [1, 2, 4, 10])
def test_goodput_under_overload_stays_at_the_peak_whatever_the_bottleneck(
    load: int, prepare_s: float, peak: float
) -> None:
    book = play(lambda: server(prepare_s), poisson(8, rate=load * peak, seconds=0.8, patience_s=PATIENCE_S))
    assert book.goodput(0.2, 0.8) >= (0.85 if load == 1 else 0.95) * peak
    assert book.late <= 0.02 * admitted(book)
    assert book.rows_for_nobody <= 0.02 * sum(ran.rows for ran in book.ran)


@pytest.mark.parametrize("load", [2, 4])
def test_bursts_leave_goodput_at_the_peak_too(load: int) -> None:
    burst = 100  # more than can be answered in time
    arrivals = bursts(burst, every_s=burst / (load * PEAK), seconds=0.8, patience_s=PATIENCE_S)
    book = play(server, arrivals)
    assert book.goodput(0.2, 0.8) >= 0.9 * PEAK
    assert book.late <= 0.02 * admitted(book)
    assert book.rows_for_nobody <= 0.02 * sum(ran.rows for ran in book.ran)


def test_those_with_little_time_overtake_the_patient_wherever_they_wait_and_nobody_is_late() -> None:
    random = repeatable(3)
    calls = poisson(4, rate=1.3 * PEAK, seconds=1.5)
    mixed = [call._replace(patience_s=random.choice([0.1, 0.25, 1.0])) for call in calls]
    book = play(server, mixed)
    assert book.late <= 0.002 * admitted(book)
    assert book.goodput(0.2, 1.5) >= 0.98 * PEAK


def test_an_overload_is_refused_at_once_with_its_cause() -> None:
    book = play(server, poisson(3, rate=4 * PEAK, seconds=0.5, patience_s=PATIENCE_S))
    assert {call.outcome for call in book.refused} == {"overloaded"}
    assert len(book.refused) >= 0.4 * len(book.calls)


def test_a_budget_that_is_too_small_from_the_start_is_not_called_an_overload() -> None:
    busy = poisson(3, rate=0.5 * PEAK, seconds=0.5, patience_s=PATIENCE_S)
    hopeless = [Arrival(0.1 + 0.01 * number, patience_s=0.005) for number in range(30)]
    book = play(server, busy + hopeless)
    refused = [call for call in book.refused if call.number >= len(busy)]
    assert {call.outcome for call in refused} == {"deadline_exceeded"}
    assert len(refused) >= 20  # a server with nothing in flight tries them, to learn
    assert all(call.outcome == "ok" for call in book.calls if call.number < len(busy))


@pytest.mark.parametrize("load", [2, 10])
def test_half_a_second_after_an_overload_everything_is_as_before(load: int) -> None:
    rush = poisson(9, rate=load * PEAK, seconds=1.0, patience_s=PATIENCE_S)
    calm = [Arrival(1.5 + 0.05 * number, patience_s=PATIENCE_S) for number in range(20)]
    book = play(server, rush + calm)
    after = [call for call in book.calls if call.number >= len(rush)]
    assert {call.outcome for call in after} == {"ok"}
    assert max(call.ended_s - call.arrived_s for call in after) == pytest.approx(0.0005 + seconds(1, 1))


# ------------------------------------------------------------------ below the peak


@pytest.mark.parametrize(
    "arrivals",
    [
        pytest.param(poisson(5, rate=0.6 * PEAK, seconds=2.0), id="poisson"),
        pytest.param(bursts(ROWS, every_s=ROWS / (0.6 * PEAK), seconds=2.0), id="bursts of a batch"),
        pytest.param(bursts(12, every_s=12 / (0.6 * PEAK), seconds=2.0), id="bursts of a batch and a half"),
    ],
)
def test_at_60_percent_load_the_queue_time_stays_below_one_batch_and_the_wait(arrivals: list[Arrival]) -> None:
    book = play(server, arrivals)
    assert len(book.answered) == len(arrivals)
    assert share(book.queue_times(), 0.99) <= FULL_S + WAIT_S


def test_one_caller_at_a_time_pays_for_its_own_work_only() -> None:
    book = closed_loop(server, callers=1, each=100)
    assert max(call.ended_s - call.arrived_s for call in book.calls) == pytest.approx(0.0005 + seconds(1, 1))


# ------------------------------------------------------------------ overlap


@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_decoding_and_device_overlap(jitter: float) -> None:
    """8 ms to decode a batch's worth, 8 ms on the device: 1000 rows a second side by side, 500 in turn."""
    random = repeatable(1)

    def make() -> VirtualServer:
        return VirtualServer(
            [model(max_rows=ROWS)],
            lambda _m, _rows: 0.008 * abs(random.gauss(1, jitter / 3)),
            prepare_s=lambda: 0.001 * abs(random.gauss(1, jitter)),
        )

    book = closed_loop(make, callers=32, each=30)
    took_s = max(call.ended_s for call in book.calls) - book.start_s
    assert len(book.in_time) / took_s >= 0.9 * 1000
    assert book.idle_share() < 0.15


# ------------------------------------------------------------------ several workers, several models


def test_two_workers_answer_twice_as_much() -> None:
    book = play(lambda: server(0.0005, 2), poisson(8, rate=4 * PEAK, seconds=0.8, patience_s=PATIENCE_S))
    assert book.goodput(0.2, 0.8) >= 0.9 * 2 * PEAK
    assert book.late <= 0.02 * admitted(book)


def test_one_of_two_workers_dies_under_load_and_nobody_is_lost() -> None:
    def make() -> VirtualServer:
        made = server(0.0005, 2)
        first = next(iter(made.workers.workers()))
        made.later(0.5, lambda: made.router.die(first))
        return made

    book = play(make, poisson(8, rate=0.8 * PEAK, seconds=1.0, patience_s=2.0))
    assert {call.outcome for call in book.calls} == {"ok"}
    assert book.server.dispatch.lost_workers == 1


def test_a_slow_model_that_is_flooded_does_not_starve_a_fast_one() -> None:
    slow, fast = model(1, max_rows=4, name="slow"), model(2, max_rows=4, name="fast")
    cost = {1: 0.1, 2: 0.002}
    flood = [a._replace(key=a.key._replace(model=1)) for a in poisson(1, rate=200, seconds=2.0, patience_s=1.0)]
    rare = [a._replace(key=a.key._replace(model=2)) for a in poisson(2, rate=20, seconds=2.0, patience_s=0.25)]
    book = play(lambda: VirtualServer([slow, fast], lambda number, _rows: cost[number]), flood + rare)
    of_fast = [call for call in book.calls if call.number >= len(flood)]
    assert {call.outcome for call in of_fast} == {"ok"}
    waits = sorted(call.ended_s - call.arrived_s for call in of_fast)
    assert share(waits, 0.9) <= cost[1] + 2 * cost[2]
    slow_rows = sum(ran.rows for ran in book.ran if ran.model == 1)
    assert slow_rows >= 0.8 * 40 * 2.0  # and costs it little
