"""kill -9 and SIGSTOP of every process under load: each call ends with one status, nothing is wrong, all comes back."""

import json
import os
import signal
import threading
from collections.abc import Callable

import pytest

from headrace import Client
from tests.support.ledger import Load, at_rest
from tests.support.stack import Site, eventually, serving

pytestmark = pytest.mark.alone

BACK_S = 10.0
RETRYABLE = {"not_ready", "process_lost", "draining"}
"""What a caller may see of a lost worker or pool process: UNAVAILABLE, safe to retry."""


def check(load: Load, *allowed: str) -> None:
    assert load.wrong == []
    assert load.overdue == []
    assert set(load.outcomes) <= {"ok", *allowed}, load.outcomes
    assert load.outcomes["ok"] > 0


def kill_worker(site: Site) -> None:
    os.kill(site.worker_pids()[0], signal.SIGKILL)


def kill_pool_process(site: Site) -> None:
    os.kill(site.pool_pids()[0], signal.SIGKILL)


def kill_whole_pool(site: Site) -> None:
    for pid in site.pool_pids():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("kill", [kill_worker, kill_pool_process, kill_whole_pool])
def test_a_killed_child_is_replaced_and_every_call_ends(
    own_site: Site, jpeg: bytes, kill: Callable[[Site], None]
) -> None:
    with serving(own_site):
        gateway = own_site.gateway_pid()
        with Load(own_site.grpc, jpeg) as load:
            for _ in range(3):
                load.wait_for("ok", 50)
                kill(own_site)
                load.wait_for("ok", 50)
                eventually("all to be ready again", lambda: own_site.ready() and len(own_site.pool_pids()) == 2, BACK_S)
        check(load, *RETRYABLE)
        if kill is not kill_worker:
            assert load.outcomes["not_ready"] == 0  # the pool's deaths are invisible but for the calls they held
        assert own_site.gateway_pid() == gateway
        eventually("everything to be given back", lambda: at_rest(own_site), BACK_S)


def test_a_killed_gateway_is_replaced_and_its_pool_dies_with_it(own_site: Site, jpeg: bytes) -> None:
    with serving(own_site):
        worker = own_site.worker_pids()
        pool = own_site.pool_pids()
        with Load(own_site.grpc, jpeg) as load:
            load.wait_for("ok", 50)
            os.kill(own_site.gateway_pid(), signal.SIGKILL)
            load.wait_for("ok", 50)
        check(load, *RETRYABLE, "unreachable")  # the last one is the connection: lost, or refused
        assert own_site.worker_pids() == worker  # it kept its models and found the new gateway
        eventually("the old pool to be gone", lambda: not alive(pool), 2.0)


def test_a_killed_supervisor_takes_everything_with_it_and_a_new_start_works_at_once(
    own_site: Site, jpeg: bytes
) -> None:
    with serving(own_site) as process:
        process.signal(signal.SIGKILL)
        process.wait()
        own_site.wait_no_process(2.0)
    with serving(own_site), Client(own_site.grpc) as client:
        assert client.classify(jpeg).labels


def test_a_stopped_worker_is_found_out_while_nobody_calls(own_site: Site) -> None:
    rewrite(own_site, worker={"count": 1, "hang_limit_ms": 2000})
    with serving(own_site):
        (worker,) = own_site.worker_pids()
        os.kill(worker, signal.SIGSTOP)
        eventually("readiness to turn false", lambda: not own_site.ready(), 15.0)
        eventually("another worker", lambda: own_site.ready() and own_site.worker_pids() != [worker], 15.0)


def test_a_gateway_that_was_stopped_blames_nobody_for_it(own_site: Site, jpeg: bytes) -> None:
    rewrite(own_site, pool={"job_limit_ms": 1000, "processes": 2}, worker={"count": 1, "hang_limit_ms": 1000})
    with serving(own_site) as process:
        eventually("both pool processes", lambda: len(own_site.pool_pids()) == 2, BACK_S)
        before = own_site.worker_pids(), sorted(own_site.pool_pids())
        gateway = own_site.gateway_pid()
        with Load(own_site.grpc, jpeg) as load:
            load.wait_for("ok", 50)
            os.kill(gateway, signal.SIGSTOP)
            threading.Timer(2.5, os.kill, (gateway, signal.SIGCONT)).start()
            process.wait_line("did not run for a while")
            load.wait_for("ok", 50)
        check(load, "deadline_exceeded")
        assert (own_site.worker_pids(), sorted(own_site.pool_pids())) == before
        assert own_site.gateway_pid() == gateway


def test_a_stopped_pool_process_is_replaced(own_site: Site, jpeg: bytes) -> None:
    rewrite(own_site, pool={"job_limit_ms": 500, "processes": 2})
    with serving(own_site):
        stopped = own_site.pool_pids()[0]
        with Load(own_site.grpc, jpeg, callers=4) as load:
            load.wait_for("ok", 20)
            os.kill(stopped, signal.SIGSTOP)
            load.wait_for("ok", 20)
            eventually("the process to be replaced", lambda: stopped not in own_site.pool_pids(), BACK_S)
        check(load, "invalid_input")  # the one call that it held: over pool.job_limit_ms
        assert load.outcomes["invalid_input"] <= 1


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            os.kill(pid, 0)
            found.append(pid)
        except ProcessLookupError:
            continue
    return found


def rewrite(site: Site, **groups: object) -> None:
    """Change groups of the settings before the start."""
    settings = json.loads(site.config.read_text())
    settings.update(groups)
    site.config.write_text(json.dumps(settings))


def test_a_stop_under_load_ends_no_call_without_a_reason_to_try_again(own_site: Site, jpeg: bytes) -> None:
    with serving(own_site) as process, Load(own_site.grpc, jpeg) as load:
        load.wait_for("ok", 100)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        load.stop()
    check(load, "draining", "unreachable")  # both UNAVAILABLE; never a bare CANCELLED


def test_a_planned_change_of_pool_processes_is_seen_by_nobody(own_site: Site, jpeg: bytes) -> None:
    rewrite(own_site, pool={"processes": 1, "recycle_jobs": 20})
    with serving(own_site):
        seen: set[int] = set()
        with Load(own_site.grpc, jpeg, callers=2) as load:

            def changed() -> bool:
                seen.update(own_site.pool_pids())
                return len(seen) >= 4

            eventually("three changes", changed, 30.0)
            load.wait_for("ok", 20)
        check(load)
        metrics = own_site.get("/metrics")[1]
        assert "headrace_pool_processes_lost_total 0.0" in metrics
