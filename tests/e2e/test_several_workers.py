"""`headrace serve` with two workers: they share the work, and one can die or hang without any caller noticing."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import Client
from tests.support.ledger import Load
from tests.support.stack import Site, eventually, serving, simulated_repository

pytestmark = pytest.mark.alone

BACK_S = 15.0
NAMES = ("worker-0", "worker-1")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Site]:
    """Two workers whose batches take 50 ms, however many of at most four rows are in them."""
    repository = simulated_repository(tmp_path / "models", a_ms=50, b_ms=0)
    worker = {"count": 2, "hang_limit_ms": 2000}
    site = Site(tmp_path / "site", repository, worker=worker, batching={"max_rows": 4})
    yield site
    site.kill_all()


def both_back(site: Site) -> None:
    eventually("both workers with their model", lambda: site.ready() and site.workers_with_models() == 2, BACK_S)


def ran(site: Site) -> dict[str, int]:
    return {name: ran["batches"] for name, ran in site.debug()["ran"].items()}


def only_ok(load: Load) -> None:
    assert load.wrong == []
    assert load.overdue == []
    assert set(load.outcomes) == {"ok"}, load.outcomes


def test_two_workers_run_twice_the_batches_side_by_side(pair: Site, jpeg: bytes) -> None:
    with serving(pair):
        both_back(pair)
        before = ran(pair)
        with Load(pair.grpc, jpeg, callers=24) as load:
            load.wait_for("ok", 240)
        batches = [ran(pair)[name] - before.get(name, 0) for name in NAMES]
        only_ok(load)
        # All batches take the same time: what one worker had to run in a row, against what one would have to alone.
        assert sum(batches) / max(batches) >= 1.6, batches
        metrics = pair.get("/metrics")[1]
        for name in NAMES:
            assert f'headrace_worker_batches_total{{worker="{name}"}} ' in metrics
            assert f'headrace_worker_batches_held{{worker="{name}"}} 0.0' in metrics
        assert "headrace_workers 2.0" in metrics


def test_a_killed_worker_costs_no_request_while_the_other_one_lives(pair: Site, jpeg: bytes) -> None:
    with serving(pair):
        both_back(pair)
        gateway = pair.gateway_pid()
        with Load(pair.grpc, jpeg, callers=24) as load:
            for name in (*NAMES, *NAMES):
                load.wait_for("ok", 40)
                killed = pair.worker_pid(name)
                os.kill(killed, signal.SIGKILL)
                load.wait_for("ok", 40)
                assert pair.ready()
                eventually("another worker", lambda name=name, killed=killed: pair.worker_pid(name) != killed, BACK_S)
                both_back(pair)
        only_ok(load)
        assert pair.gateway_pid() == gateway
        assert all(ran(pair)[name] > 0 for name in NAMES)


def test_a_stopped_worker_is_replaced_and_its_batch_run_by_the_other(pair: Site, jpeg: bytes) -> None:
    with serving(pair):
        both_back(pair)
        stopped = pair.worker_pid("worker-1")
        with Load(pair.grpc, jpeg, callers=8) as load:
            load.wait_for("ok", 20)
            os.kill(stopped, signal.SIGSTOP)
            load.wait_for("ok", 20)  # the other one goes on meanwhile
            eventually("the worker to be replaced", lambda: pair.worker_pid("worker-1") not in {0, stopped}, BACK_S)
            both_back(pair)
        only_ok(load)


def test_workers_by_themselves_each_with_its_index(pair: Site, jpeg: bytes) -> None:
    with pair.module("gateway"), pair.module("workers") as first, pair.module("workers", "--index", "1") as second:
        both_back(pair)
        assert [pair.worker_pid(name) for name in NAMES] == [first.pid, second.pid]
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
        with Client(pair.grpc) as client:
            assert client.classify(jpeg).labels
        assert pair.ready()
        assert pair.worker_pids() == [second.pid]
