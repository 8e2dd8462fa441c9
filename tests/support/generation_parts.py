"""A gateway's core with a model of texts; only the processes on the other side of its sockets are played."""

import asyncio
from typing import Any

from gateway.admission import Admission
from gateway.batcher import Batcher
from gateway.cost_model import CostModel
from gateway.dispatch import Dispatcher
from gateway.flow import Door, Flow
from gateway.forecast import Forecast
from gateway.generation import Ticket
from gateway.generation_driver import Generation
from gateway.generation_metrics import GenerationMetrics
from gateway.inflight import InFlight
from gateway.leases import Leases
from gateway.metrics import Metrics
from gateway.pool_client import PoolClient, PoolJob
from gateway.quarantine import Quarantine
from gateway.request import Answer, Part, Request, Write
from gateway.routing import Routing
from gateway.work import Work
from gateway.worker_client import Worker, WorkerClient
from shared.arena import Arena
from shared.clock import now_s
from shared.generation_messages import Generated, Piece
from shared.messages import (
    PROTOCOL_VERSION,
    Failure,
    Hello,
    ModelEvicted,
    ModelLoaded,
    Welcome,
    WorkerReady,
)
from shared.pipeline import Kind, RawInput
from shared.results import Text
from shared.settings import AdmissionSettings, WorkerSettings
from tests.support.gateway_parts import welcome
from tests.support.generation_players import Pool, Writers, text_model

LIMIT_S = 5.0


class TextWorld:
    """One gateway's core, its worker greeted."""

    def __init__(self, sequences: int = 4, tokens: int = 128, **worker: Any) -> None:  # noqa: ANN401 - settings by name
        self.arena = Arena.create(1 << 20)
        self.model = text_model()
        self.router = Writers(sequences, tokens)
        self.workers = self.router.client = WorkerClient(self.router, welcome)  # type: ignore[arg-type]  # a fake with the port's names
        cost, settings = CostModel(), WorkerSettings(**worker)
        self.dispatch = Dispatcher(Batcher(cost.predict), cost, self.workers, InFlight[Work](), settings)
        self.leases = Leases(self.arena, 1024, 3)
        self.admission = Admission(AdmissionSettings(max_requests=64, max_rows=64))
        self.pool_side = Pool()
        self.pool = PoolClient(self.pool_side, InFlight[PoolJob](), lambda _m, _e: None)  # type: ignore[arg-type]  # a fake
        self.metrics = Metrics()
        routing = Routing([self.model])
        self.quarantine = Quarantine()
        door = Door(self.admission, Forecast(1, routing), self.quarantine)
        self.flow = Flow(door, routing, self.leases, self.pool, self.dispatch, self.metrics)
        self.generation = self.flow.generation = Generation(self.workers, settings, self.metrics.drops)
        self.shown = GenerationMetrics(self.metrics, self.generation)
        self.workers.connect([self.dispatch, self.generation])
        self.dispatch.configure(self.model)
        self.leases.nobody_comes = self.dispatch.kick

    def greet(self, name: str = "worker-0") -> Worker:
        """A worker comes, and has loaded the model."""
        greeting = self.workers.on_hello(Hello(PROTOCOL_VERSION, 1, name, "cpu"), 1)
        if not isinstance(greeting, Welcome):
            raise TypeError(greeting)
        self.workers.on_message(greeting.identity, WorkerReady())
        self.load(greeting.identity)
        return next(worker for worker in self.workers.workers() if worker.identity == greeting.identity)

    def load(self, identity: bytes) -> None:
        """It answers that it has."""
        loaded = ModelLoaded(1, [], 10, "fp32", 0.1, pads=False, generation=self.router.limits)
        self.workers.on_message(identity, loaded)

    def lose(self, worker: Worker) -> None:
        """It dies with everything that it has."""
        self.router.writing.pop(worker.identity, None)
        self.workers.on_lost(worker.identity)

    def evict(self, worker: Worker) -> None:
        """It gives the model up, and with it the texts that are on their way to it."""
        self.workers.on_message(worker.identity, ModelEvicted(1))
        self.give_back(worker, "not_ready")

    def give_back(self, worker: Worker, code: str) -> None:
        """It ends all texts that it has, for this reason."""
        failure, held = Failure(code, "not here"), self.router.writing.pop(worker.identity, {})
        self.workers.on_message(worker.identity, Generated([Piece(job, failure=failure) for job in held]))

    def request(self, *prompts: str, within_s: float = LIMIT_S, kind: Kind = "text", **options: Any) -> Request:  # noqa: ANN401 - by name
        inputs = [RawInput(kind=kind, data=prompt.encode()) for prompt in prompts]
        now = now_s()
        return Request("writer", "", "id-1", inputs, options, now + within_s, now, sum(map(len, prompts)))

    async def answer(self, *prompts: str, **options: Any) -> list[Text]:  # noqa: ANN401 - by name
        """Whole texts."""
        async with asyncio.timeout(LIMIT_S):
            answer: Answer = await self.flow.answer(self.request(*prompts, **options))
        return [result for result in answer.results if isinstance(result, Text)]

    def begin(self, prompt: str, write: Write | None = None, **options: Any) -> "Reading":  # noqa: ANN401 - by name
        """A text that is read while it grows, in a task of its own."""
        return Reading(self, self.request(prompt, **options), write)

    def in_line(self) -> list[Ticket]:
        """Who waits for room."""
        return self.generation.lobby.of(self.model).places.in_line()

    async def until(self, what: str, condition: Any) -> None:  # noqa: ANN401 - a condition
        """Give the loop turns until this holds."""
        until_s = now_s() + LIMIT_S
        while not condition():
            if now_s() > until_s:
                raise AssertionError(f"waited {LIMIT_S} s for {what}; {self.generation.lobby.versions}")
            await asyncio.sleep(0)

    def at_rest(self) -> bool:
        """Nothing is held by anybody."""
        version = self.generation.lobby.versions[1]
        held = (
            self.admission.in_flight_requests,
            self.model.requests,
            self.model.rows_in_flight,
            len(self.generation.held),
        )
        return held == (0, 0, 0, 0) and version.places.is_idle and not self.arena.stats().leased_bytes

    def sample(self, name: str, **labels: str) -> float:
        """One number of `/metrics`; 0 where there is none."""
        return self.metrics.registry.get_sample_value(name, {"model": "writer", **labels}) or 0.0

    def close(self) -> None:
        """Leave nothing to the loop."""
        self.router.steps_by_itself = False
        if self.dispatch._timer is not None:
            self.dispatch._timer.cancel()
        self.arena.close()


class Reading:
    """One caller who reads along."""

    def __init__(self, world: TextWorld, request: Request, write: Write | None) -> None:
        self.parts: list[Part] = []
        self.request = request
        request.write = write or self._write
        self.task = asyncio.get_running_loop().create_task(world.flow.answer(request))

    async def _write(self, part: Part) -> None:
        self.parts.append(part)

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)

    async def end(self) -> Answer:
        """Wait for it."""
        async with asyncio.timeout(LIMIT_S):
            return await self.task

    async def leave(self) -> None:
        """The caller goes."""
        self.task.cancel()
        await asyncio.wait([self.task])
