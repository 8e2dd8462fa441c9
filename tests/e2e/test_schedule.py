"""The scheduler in the real server: queueing below the peak, decoding beside the device, overload and the time after.

The device is simulated and the pipeline's work is a pause, so the two cores of the test machine are not the limit.
"""

import contextlib
import json
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import grpc
import pytest

from headrace import Client, InferenceError
from headrace.client_results import ServerTiming, Tensor, Tensors, Text
from tests.support.memory import proportional_bytes
from tests.support.open_loop import keep_sending, send
from tests.support.paced import (
    STEADY_MS,
    STEADY_ROWS,
    STEADY_WAIT_MS,
    TWIN_MS,
    TWIN_ROWS,
    TWIN_WAIT_MS,
    paced_site,
    undisturbed,
)
from tests.support.simulation import bursts, poisson
from tests.support.stack import Site, eventually, serving

pytestmark = pytest.mark.alone

PEAK = STEADY_ROWS / STEADY_MS * 1e3
SPARE_MS = 70.0
"""For a busy machine with two cores."""
PATIENCE_S = 0.6
NO_PAUSE = "0"


@pytest.fixture(scope="module")
def paced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = paced_site(tmp_path_factory.mktemp("paced"))
    with serving(site):
        yield site


def count(site: Site, metric: str, model: str) -> float:
    start = f'{metric}{{model="{model}"}} '
    lines = site.get("/metrics")[1].splitlines()
    return sum(float(line.removeprefix(start)) for line in lines if line.startswith(start))


@pytest.mark.parametrize("kind", ["poisson", "bursts of a batch and a half"])
def test_at_60_percent_load_the_queue_time_stays_below_one_batch_and_the_wait(paced: Site, kind: str) -> None:
    rate, seconds = 0.6 * PEAK, 1.6
    load = (
        poisson(5, rate=rate, seconds=seconds) if kind == "poisson" else bursts(12, every_s=12 / rate, seconds=seconds)
    )

    def measure() -> None:
        sent = send(paced.grpc, "steady", NO_PAUSE, [arrival.at_s for arrival in load], timeout_s=5.0)
        assert set(sent.outcomes) == {"ok"}
        assert sent.queued_ms(0.98) <= STEADY_MS + STEADY_WAIT_MS + SPARE_MS

    undisturbed(measure)


class Look(NamedTuple):
    """What the worker has reported of one model's batches, at a moment."""

    at_s: float
    rows: int
    busy_s: float
    """Copy and computation."""


def look(site: Site, model: str) -> Look:
    batches = json.loads(site.get(f"/v2/models/{model}/stats")[1])["model_stats"][0]["batch_stats"]
    busy_ns = sum(batch[part]["ns"] for batch in batches for part in ("compute_input", "compute_infer"))
    rows = sum(batch["batch_size"] * batch["compute_infer"]["count"] for batch in batches)
    return Look(time.monotonic(), rows, busy_ns / 1e9)


def test_decoding_and_device_overlap(paced: Site) -> None:
    """20 ms to decode a batch's worth (in two processes), 20 ms on the device, always more callers than both can hold.

    Idle share: the part of the time in which the worker computed nothing, by its own reports.
    """

    def rows_more(since: Look, rows: int) -> Look | None:
        now = look(paced, "twin")
        return now if now.rows >= since.rows + rows else None

    def measure() -> None:
        with ThreadPoolExecutor(1) as thread:
            flood = thread.submit(keep_sending, paced.grpc, "twin", "20", 16, 2.0)
            first = eventually("a flood", partial(rows_more, look(paced, "twin"), 20), 5.0)
            last = eventually("more of it", partial(rows_more, first, 100), 10.0)
            flood.result()
        took_s = last.at_s - first.at_s
        in_turn = TWIN_ROWS / (2 * TWIN_MS) * 1e3
        assert (last.rows - first.rows) / took_s > 1.5 * in_turn
        assert 1 - (last.busy_s - first.busy_s) / took_s < 0.15

    undisturbed(measure)


def test_overload_is_refused_and_answered_at_the_peak_and_over_within_half_a_second(paced: Site) -> None:
    undisturbed(lambda: overload(paced))


def overload(paced: Site) -> None:
    """Four times what the model can do, three times in a row: the memory stays as it is after the first one.

    On a machine of its own none of the 280 that are let in is late. Measured up to three times (`undisturbed`), for
    other load can't be told from this test's: the kernel's numbers for waiting count our processes' waits as well.
    """
    seconds, memory, late, admitted = 0.8, list[int](), 0, 0
    rows, nobody = (
        count(paced, "headrace_rows_total", "steady"),
        count(paced, "headrace_rows_for_nobody_total", "steady"),
    )
    with Client(paced.grpc, max_attempts=1) as client:
        for seed in range(3):
            plan = [arrival.at_s for arrival in poisson(seed, rate=4 * PEAK, seconds=seconds)]
            sent = send(paced.grpc, "steady", NO_PAUSE, plan, timeout_s=PATIENCE_S)
            assert set(sent.outcomes) <= {"ok", "overloaded", "deadline_exceeded"}
            assert sent.outcomes["overloaded"] >= 0.5 * len(plan)
            late += sent.outcomes["deadline_exceeded"]
            admitted += len(plan) - sent.outcomes["overloaded"]
            assert len(sent.ok) / (seconds + PATIENCE_S) >= 0.6 * PEAK
            over_s = time.monotonic()
            eventually("an empty server", lambda: not any(paced.debug()["in_flight"].values()), 0.5)
            client.predict([Text(NO_PAUSE)], model="steady", timeout_s=2.0)
            assert time.monotonic() - over_s <= 0.5
            memory.append(proportional_bytes(process.pid for process in paced.processes()))
    # Twice the targets, for a machine that has other things to do.
    assert late <= 0.04 * admitted
    computed = count(paced, "headrace_rows_total", "steady") - rows
    assert count(paced, "headrace_rows_for_nobody_total", "steady") - nobody <= 0.04 * computed
    assert min(memory[1:]) - memory[0] <= 4 * 1024 * 1024, memory


