"""A dispatcher over a fake router, with a real arena, for tests that play the workers."""

import asyncio

from gateway.batcher import Batcher
from gateway.cost_model import CostModel
from gateway.dispatch import Dispatcher
from gateway.inflight import InFlight
from gateway.leases import Lease, Leases
from gateway.served import ServedModel
from gateway.work import Outcome, Work
from gateway.worker_client import Worker, WorkerClient
from shared.arena import Arena
from shared.clock import FOREVER_S
from shared.messages import RunBatch
from shared.pipeline import RawInput
from shared.settings import WorkerSettings
from shared.tensors import Tensor
from tests.support.gateway_parts import FakeRouter, done, welcome


class Bench:
    """The parts, and short words for what the tests do with them."""

    def __init__(self, *models: ServedModel, limits: WorkerSettings | None = None) -> None:
        self.router = FakeRouter()
        self.arena = Arena.create(1 << 20)
        self.workers = WorkerClient(self.router, welcome)  # type: ignore[arg-type]  # a fake with the port's names
        cost = CostModel()
        self.dispatch = Dispatcher(
            Batcher(cost.predict), cost, self.workers, InFlight[Work](), limits or WorkerSettings()
        )
        self.leases = Leases(self.arena, 1024, 1000)
        self.leases.nobody_comes = self.dispatch.kick
        self.workers.connect([self.dispatch])
        for model in models:
            self.dispatch.configure(model)

    async def lease(self, model: ServedModel, *, prepared: bool = True) -> Lease:
        lease = await self.leases.acquire(model, RawInput(kind="text"))
        if prepared:
            lease.prepared()
        return lease

    async def submit(
        self, model: ServedModel, word: bytes = b"word", deadline_s: float = FOREVER_S
    ) -> "asyncio.Future[Outcome]":
        tensor = Tensor("x", "UINT8", (1, len(word)), word)
        return await self.queue(model, [tensor], await self.lease(model), deadline_s)

    async def queue(
        self, model: ServedModel, tensors: list[Tensor], lease: Lease, deadline_s: float = FOREVER_S
    ) -> "asyncio.Future[Outcome]":
        """One item, with time for the dispatcher to send it."""
        future = self.dispatch.submit(model, tensors, lease, deadline_s)
        await asyncio.sleep(0)
        return future

    def answer(self, worker: Worker, batch: RunBatch) -> None:
        self.workers.on_message(worker.identity, done(batch))
