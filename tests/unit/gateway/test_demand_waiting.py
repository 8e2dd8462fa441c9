"""Requests that wait for a load, with versions that come and go in every order; `test_demand` has the whole gateway."""

import asyncio
from collections.abc import Coroutine

import pytest

from gateway.demand import Demand
from gateway.readiness import NO_WORKER
from gateway.served import ServedModel
from gateway.state import Phase
from gateway.worker_client import WorkerClient
from shared.errors import NotReady
from shared.messages import LoadModel
from tests.support.gateway_parts import FakeRouter, connect_worker, served, welcome

LIMIT_S = 5.0


class Bench:
    """A demand in front of fake workers; the test says what becomes of the versions."""

    def __init__(self, return_limit_s: float = LIMIT_S) -> None:
        self.router = FakeRouter()
        self.workers = WorkerClient(self.router, welcome)  # type: ignore[arg-type]  # a fake with the port's names
        self.parked: list[ServedModel] = []
        self.demand = Demand(self.workers, self.wanted, lambda: self.parked, return_limit_s)

    def wanted(self, model: ServedModel) -> None:
        self.turns(model, "loading")

    def model(self, number: int = 1, phase: Phase = "on_demand") -> ServedModel:
        model = served(number)
        model.state.on_demand = True
        model.state.phase = phase
        self.workers.serve(LoadModel(number, model.name, model.version, pinned=False))
        return model

    def turns(self, model: ServedModel, phase: Phase, reason: str = "") -> None:
        model.state.phase, model.state.reason = phase, reason
        self.demand.changed()

    def loads(self) -> list[int]:
        return [message.model for _, message in self.router.sent if isinstance(message, LoadModel)]


async def waiting(work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
    """One that has begun to wait."""
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    return task


async def finished(task: "asyncio.Task[None]") -> None:
    async with asyncio.timeout(LIMIT_S):
        await task


async def test_many_requests_ask_once_and_go_on_together() -> None:
    b = Bench()
    connect_worker(b.workers)
    model = b.model()
    tasks = [await waiting(b.demand.ready(model)) for _ in range(3)]
    assert (b.demand.waiting(), b.loads(), model.state.phase) == (3, [1], "loading")
    b.turns(model, "proving")
    await asyncio.sleep(0)
    assert b.demand.waiting() == 3
    b.turns(model, "ready")
    for task in tasks:
        await finished(task)
    assert b.demand.waiting() == 0


async def test_what_cannot_be_loaded_says_why() -> None:
    b = Bench()
    connect_worker(b.workers)
    model = b.model()
    task = await waiting(b.demand.ready(model))
    b.turns(model, "failed", "it has too many weights")
    with pytest.raises(NotReady, match="can't be loaded: it has too many weights"):
        await finished(task)


async def test_a_version_that_goes_again_before_the_request_could_go_on_is_loaded_again() -> None:
    b = Bench()
    worker = connect_worker(b.workers)
    model = b.model()
    task = await waiting(b.demand.ready(model))
    worker.asked.clear()
    b.turns(model, "ready")
    b.turns(model, "on_demand")  # in the same turn of the loop
    await asyncio.sleep(0)
    assert b.loads() == [1, 1]
    b.turns(model, "ready")
    await finished(task)


async def test_a_version_that_goes_before_it_was_ready_is_loaded_again_for_those_who_wait() -> None:
    b = Bench()
    worker = connect_worker(b.workers)
    model = b.model()
    task = await waiting(b.demand.ready(model))
    b.turns(model, "proving")
    worker.asked.clear()
    b.turns(model, "on_demand")
    assert (b.loads(), model.state.phase) == ([1, 1], "loading")
    b.turns(model, "ready")
    await finished(task)


async def test_those_who_leave_leave_nothing() -> None:
    b = Bench()
    connect_worker(b.workers)
    model = b.model()
    tasks = [await waiting(b.demand.ready(model)) for _ in range(2)]
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    assert b.demand.waiting() == 1
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    assert b.demand.waiting() == 0


async def test_a_worker_that_dies_during_the_load_and_comes_back_costs_nobody_an_answer() -> None:
    b = Bench()
    worker = connect_worker(b.workers)
    model = b.model()
    task = await waiting(b.demand.ready(model))
    b.workers.on_lost(worker.identity)
    b.turns(model, "no_worker", NO_WORKER)
    await asyncio.sleep(0)
    assert b.demand.waiting() == 1
    connect_worker(b.workers)
    b.turns(model, "on_demand")
    b.demand.again()
    assert (b.loads(), model.state.phase) == ([1, 1], "loading")
    b.turns(model, "ready")
    await finished(task)


async def test_a_worker_that_does_not_come_back_is_not_waited_for_for_ever() -> None:
    b = Bench(return_limit_s=0.001)
    connect_worker(b.workers)
    model = b.model()
    task = await waiting(b.demand.ready(model))
    b.turns(model, "no_worker", NO_WORKER)
    with pytest.raises(NotReady, match="no worker is connected"):
        await finished(task)
    assert b.demand.waiting() == 0


async def test_a_request_whose_worker_died_after_the_load_waits_further_on() -> None:
    b = Bench()
    connect_worker(b.workers)
    model = b.model()
    task = await waiting(b.demand.ready(model))
    b.turns(model, "ready")
    b.turns(model, "no_worker")  # in the same turn of the loop
    await finished(task)


async def test_a_worker_that_comes_loads_what_prepared_items_wait_for() -> None:
    b = Bench()
    model = b.model()
    b.parked = [model]
    connect_worker(b.workers)
    b.demand.again()
    assert b.loads() == [1]


async def test_what_is_always_there_is_not_asked_for() -> None:
    b = Bench()
    connect_worker(b.workers)
    b.demand.load(served())
    assert b.loads() == []
