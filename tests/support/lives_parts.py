"""The gateway's parts about the lives of versions, as the composition wires them, over a repository on the disk.

Everything in the gateway is real; only the processes on the other side of its sockets are played: workers that load
and answer on the loop's next turn unless told otherwise, and a pool that opens every pipeline.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from gateway import model_control
from gateway.admission import Admission
from gateway.batcher import Batcher
from gateway.build import served_models
from gateway.cost_model import CostModel
from gateway.dispatch import Dispatcher
from gateway.flow import Door, Flow
from gateway.forecast import Forecast
from gateway.generation_driver import Generation
from gateway.inflight import InFlight
from gateway.leases import Leases
from gateway.lives import Knit, Lives
from gateway.metrics import Metrics
from gateway.orders import Order
from gateway.pool_client import PoolClient, PoolJob
from gateway.quarantine import Quarantine
from gateway.readiness import Readiness
from gateway.request import Answer, Request
from gateway.routing import Routing
from gateway.row_caps import RowCaps
from gateway.served import ServedModel
from gateway.work import Work
from gateway.worker_client import Worker, WorkerClient
from shared.arena import Arena
from shared.clock import now_s
from shared.messages import (
    PROTOCOL_VERSION,
    BatchDone,
    Failure,
    Hello,
    ItemAnswer,
    LoadModel,
    ModelEvicted,
    ModelFailed,
    ModelLoaded,
    OpenPipeline,
    PipelineOpened,
    PipelineRefused,
    RunBatch,
    ToWorker,
    Welcome,
    WorkerReady,
)
from shared.pipeline import RawInput
from shared.repository import Meta, Repository
from shared.repository_writer import add_version
from shared.settings import Settings
from shared.tensors import RawTensor
from shared.traffic import Traffic
from tests.support.gateway_parts import FakeProcesses, FakeRouter, done, welcome

LIMIT_S = 5.0
ROLLBACK_LOOK_S = model_control.READ_LIMIT_S  # as the server has it
model_control.READ_LIMIT_S = model_control.WRITE_LIMIT_S = LIMIT_S  # tests wait until it is written, however slow
NAME = "words"
MODEL_YAML = """\
pipeline: tensor
backend: simulated
preprocessing:
  inputs: [{name: x, datatype: UINT8, shape: [4]}]
  outputs: [{name: x, datatype: UINT8, shape: [4]}]
"""


def add(root: Path, content: bytes, name: str = NAME, *, more: str = "") -> str:
    """One more version with this content, in a new model where there is none; returns the version's hash."""
    folder = root / name
    folder.mkdir(exist_ok=True, parents=True)
    if not (folder / "model.yaml").exists():
        (folder / "model.yaml").write_text(MODEL_YAML + more)
    weights = root.parent / f"{name}.bin"
    weights.write_bytes(content)
    return add_version(root, name, {"weights.bin": weights}, Meta(source="test")).version


class Pool(FakeProcesses):
    """Opens every pipeline on the loop's next turn, unless it is `silent`; refuses those of versions in `refused`."""

    def __init__(self) -> None:
        super().__init__(b"pool-0.1")
        self.closed: list[int] = []
        self.refused: set[str] = set()
        self.silent = False

    def open(self, message: OpenPipeline) -> None:
        super().open(message)
        answer = (
            PipelineRefused(message.model, Failure("internal", "its pipeline can't be built"))
            if message.version in self.refused
            else PipelineOpened(message.model)
        )
        if not self.silent:
            asyncio.get_running_loop().call_soon(self.answer, b"pool-0.1", answer)

    def close(self, model: int) -> None:
        """No process keeps this pipeline."""
        self.closed.append(model)