# ------------------------------------------------------------------ one rule each


def test_one_caller_at_a_time_does_not_wait_for_company(paced: Site) -> None:
    with Client(paced.grpc, max_attempts=1) as client:
        waits = sorted(client.predict([Text(NO_PAUSE)], model="twin").server_timing.batch_ms for _ in range(9))
    assert waits[4] <= TWIN_WAIT_MS / 20


def test_a_wait_for_company_ends_where_the_deadline_needs_it_to(paced: Site) -> None:
    """Company is announced for a second and would be waited for; the caller has less time than that.

    Three tries: the wait leaves a few milliseconds to spare, and a busy machine may need more.
    """
    answers: list[ServerTiming] = []
    with Client(paced.grpc, max_attempts=1) as client, ThreadPoolExecutor() as threads:
        company = threads.submit(client.predict, [Text("1200")], model="twin", timeout_s=10.0)
        eventually("company to be in the pool", lambda: preparing(paced, "twin") == 1, 5.0)
        for _ in range(3):
            with contextlib.suppress(InferenceError):
                answers.append(client.predict([Text(NO_PAUSE)], model="twin", timeout_s=0.35).server_timing)
                break
        assert not company.done()
        assert company.result(10.0).results
    assert [timing.batch_rows for timing in answers] == [1]
    assert 150.0 <= answers[0].batch_ms <= 350.0


def test_those_with_little_time_overtake_those_who_came_before_them(paced: Site) -> None:
    """Six rows of `twin` are ahead with slots of their own, then the earliest deadline is next."""
    ended: list[str] = []

    def call(name: str, timeout_s: float) -> None:
        client.predict([Text(NO_PAUSE)], model="twin", timeout_s=timeout_s)
        ended.append(name)

    with Client(paced.grpc, max_attempts=1) as client, ThreadPoolExecutor(32) as threads:
        blocked = [threads.submit(call, "ahead", 9.0) for _ in range(24)]
        eventually("a line for slots", lambda: paced.debug()["queues"]["waiting_for_slot"] >= 8, 5.0)
        urgent = [threads.submit(call, "urgent", 3.0) for _ in range(2)]
        for one in (*blocked, *urgent):
            one.result(10.0)
    assert ended.count("urgent") == 2
    assert ended[-4:] == ["ahead"] * 4


def test_too_little_time_from_the_start_and_too_much_work_ahead_are_told_apart(paced: Site) -> None:
    with Client(paced.grpc, max_attempts=1) as client, ThreadPoolExecutor(64) as threads:
        crowd = [threads.submit(client.predict, [Text(NO_PAUSE)], model="steady", timeout_s=9.0) for _ in range(64)]
        eventually("a backlog", lambda: paced.debug()["in_flight"]["rows"] >= 32, 5.0)
        with pytest.raises(InferenceError) as hopeless:
            client.predict([Text(NO_PAUSE)], model="steady", timeout_s=0.02)
        with pytest.raises(InferenceError) as crowded:
            client.predict([Text(NO_PAUSE)], model="steady", timeout_s=0.15)
        for one in crowd:
            one.result(10.0)
    assert hopeless.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert crowded.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert crowded.value.reason == "overloaded"
    assert crowded.value.retry_after_ms


def test_one_that_makes_its_batch_raise_fails_alone(paced: Site) -> None:
    def ask(value: float) -> tuple[float, int | grpc.StatusCode]:
        """Rows of its batch, or how it failed."""
        tensors = Tensors((Tensor("x", "FP32", (1, 1), struct.pack("<f", value)),))
        try:
            return value, client.predict([tensors], model="brittle", timeout_s=10.0).server_timing.batch_rows
        except InferenceError as error:
            return value, error.code

    with Client(paced.grpc, max_attempts=1) as client, ThreadPoolExecutor(16) as threads:
        ended = dict(threads.map(ask, [float(number) for number in range(16)]))
    assert ended.pop(13.0) is grpc.StatusCode.INTERNAL
    rows = [one for one in ended.values() if isinstance(one, int)]
    assert len(rows) == 15
    assert max(rows) > 4  # most of them ran together


def preparing(site: Site, model: str) -> int:
    return next(int(one["preparing_rows"]) for one in site.debug()["models"] if one["name"] == model)
