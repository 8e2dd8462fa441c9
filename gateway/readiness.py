"""Truthful readiness: a model is ready when a real batch of its example came back through all processes.

Proven at start, after the return of the only worker that has it, and again whenever `PROVE_EVERY_S` passed without a
batch, so that a worker that lives but does nothing is noticed while nobody calls (the batches go to all in turn). Not
while a worker has texts of it: a proof would wait for their end, and one that hangs is found by `generation_hangs`.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from gateway.flow import Flow
from gateway.proof import AtTexts, prove
from gateway.routing import Routing
from gateway.served import ServedModel
from gateway.state import ModelState, Phase
from gateway.worker_client import Worker, WorkerEvents
from shared.clock import now_s
from shared.errors import HeadraceError
from shared.logs import get_logger
from shared.messages import ModelLoaded, ModelNote

log = get_logger()

PROVE_EVERY_S = 5.0
_NEVER_S = float("-inf")
PROVE_AGAIN_S = 300.0
"""At the latest; a failed proof is tried again after 5, 10, 20 … s, since it may cost a pool process each time."""
TRY_AGAIN_S = 10.0
"""A version that is loaded on demand and could not be, for want of memory say, may be asked for again."""


class _OnWorker:
    """What became of the models on one worker; those in neither set are being loaded."""

    __slots__ = ("failed", "loaded")

    def __init__(self) -> None:
        self.loaded: set[int] = set()
        self.failed: set[int] = set()

    def came(self, model: int) -> None:
        self.failed.discard(model)
        self.loaded.add(model)

    def forget(self, model: int) -> None:
        self.failed.discard(model)
        self.loaded.discard(model)


class Readiness(WorkerEvents):
    """Implements `gateway.state.ServerState` and the worker events; lives on the event loop."""

    def __init__(self, routing: Routing, expected_workers: int = 1) -> None:
        """`expected_workers`: until so many have come, a model that failed on all present ones may still be loaded."""
        self._routing = routing
        self._expected_workers = expected_workers
        self._seen: set[str] = set()
        self._describe: Callable[[], dict[str, Any]]
        self._flow: Flow
        self._changed: list[Callable[[], None]] = []
        self._workers: dict[bytes, _OnWorker] = {}
        self._proving: dict[int, asyncio.Task[None]] = {}
        self._pipelines_open: set[int] = set()
        self._failures: dict[int, int] = {}
        self._failed_s: dict[int, float] = {}
        """When loading last failed for good, of those of which it is not tried again yet."""
        self._refused: dict[int, str] = {}
        """Models whose pipeline can't be built, and why: no worker's message changes that."""
        self._draining = False
        self.texts: AtTexts | None = None
        """Knows who is busy with texts; set by the composition."""
        self.greeted: Callable[[], None] = lambda: None
        """Called after a worker has come."""

    def connect(self, flow: Flow, describe: Callable[[], dict[str, Any]]) -> None:
        """The flow that proofs go through; `describe` gives the parts of `/debug` that other objects know."""
        self._flow = flow
        self._describe = describe

    # ------------------------------------------------------------ ServerState

    def models(self) -> list[ModelState]:
        """All served models."""
        return self._routing.states()

    def not_ready_reason(self) -> str | None:
        """None when every served model can answer; else one sentence. Current versions count that are not on trial."""
        if self._draining:
            return "the server is stopping"
        for state in self.models():
            # A request for one that can't be loaded on demand must not make the whole server unready for the others.
            by_request = state.on_demand and state.phase != "no_worker"
            counts = state.role == "current" and not state.on_trial
            if counts and not (state.phase in {"ready", "unloaded"} or by_request):
                return f"model {state.name!r} is not ready: {state.reason}"
        return None

    def debug(self) -> dict[str, Any]:
        """Everything that helps to see what the server does now."""
        reason = self.not_ready_reason()
        return {"ready": reason is None, "reason": reason, **self._describe()}

    def subscribe(self, changed: Callable[[], None]) -> None:
        """Call `changed` after every change."""
        self._changed.append(changed)

    def unsubscribe(self, changed: Callable[[], None]) -> None:
        """The other end of `subscribe`."""
        self._changed.remove(changed)

    # ------------------------------------------------------------ events

    def drain(self) -> None:
        """The server takes no new work: not ready from now on."""
        self._draining = True
        self.notify()

    def pipeline_opened(self, number: int, failure: HeadraceError | None) -> None:
        """A pool process built the model's pipeline, or can't."""
        model = self._routing.get(number)
        if model is None or number in self._pipelines_open:
            return
        if failure is not None:
            self._refused[number] = failure.text
            self._set(model, "failed", failure.text)
            return
        self._refused.pop(number, None)
        self._pipelines_open.add(number)
        self._maybe_prove(model)

    def worker_greeted(self, worker: Worker) -> None:
        """Loading starts."""
        self._workers[worker.identity] = _OnWorker()
        self._seen.add(worker.name)
        for model in self._routing.models():
            if model.state.phase != "unloaded" and not self._loaded_somewhere(model):
                self._without_worker(model)
        self.greeted()

    def model_loaded(self, worker: Worker, message: ModelLoaded) -> None:
        """Loaded and warm; not ready before a batch has come back."""
        self._workers.setdefault(worker.identity, _OnWorker()).came(message.model)
        model = self._routing.get(message.model)
        if model is None or model.state.phase == "unloaded":
            return
        self._failed_s.pop(message.model, None)
        model.state.precision, model.state.row_cap = message.precision, message.row_cap
        model.state.memory_bytes = message.memory_bytes
        model.state.load_s, model.state.stages_s = message.load_s, message.stages_s
        if model.state.phase != "ready":
            self._set(model, "proving", "a first batch is on its way")
            self._maybe_prove(model)

    def model_failed(self, worker: Worker, model: int, error: HeadraceError) -> None:
        """The version can't be loaded on this worker; failed only when no other one has it or may still load it."""
        self._workers.setdefault(worker.identity, _OnWorker()).failed.add(model)
        failed = self._routing.get(model)
        if failed is None or self._loaded_somewhere(failed):
            return
        here = all(model in on_worker.failed for on_worker in self._workers.values())
        hopeless = here and len(self._seen) >= self._expected_workers
        if hopeless:
            self._failed_s[model] = now_s()
        self._set(failed, "failed" if hopeless else "loading", error.text)

    def model_evicted(self, worker: Worker, model: int) -> None:
        """A version that is loaded on demand made room for another one."""
        self._workers.setdefault(worker.identity, _OnWorker()).forget(model)
        evicted = self._routing.get(model)
        if evicted is not None and evicted.state.phase != "unloaded" and not self._loaded_somewhere(evicted):
            self._set(evicted, "on_demand", ON_DEMAND)

    def model_noted(self, _worker: Worker, message: ModelNote) -> None:
        """How the model runs now; with several workers, on the one that spoke last."""
        model = self._routing.get(message.model)
        if model is not None:
            model.state.precision, model.state.row_cap = message.precision, message.row_cap

    def worker_lost(self, worker: Worker) -> None:
        """Models that no other worker has are not ready."""
        self._workers.pop(worker.identity, None)
        for model in self._routing.models():
            if model.state.phase != "unloaded" and not self._loaded_somewhere(model):
                self._without_worker(model)

    def unloaded(self, model: ServedModel, reason: str) -> None:
        """The version was taken out of service; that does not make the server not ready."""
        for on_worker in self._workers.values():
            on_worker.forget(model.number)
        self._set(model, "unloaded", reason)

    def wanted(self, model: ServedModel) -> None:
        """The version is to be loaded."""
        others = bool(self._workers)
        self._failed_s.pop(model.number, None)
        self._set(model, "loading" if others else "no_worker", _LOADING if others else NO_WORKER)

    def load_failed(self, model: ServedModel) -> bool:
        """Whether no worker could load it, and none is trying."""
        return model.number in self._failed_s

    def forget(self, number: int) -> None:
        """The version is gone for good."""
        self._pipelines_open.discard(number)
        self._failures.pop(number, None)
        self._failed_s.pop(number, None)
        self._refused.pop(number, None)

    def _without_worker(self, model: ServedModel) -> None:
        """No worker has it: pinned versions are being loaded, the others will be when somebody asks."""
        if model.pinned or not self._workers:
            self.wanted(model)
        else:
            self._set(model, "on_demand", ON_DEMAND)

    def tick(self) -> None:
        """Called a few times a second: prove again what has been silent for long."""
        now = now_s()
        for model in self._routing.models():
            # One that may be given up is not kept in use by proofs: it was proven when it was loaded.
            is_silent = model.state.phase == "ready" and model.pinned and now - model.proven_s > PROVE_EVERY_S
            if is_silent and not (self.texts is not None and self.texts.has_texts(model)):
                self._maybe_prove(model)
        lapsed = [number for number, since_s in self._failed_s.items() if now - since_s > TRY_AGAIN_S]
        for model in filter(None, map(self._routing.get, lapsed)):
            if not model.pinned:  # those are tried again by orders, and by a new worker
                del self._failed_s[model.number]
                if model.state.phase == "failed":
                    self._without_worker(model)

    # ------------------------------------------------------------ proofs

    def _maybe_prove(self, model: ServedModel) -> None:
        if model.number in self._proving or not self._loaded_somewhere(model):
            return
        if model.number not in self._pipelines_open:
            return
        self._proving[model.number] = asyncio.get_running_loop().create_task(self._prove(model))

    async def _prove(self, model: ServedModel) -> None:
        began_s, proven_before = now_s(), model.proven_s > _NEVER_S
        proof = await prove(self._flow, model)
        self._proving.pop(model.number, None)  # at once: a load that ends in the same turn needs a proof of its own
        if not self._loaded_somewhere(model) or model.state.phase == "unloaded":
            return  # its worker was lost meanwhile: that is the reason now
        # What came back meanwhile has been through all processes, too.
        if proof.failure is None or (proof.is_late and proven_before and model.proven_s > began_s):
            self._failures.pop(model.number, None)
            self._set(model, "ready", "")
            return
        if proof.is_late and proven_before and self._is_busy(model, began_s):  # busy is not failed
            asyncio.get_running_loop().call_later(PROVE_EVERY_S, self._maybe_prove, model)
            return
        failures = self._failures[model.number] = self._failures.get(model.number, 0) + 1
        self._set(model, "failed", proof.failure)
        delay_s = min(PROVE_EVERY_S * 2 ** min(failures - 1, 10), PROVE_AGAIN_S)
        asyncio.get_running_loop().call_later(delay_s, self._maybe_prove, model)

    def _is_busy(self, model: ServedModel, since_s: float) -> bool:
        texts = self.texts
        return texts is not None and (texts.has_texts(model) or texts.has_stepped(model, since_s))

    def _loaded_somewhere(self, model: ServedModel) -> bool:
        return any(model.number in on_worker.loaded for on_worker in self._workers.values())

    def _set(self, model: ServedModel, phase: Phase, reason: str) -> None:
        state = model.state
        if model.number in self._refused and phase != "unloaded":
            phase, reason = "failed", self._refused[model.number]
        if (state.phase, state.reason) == (phase, reason):
            return
        log.info("model state", model=model.name, version=model.version, phase=phase, reason=reason)
        state.phase, state.reason = phase, reason
        if phase == "ready":
            state.on_trial = False
        self.notify()

    def notify(self) -> None:
        """Tell everybody who has subscribed that something has changed."""
        for changed in list(self._changed):
            changed()


NO_WORKER = "no worker is connected yet (`headrace serve` starts one, `make run-worker` too)"
_LOADING = "a worker is loading it"
ON_DEMAND = "the next request loads it"