class Workers(FakeRouter):
    """What workers do with what they are sent: they load, and give every item its own input back.

    `bad` versions can't be loaded; those in `holds` are loaded only when the test says so (`finish`), like batches
    while `holds_batches`. `answers` makes another answer of a batch, or none; what `ends` names ends the worker.
    """

    def __init__(self) -> None:
        super().__init__()
        self.client: WorkerClient
        self.bad: dict[str, str] = {}
        self.holds: set[str] = set()
        self.held: list[tuple[bytes, LoadModel]] = []
        self.holds_batches = False
        self.held_batches: list[tuple[bytes, RunBatch]] = []
        self.answers: Callable[[RunBatch], BatchDone | None] = lambda _batch: None
        self.ends: Callable[[RunBatch], bool] = lambda _batch: False
        self.came = asyncio.Condition()

    def send(self, identity: bytes, message: ToWorker) -> bool:
        accepted = super().send(identity, message)
        match message:
            case LoadModel(version=version) if version in self.holds:
                self.held.append((identity, message))
            case LoadModel():
                asyncio.get_running_loop().call_soon(self.load, identity, message)
            case RunBatch() if self.ends(message):
                asyncio.get_running_loop().call_soon(self.client.on_lost, identity)
            case RunBatch() if self.holds_batches:
                self.held_batches.append((identity, message))
            case RunBatch():
                answer = self.answers(message) or done(message, now_s())
                asyncio.get_running_loop().call_soon(self.client.on_message, identity, answer)
        return accepted

    def load(self, identity: bytes, message: LoadModel) -> None:
        """A worker answers that it has loaded a version, or could not."""
        if message.version in self.bad:
            self.client.on_message(
                identity, ModelFailed(message.model, Failure("not_ready", self.bad[message.version]))
            )
            return
        costs = [(1, 0.001), (4, 0.001)]
        self.client.on_message(identity, ModelLoaded(message.model, costs, 10, "fp32", 0.1, pads=False))

    def finish(self) -> None:
        """All held loads."""
        self.holds.clear()
        held, self.held = self.held, []
        for identity, message in held:
            self.load(identity, message)

    def run(self) -> None:
        """All held batches."""
        self.holds_batches = False
        held, self.held_batches = self.held_batches, []
        for identity, message in held:
            self.client.on_message(identity, done(message, now_s()))

    def evict(self, worker: Worker, model: int) -> None:
        """A worker gives a version up."""
        self.client.on_message(worker.identity, ModelEvicted(model))

    def loads(self) -> list[str]:
        """Versions that were asked to be loaded, in order."""
        return [message.version for _, message in self.sent if isinstance(message, LoadModel)]


def not_finite(batch: RunBatch) -> BatchDone:
    """Every row of it holds NaN."""
    answers = [ItemAnswer(item.item, item.tensors, nonfinite_rows=item.rows) for item in batch.items]
    return BatchDone(batch.batch, answers, now_s(), 0.0, 0.001, sum(item.rows for item in batch.items))


def given_up(batch: RunBatch, code: str = "not_ready", text: str = "the model was evicted") -> BatchDone:
    """Every item of it failed."""
    answers = [ItemAnswer(item.item, [], Failure(code, text)) for item in batch.items]
    return BatchDone(batch.batch, answers, now_s(), 0.0, 0.0, 0)


