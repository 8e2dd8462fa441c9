"""The gateway's own code (flow, door, leases, pool client, dispatcher, batcher) in virtual time, between a pool and
workers that take as long as a test says. Memory is real: inputs and outputs lie in arena slots, so a slot that was
given away too early shows as a wrong answer.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from gateway.admission import Admission
from gateway.batcher import Batcher
from gateway.cost_model import CostModel
from gateway.dispatch import Dispatcher
from gateway.flow import Door, Flow
from gateway.forecast import Forecast
from gateway.inflight import InFlight
from gateway.leases import Leases
from gateway.metrics import Metrics
from gateway.pool_client import PoolClient, PoolJob
from gateway.quarantine import Quarantine
from gateway.request import DEFAULT_PRIORITY, Request
from gateway.routing import Routing
from gateway.served import ServedModel
from gateway.work import Work
from gateway.worker_client import WorkerClient
from shared.arena import Arena
from shared.errors import HeadraceError
from shared.messages import ModelLoaded
from shared.pipeline import RawInput
from shared.results import Text
from shared.settings import AdmissionSettings, WorkerSettings
from tests.support.gateway_parts import connect_worker, served, welcome
from tests.support.virtual_processes import NBYTES, Cost, VirtualPool, VirtualWorkers

INLINE_BYTES = 32
"""So that every input, tensor and output has a slot."""
Words = tuple[bytes, ...]
"""What the inputs of a request begin with."""
PLAIN: Words = (b"",)


class Call(NamedTuple):
    """One call as its caller sees it."""

    number: int
    arrived_s: float
    ended_s: float
    deadline_s: float
    outcome: str
    """`ok`, a word of `shared.errors.Code`, or `left`."""
    queued_s: float = 0.0
    """In the batcher and staged."""


class VirtualServer:
    """Everything between the edge and the processes. Make it inside `virtual_time.run`."""

    def __init__(
        self,
        models: list[ServedModel],
        cost: Cost,
        *,
        processes: int = 1,
        prepare_s: Callable[[], float] = lambda: 1e-6,
        workers: int = 1,
        admission: AdmissionSettings | None = None,
    ) -> None:
        limits = WorkerSettings()
        self.models = models
        self.arena = Arena.create(1 << 20)
        self.pool_processes = VirtualPool(processes, prepare_s, self.arena)
        self.router = VirtualWorkers(cost, self.arena)
        self.workers = WorkerClient(self.router, welcome)  # type: ignore[arg-type]  # a fake with the port's names
        self.router.client = self.workers
        self.router.returned = self._connect
        self.cost = CostModel()
        self.batches: InFlight[Work] = InFlight()
        self.jobs: InFlight[PoolJob] = InFlight()
        self.dispatch = Dispatcher(Batcher(self.cost.predict), self.cost, self.workers, self.batches, limits)
        self.leases = Leases(self.arena, INLINE_BYTES, limits.staged_batches + 1)
        self.admission = Admission(admission or AdmissionSettings())
        self.pool = PoolClient(self.pool_processes, self.jobs, lambda _m, _e: None)  # type: ignore[arg-type]  # a fake
        self.metrics = Metrics()
        routing = Routing(models)
        self.forecast = Forecast(processes, routing)
        self.quarantine = Quarantine()
        door = Door(self.admission, self.forecast, self.quarantine)
        self.flow = Flow(door, routing, self.leases, self.pool, self.dispatch, self.metrics)
        self.workers.connect([self.dispatch])
        self.dispatch.on_batch, self.dispatch.drops = self.metrics.batch, self.metrics.drops
        self.dispatch.slots_back = self.pool.slots_back = self.leases.pump
        self.leases.nobody_comes = self.dispatch.kick
        self.calls: list[Call] = []
        self.wrong: list[tuple[int, str]] = []
        self._seconds = cost
        for model in models:
            self.dispatch.configure(model)
        for number in range(workers):
            self._connect(f"worker-{number}")

    def _connect(self, name: str) -> None:
        worker = connect_worker(self.workers, name=name)
        for model in self.models:
            warm = [(rows, self._seconds(model.number, rows)) for rows in model.limits.sizes]
            loaded = ModelLoaded(model.number, warm, 10, "fp32", 0.1, pads=False)
            self.workers.on_message(worker.identity, loaded)

    async def call(
        self, number: int, patience_s: float, *, model: int = 1, priority: int = DEFAULT_PRIORITY, words: Words = PLAIN
    ) -> None:
        """One request, to its end; it is made of its number, so that its answer can be told from another's."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        data = [(word + b"%d of %d" % (index, number)).ljust(NBYTES) for index, word in enumerate(words)]
        request = Request(
            self.models[model - 1].name,
            "",
            str(number),
            [RawInput(kind="text", data=word) for word in data],
            {},
            now_s + patience_s,
            now_s,
            NBYTES * len(data),
            priority=priority,
        )
        outcome = "ok"
        try:
            answer = await self.flow.answer(request)
            texts = [result.text if isinstance(result, Text) else repr(result) for result in answer.results]
            if texts != [word.decode() for word in data]:
                self.wrong.append((number, repr(texts)))
        except HeadraceError as error:
            outcome = str(error.code)
        except asyncio.CancelledError:
            outcome = "left"
        self.calls.append(Call(number, now_s, loop.time(), request.deadline_s, outcome, request.times.batch_s))

    def later(self, delay_s: float, event: Callable[[], None]) -> None:
        """Something that happens while a load runs."""
        asyncio.get_running_loop().call_later(delay_s, event)

    def outcomes(self) -> Counter[str]:
        """How many calls ended how."""
        return Counter(call.outcome for call in self.calls)

    def at_rest(self) -> bool:
        """Nothing is held by anybody, down to the last slot and row."""
        stats = self.arena.stats()
        counts = [
            self.admission.in_flight_requests,
            self.admission.in_flight_bytes,
            len(self.batches),
            len(self.jobs),
            self.leases.waiting_items(),
            self.pool.waiting(),
            self.dispatch.waiting_items(),
            len(self.dispatch.running),
            stats.leased_bytes,
            stats.quarantined_bytes,
            *(sum((m.rows_in_flight, m.unprepared_items, m.preparing_rows)) for m in self.models),
            *self.leases._held_rows.values(),
        ]
        return not any(counts)

    def close(self) -> None:
        """No timer may outlive the loop."""
        self.pool_processes.close()
        self.router.close()
        if self.dispatch._timer is not None:
            self.dispatch._timer.cancel()
        self.arena.close()


def model(
    number: int = 1, *, max_rows: int = 8, max_wait_s: float = 0.005, name: str = "words", inline: bool = True
) -> ServedModel:
    """A model of words of 64 bytes, finished inline or in the pool."""
    made = served(number, name=name, max_rows=max_rows, max_wait_s=max_wait_s, nbytes=NBYTES)
    if not inline:
        made.pipeline.postprocess_is_trivial = False  # type: ignore[misc]  # of this one only
    return made
