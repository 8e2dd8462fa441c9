"""The part of the composition about the lives of versions: what brings them in, compares them and takes them out."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from gateway.admission import Admission
from gateway.batcher import Batch
from gateway.collect import Results
from gateway.cost_model import CostModel
from gateway.demand import Demand
from gateway.dispatch import Dispatcher
from gateway.flow import Flow
from gateway.generation_job import is_repeatable
from gateway.judge import Judge
from gateway.metrics import MeasuredRequest, Metrics
from gateway.model_control import ModelControl
from gateway.orders import Order
from gateway.pool_client import PoolClient
from gateway.readiness import Readiness
from gateway.request import Request
from gateway.reuse import Reuse
from gateway.routing import Routing
from gateway.running import Running
from gateway.served import ServedModel
from gateway.shadows import Shadows
from gateway.versions import Versions
from gateway.watch import Watch
from gateway.worker_client import WorkerClient
from shared.errors import Code, NotReady
from shared.logs import get_logger
from shared.messages import BatchDone
from shared.settings import Settings
from shared.traffic import Traffic

log = get_logger()


class Knit(NamedTuple):
    """What the composition has made already, and what a version's life touches."""

    admission: Admission
    cost: CostModel
    dispatch: Dispatcher
    flow: Flow
    metrics: Metrics
    pool: PoolClient
    readiness: Readiness
    workers: WorkerClient


class Orders(Protocol):
    """Where traffic is ordered: at this gateway alone, or at all of them."""

    def order(self, name: str, order: Order, by: str) -> Awaitable[Traffic]:
        """Raises HeadraceError."""


class Lives:
    """Wired; begins nothing by itself."""

    def __init__(self, settings: Settings, routing: Routing, knit: Knit, forget: Callable[[int], None]) -> None:
        """`forget(number)`: whoever else remembers something of a version, until it is gone for good."""
        self._settings = settings
        self._routing = routing
        self._metrics, self._readiness = knit.metrics, knit.readiness
        self.versions = Versions(settings, routing, knit.dispatch, knit.pool, knit.workers)
        self.versions.connect(knit.readiness, [forget, knit.flow.generation.forget])
        self.versions.gone = knit.metrics.forget
        self.judge = Judge(settings.guard, settings.gateway.processes, knit.cost.predict)
        knit.metrics.judged = self._judged
        self.control = ModelControl(settings, routing, self.versions)
        self.control.pointed, self.control.changed = self.judge.pointed, knit.readiness.notify
        self.control.told = self.judge.figures
        self.shadows = Shadows(knit.admission, self.judge, knit.flow.all)
        self.reuse = Reuse(settings.cache)
        knit.flow.reuse, knit.flow.answered = self.reuse, self._answered
        parked, generation = knit.dispatch.parked, knit.flow.generation
        self.demand = Demand(
            knit.workers,
            knit.readiness.wanted,
            lambda: parked.models() | generation.models(),
            settings.worker.return_limit_ms / 1000,
        )
        knit.readiness.subscribe(self.demand.changed)
        knit.readiness.subscribe(self._look_at_canaries)
        knit.readiness.greeted = self.demand.again
        knit.flow.load, parked.wanted, generation.lobby.wanted = self._load, self.demand.load, self.demand.load
        self.versions.withdrawn = generation.withdraw
        knit.dispatch.on_batch, knit.dispatch.on_lost = self._batch_came, self._worker_lost
        self.judge.busy = lambda: map(knit.dispatch.running.busy, knit.workers.workers())
        self.watch: Watch

    def begin(self, orders: Orders, *, leads: bool) -> None:
        """Who takes orders is known now; `leads`: whether ramps are this gateway's affair."""
        self.judge.order = orders.order
        self.watch = Watch(self._settings.repository, self.control, orders.order, leads=leads)
        self.watch.has_evidence = self.judge.has_evidence

    def _look_at_canaries(self) -> None:
        """One that its worker's successor can't load is ended, as soon as the current version is there again."""
        for model in self.judge.canaries():
            if self._readiness.load_failed(model):
                self.judge.unloadable(model)

    async def _load(self, model: ServedModel) -> None:
        try:
            await self.demand.ready(model)
        except NotReady:
            self.judge.unloadable(model)
            raise

    def _judged(self, measured: MeasuredRequest, outcome: Code | None, seconds: float) -> None:
        try:
            self.judge.answered(measured, outcome, seconds)
        except Exception:  # a bug here must not fail a request that is answered, and counted so
            log.exception("an answer could not be judged")

    def _batch_came(self, model: ServedModel, batch: Batch, done: BatchDone, nobody: int) -> None:
        self._metrics.batch(model, batch, done, nobody)
        self.judge.ran(model, batch, done)

    def _worker_lost(self, lost: list[Running]) -> None:
        for each in lost:
            model = self._routing.get(each.batch.key.model)
            if model is not None:
                try:
                    self.judge.lost_worker(model, each.batch)
                except Exception:  # a bug here must not keep the worker's items from their second try
                    log.exception("a lost worker could not be judged")

    def _answered(self, model: ServedModel, request: Request, results: Results) -> None:
        """Before an answer leaves: the request's copy for a shadow."""
        split = self._routing.split(model.name)
        if split is None or not split.shadow or model is not split.current or request.version:
            return
        if model.pipeline.generates and not is_repeatable(request.options):
            return  # two texts that are drawn differ, whatever the versions
        shadow = split.copies(split.key(request.routing_key, request.request_id))
        if shadow is not None:
            self.shadows.copy(shadow, request, results)
