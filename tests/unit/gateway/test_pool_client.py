import asyncio
from unittest.mock import patch

import pytest

from gateway import pool_client
from gateway.inflight import InFlight
from gateway.pauses import Pauses
from gateway.pool_client import PoolClient, PoolJob
from shared.clock import FOREVER_S
from shared.errors import DeadlineExceeded, HeadraceError, InternalFault, InvalidInput
from shared.messages import (
    Failure,
    Finished,
    FinishJob,
    JobFailed,
    OpenPipeline,
    PipelineOpened,
    PipelineRefused,
    PoolReady,
    Prepared,
    PrepareJob,
)
from tests.support.gateway_parts import FakeProcesses

A, B, C = b"pool-0.1", b"pool-1.1", b"pool-0.2"


def prepare_job(deadline_s: float = FOREVER_S) -> PrepareJob:
    return PrepareJob(0, deadline_s, 1, "text", b"word", b"", [])


def finish_job() -> FinishJob:
    return FinishJob(0, FOREVER_S, 1, b"", b"", [])


def client_of(processes: FakeProcesses) -> tuple[PoolClient, list[tuple[int, HeadraceError | None]]]:
    opened: list[tuple[int, HeadraceError | None]] = []
    return PoolClient(processes, InFlight[PoolJob](), lambda m, e: opened.append((m, e))), opened  # type: ignore[arg-type]  # a fake with the port's names


def jobs_sent(processes: FakeProcesses) -> list[tuple[bytes, int]]:
    return [(i, m.job) for i, m in processes.sent if isinstance(m, PrepareJob | FinishJob)]


async def test_each_process_gets_two_jobs_and_the_rest_waits() -> None:
    processes = FakeProcesses(A, B)
    client, _ = client_of(processes)
    futures = [client.submit(prepare_job(), ()) for _ in range(6)]
    assert jobs_sent(processes) == [(A, 1), (B, 2), (A, 3), (B, 4)]
    assert client.waiting() == 2
    processes.answer(A, Prepared(1, [], b"", 0.0))
    assert (await futures[0]).job == 1
    assert jobs_sent(processes)[-1] == (A, 5)


async def test_earliest_deadline_first_and_finishing_before_preparing() -> None:
    processes = FakeProcesses()
    client, _ = client_of(processes)
    for deadline_s in (1e9 + 3, 1e9 + 1, 1e9 + 2):
        client.submit(prepare_job(deadline_s), ())
    client.submit(finish_job(), ())
    processes._ready.append(A)
    processes.answer(A, PoolReady())
    for number in (4, 2, 3, 1):
        assert number in [job for _, job in jobs_sent(processes)]
        processes.answer(A, Finished(number, []) if number == 4 else Prepared(number, [], b"", 0.0))
    assert [job for _, job in jobs_sent(processes)] == [4, 2, 3, 1]


async def test_a_failure_is_rebuilt_as_its_error() -> None:
    processes = FakeProcesses(A)
    client, _ = client_of(processes)
    future = client.submit(prepare_job(), ())
    processes.answer(A, JobFailed(1, Failure("invalid_input", "not an image")))
    with pytest.raises(InvalidInput, match="not an image"):
        await future


async def test_expired_and_abandoned_jobs_are_never_sent() -> None:
    processes = FakeProcesses()
    client, _ = client_of(processes)
    late, gone = client.submit(prepare_job(0.0), ()), client.submit(prepare_job(), ())
    gone.cancel()
    processes._ready.append(A)
    processes.answer(A, PoolReady())
    with pytest.raises(DeadlineExceeded):
        await late
    assert jobs_sent(processes) == []
    assert client.expired == 1


async def test_death_tries_the_running_job_once_more_and_the_staged_one_for_free() -> None:
    processes = FakeProcesses(A)
    client, _ = client_of(processes)
    running, staged = client.submit(prepare_job(), ()), client.submit(prepare_job(), ())
    processes.die(A, b"pool-0.2")
    assert jobs_sent(processes)[2:] == [(b"pool-0.2", 1)]
    processes.die(b"pool-0.2", b"pool-0.3")
    with pytest.raises(InvalidInput, match="ended two processes"):
        await running
    processes.answer(b"pool-0.3", Prepared(2, [], b"", 0.0))
    assert (await staged).job == 2
    assert client.lost_processes == 2