class World:
    """One gateway's core."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.root = settings, settings.repository
        models, broken = served_models(settings)
        self.arena = Arena.create(1 << 20)
        self.metrics, cost = Metrics(), CostModel()
        self.routing = Routing(models, broken)
        self.router = Workers()
        self.workers = self.router.client = WorkerClient(self.router, welcome)  # type: ignore[arg-type]  # a fake with the port's names
        self.dispatch = Dispatcher(Batcher(cost.predict), cost, self.workers, InFlight[Work](), settings.worker)
        leases = Leases(self.arena, 1024, settings.worker.staged_batches + 1)
        self.processes = Pool()
        self.readiness = Readiness(self.routing)
        self.pool = PoolClient(self.processes, InFlight[PoolJob](), self.readiness.pipeline_opened)  # type: ignore[arg-type]  # a fake
        self.admission = Admission(settings.admission)
        door = Door(self.admission, Forecast(1, self.routing), Quarantine())
        self.flow = Flow(door, self.routing, leases, self.pool, self.dispatch, self.metrics)
        self.generation = self.flow.generation = Generation(self.workers, settings.worker, self.metrics.drops)
        self.row_caps = RowCaps(self.routing.models, self.dispatch.configure)
        self.workers.connect([self.row_caps, self.dispatch, self.generation, self.readiness])
        self.dispatch.drops = self.metrics.drops
        self.dispatch.slots_back = self.pool.slots_back = leases.pump
        leases.nobody_comes = self.dispatch.kick
        self.cost = cost
        knit = Knit(
            self.admission, cost, self.dispatch, self.flow, self.metrics, self.pool, self.readiness, self.workers
        )
        self.lives = Lives(settings, self.routing, knit, self.row_caps.forget)
        self.readiness.connect(self.flow, dict)
        self.control, self.versions = self.lives.control, self.lives.versions
        self.control.start(models)
        self.lives.begin(self.control, leads=True)

    def greet(self, name: str = "worker-0") -> Worker:
        """A worker comes, and takes messages."""
        greeting = self.workers.on_hello(Hello(PROTOCOL_VERSION, 1, name, "cpu"), 1)
        assert isinstance(greeting, Welcome), greeting
        self.workers.on_message(greeting.identity, WorkerReady())
        return next(worker for worker in self.workers.workers() if worker.name == name)

    async def until(self, what: str, condition: Callable[[], object]) -> None:
        """Give the loop turns until this holds."""
        until_s = now_s() + LIMIT_S
        while not condition():
            assert now_s() <= until_s, f"waited {LIMIT_S} s for {what}; {self.phases()}"
            await asyncio.sleep(0.0005)  # turns of the loop, and time for threads that read the disk

    async def ready(self) -> None:
        """All versions are, or will be when somebody asks."""
        answers = {"ready", "on_demand"}
        await self.until("all models", lambda: {model.state.phase for model in self.routing.models()} <= answers)

    def phases(self) -> dict[str, tuple[str, str]]:
        """By version: role and phase."""
        return {model.version: (model.state.role, model.state.phase) for model in self.routing.models()}

    def roles(self, name: str = NAME) -> dict[str, str]:
        """By version: what it is to its model."""
        return {model.version: model.state.role for model in self.routing.of(name)}

    def model(self, version: str, name: str = NAME) -> ServedModel:
        """One version."""
        return next(model for model in self.routing.of(name) if model.version == version)

    def current(self, name: str = NAME) -> ServedModel:
        """Who answers."""
        split = self.routing.split(name)
        assert split is not None, name
        return split.current

    def on_disk(self, name: str = NAME) -> Traffic:
        """What traffic.json says."""
        return Repository(self.root).traffic(name)

    async def order(self, order: Order, by: str = "admin", name: str = NAME) -> Traffic:
        """As an admin's."""
        async with asyncio.timeout(LIMIT_S):
            return await self.control.order(name, order, by)

    def request(self, word: bytes = b"word", **fields: object) -> Request:
        """One row."""
        raw = RawInput(kind="tensors", tensors=(RawTensor("x", "UINT8", (1, len(word)), memoryview(word)),))
        now = now_s()
        given: dict[str, object] = {"model": NAME, "version": "", "request_id": "id", "options": {}} | fields
        return Request(inputs=[raw], deadline_s=now + LIMIT_S, arrived_s=now, nbytes=len(word), **given)  # type: ignore[arg-type]  # fields by name

    async def answer(self, word: bytes = b"word", **fields: object) -> Answer:
        """Of a request."""
        async with asyncio.timeout(LIMIT_S):
            return await self.flow.answer(self.request(word, **fields))

    def close(self) -> None:
        """Leave nothing to the loop."""
        if self.dispatch._timer is not None:
            self.dispatch._timer.cancel()
        self.arena.close()


@asynccontextmanager
async def world(root: Path, **groups: object) -> AsyncIterator[World]:
    """A gateway over this repository, its worker greeted and its models ready."""
    made = World(Settings(repository=root, **groups))  # type: ignore[arg-type]  # groups by name
    try:
        made.greet()
        await made.ready()
        yield made
    finally:
        made.close()