async def test_a_job_whose_answer_died_with_its_process_is_not_blamed_for_the_one_behind_it() -> None:
    """The first job was done, its answer not yet sent, when the second one ended the process: and again, and again."""
    processes = FakeProcesses(A)
    client, _ = client_of(processes)
    innocent, poison = client.submit(prepare_job(), ()), client.submit(prepare_job(), ())
    other = client.submit(prepare_job(), ())
    processes.die(A, b"pool-0.2")
    assert jobs_sent(processes)[2:] == [(b"pool-0.2", 1)]  # nobody behind it
    processes.answer(b"pool-0.2", Prepared(1, [], b"", 0.0))
    assert (await innocent).job == 1
    processes.die(b"pool-0.2", b"pool-0.3")
    assert jobs_sent(processes)[3:] == [(b"pool-0.2", 2), (b"pool-0.3", 2)]
    processes.die(b"pool-0.3", b"pool-0.4")
    with pytest.raises(InvalidInput, match="ended two processes"):
        await poison
    processes.answer(b"pool-0.4", Prepared(3, [], b"", 0.0))
    assert (await other).job == 3


async def test_a_job_that_must_be_alone_waits_for_an_empty_process_rather_than_behind_another_job() -> None:
    processes = FakeProcesses(A, B)
    client, _ = client_of(processes)
    suspect, innocent = client.submit(prepare_job(), ()), client.submit(prepare_job(), ())
    processes.die(A)
    assert jobs_sent(processes) == [(A, 1), (B, 2)], "job 2 would be blamed for what job 1 does"
    assert client.waiting() == 1
    processes.answer(B, Prepared(2, [], b"", 0.0))
    assert (await innocent).job == 2
    assert jobs_sent(processes)[2:] == [(B, 1)]
    processes.answer(B, Prepared(1, [], b"", 0.0))
    assert (await suspect).job == 1


async def test_two_deaths_while_finishing_are_our_fault_not_the_callers() -> None:
    processes = FakeProcesses(A)
    client, _ = client_of(processes)
    future = client.submit(finish_job(), ())
    processes.die(A, b"pool-0.2")
    processes.die(b"pool-0.2")
    with pytest.raises(InternalFault):
        await future


async def test_a_job_over_its_limit_loses_its_process_and_is_not_tried_again() -> None:
    processes = FakeProcesses(A)
    client, _ = client_of(processes)
    with patch.object(pool_client, "now_s", lambda: 100.0):
        slow, staged = client.submit(prepare_job(), ()), client.submit(prepare_job(), ())
    with patch.object(pool_client, "now_s", lambda: 104.0):
        client.tick(5.0, Pauses())
        assert processes.killed == []
    with patch.object(pool_client, "now_s", lambda: 106.0):
        client.tick(5.0, Pauses())
        client.tick(5.0, Pauses())
        assert processes.killed == [A]
        processes.die(A, C)
    with pytest.raises(InvalidInput, match=r"pool\.job_limit_ms"):
        await slow
    assert jobs_sent(processes)[2:] == [(C, 2)]
    processes.answer(C, Prepared(2, [], b"", 0.0))
    await staged


async def test_the_clock_of_a_staged_job_starts_with_its_turn() -> None:
    processes = FakeProcesses(A)
    client, _ = client_of(processes)
    with patch.object(pool_client, "now_s", lambda: 100.0):
        client.submit(prepare_job(), ())
        client.submit(prepare_job(), ())
    with patch.object(pool_client, "now_s", lambda: 104.0):
        processes.answer(A, Prepared(1, [], b"", 0.0))
    with patch.object(pool_client, "now_s", lambda: 106.0):
        client.tick(5.0, Pauses())
    assert processes.killed == []


async def test_a_late_answer_is_counted_and_harmless() -> None:
    processes = FakeProcesses(A)
    client, _ = client_of(processes)
    client.submit(prepare_job(), ()).cancel()
    processes.answer(A, Prepared(1, [], b"", 0.0))
    processes.answer(A, Prepared(1, [], b"", 0.0))
    assert client._inflight.late == 1


async def test_whether_a_pipeline_was_built_is_passed_on() -> None:
    processes = FakeProcesses(A)
    client, opened = client_of(processes)
    client.open(OpenPipeline(1, "words", "v"))
    assert processes.opened == [OpenPipeline(1, "words", "v")]
    processes.answer(A, PipelineOpened(1))
    processes.answer(B, PipelineRefused(1, Failure("internal", "no such class")))
    assert opened[0] == (1, None)
    assert isinstance(opened[1][1], HeadraceError)


async def test_many_jobs_each_get_their_own_answer() -> None:
    processes = FakeProcesses(A, B)
    client, _ = client_of(processes)
    futures = [client.submit(prepare_job(), ()) for _ in range(500)]
    answered = 0
    while answered < 500:
        for identity, job in jobs_sent(processes)[answered:]:
            answered += 1
            processes.answer(identity, Prepared(job, [], str(job).encode(), 0.0))
    for number, future in enumerate(futures, start=1):
        prepared = await asyncio.wait_for(future, 1)
        assert isinstance(prepared, Prepared)
        assert prepared.context == str(number).encode()


async def test_an_input_that_ended_two_processes_is_marked_as_poison() -> None:
    processes = FakeProcesses(A)
    client, _ = client_of(processes)
    future = client.submit(prepare_job(), ())
    processes.die(A, b"pool-0.2")
    processes.die(b"pool-0.2", C)
    with pytest.raises(InvalidInput) as caught:
        await future
    assert caught.value.poison


async def test_the_smaller_priority_number_is_prepared_first() -> None:
    processes = FakeProcesses()
    client, _ = client_of(processes)
    for priority in (100, 200, 1):
        client.submit(prepare_job(), (), priority)
    processes._ready.append(A)
    processes.answer(A, PoolReady())
    processes.answer(A, Prepared(3, [], b"", 0.0))
    assert [job for _, job in jobs_sent(processes)] == [3, 1, 2]


async def test_a_long_job_for_nobody_ends_early() -> None:
    processes = FakeProcesses(A)
    client, _ = client_of(processes)
    with patch.object(pool_client, "now_s", lambda: 100.0):
        gone, staged = client.submit(prepare_job(), ()), client.submit(prepare_job(), ())
        gone.cancel()
    with patch.object(pool_client, "now_s", lambda: 100.4):
        client.tick(5.0, Pauses())
        assert processes.killed == []
    with patch.object(pool_client, "now_s", lambda: 100.6):
        client.tick(5.0, Pauses())
        assert processes.killed == [A]
        processes.die(A, C)
    assert jobs_sent(processes)[2:] == [(C, 2)]  # the staged job goes on, the other one is over
    processes.answer(C, Prepared(2, [], b"", 0.0))
    await staged


@pytest.mark.parametrize(("leaves", "left_s"), [(False, 5.0), (True, 0.5)])
async def test_a_gateway_that_was_stopped_itself_kills_no_process_for_that_time(leaves: bool, left_s: float) -> None:
    """It was stopped from 100.25 s to 130.25 s, and the caller's time ended meanwhile, or did not."""
    processes, pauses = FakeProcesses(A), Pauses()
    client, _ = client_of(processes)
    with patch.object(pool_client, "now_s", lambda: 100.0):
        future = client.submit(prepare_job(), ())
    for now_s in (100.0, 100.25, 130.25):
        pauses.noticed(now_s)
    if leaves:
        future.cancel()
    for age_s, killed in ((0.4, []), (left_s - 0.1, []), (left_s + 0.1, [A])):
        with patch.object(pool_client, "now_s", lambda age_s=age_s: 130.0 + age_s):
            client.tick(5.0, pauses)
            assert processes.killed == killed
