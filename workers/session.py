"""One gateway's life as the worker sees it: from the greeting until its stream ends or this process is to stop."""

from collections import deque
from collections.abc import Callable

from shared.arena import AttachedArena
from shared.child import StopSignal
from shared.clock import Clock
from shared.errors import Code, InternalFault
from shared.handover import Greeting
from shared.logs import get_logger
from shared.messages import (
    BatchDone,
    CancelItems,
    Failure,
    FromWorker,
    KeepModels,
    LoadModel,
    ModelFailed,
    ModelLoaded,
    ModelNote,
    RunBatch,
    ToWorker,
    UnloadModel,
    WorkerReady,
)
from shared.transport import Dealer, FrameTooBig, PeerLost
from workers.engine import refuse_all, run_batch
from workers.model_pool import Key, LoadedVersion, ModelPool

HIGH_WATER_MARK = 256
"""Messages queued each way. The gateway has at most a few batches outstanding; the rest is cancellations, which may
pile up during one long batch."""

_log = get_logger()


class Session:
    """Messages are drained before each batch, so that a cancellation overtakes the batches that wait."""

    def __init__(
        self,
        greeting: Greeting,
        dealer: Dealer[ToWorker, FromWorker],
        arena: AttachedArena,
        pool: ModelPool,
        clock: Clock,
    ) -> None:
        self._greeting = greeting
        self._dealer = dealer
        self._arena = arena
        self._pool = pool
        self._clock = clock
        self._models: dict[int, Key] = {}
        """The gateway's numbers; another gateway has others."""
        self._awaited: dict[Key, list[int]] = {}
        self._batches: deque[RunBatch] = deque()
        self._cancelled: set[int] = set()
        self.worked: Callable[[], None] = lambda: None
        """Called after each batch that computed something."""

    def serve(self, stop: StopSignal) -> None:
        """Answer until the gateway is gone or a stop is asked for. Raises DeviceLost."""
        try:
            self._dealer.send(WorkerReady())
            while self._wanted(stop):
                self._drain()
                self._report_loaded()
                if not self._wanted(stop):
                    return
                if self._batches:
                    self._run(self._batches.popleft())
                else:
                    self._wait(stop)
        except PeerLost as lost:
            _log.warning("gateway lost", reason=str(lost))

    def _wanted(self, stop: StopSignal) -> bool:
        return not stop.requested and self._greeting.gateway_alive()

    def _drain(self) -> None:
        while (message := self._dealer.receive(0)) is not None:
            self._handle(message)

    def _wait(self, stop: StopSignal) -> None:
        """Sleep until there is a message, a loaded model, a signal, or no gateway any more."""
        message = self._dealer.receive(None, (self._greeting.fileno(), stop.fileno(), self._pool.fileno()))
        if message is not None:
            self._handle(message)

    def _handle(self, message: ToWorker) -> None:
        match message:
            case RunBatch():
                self._batches.append(message)
            case CancelItems(items=items):
                # Only what waits can be cancelled; what is answered already must not be remembered for ever.
                waiting = {item.item for batch in self._batches for item in batch.items}
                self._cancelled.update(waiting.intersection(items))
            case KeepModels(models=models):
                self._pool.keep({Key(name, version) for name, version in models})
            case LoadModel():
                self._load(message)
            case UnloadModel(model=model):
                self._unload(model)

    # -------------------------------------------------------------- batches

    def _run(self, batch: RunBatch) -> None:
        key = self._models.get(batch.model)
        loaded = None if key is None else self._pool.get(key)
        if loaded is None:
            done = refuse_all(batch, Code.NOT_READY, "the model is not loaded", self._clock())
        else:
            before = _manner(loaded)
            done = run_batch(batch, loaded, self._arena, self._clock, self._cancelled)
            if _manner(loaded) != before:
                self._note(loaded)
        self._cancelled.difference_update(item.item for item in batch.items)
        self._send_done(batch, done)

    def _note(self, loaded: LoadedVersion) -> None:
        for model, key in self._models.items():
            if key == loaded.key:
                self._dealer.send(ModelNote(model, *_manner(loaded)))

    def _send_done(self, batch: RunBatch, done: BatchDone) -> None:
        try:
            self._dealer.send(done)
            if done.rows_run:
                self.worked()
        except FrameTooBig as error:  # outputs that should have had slots; each item still gets its answer
            _log.error("an answer is too big for a message", batch=batch.batch, reason=str(error))
            self._dealer.send(refuse_all(batch, Code.INTERNAL, InternalFault.TEXT, done.started_s))

    # -------------------------------------------------------------- models

    def _load(self, message: LoadModel) -> None:
        key = Key(message.name, message.version)
        self._models[message.model] = key
        loaded = self._pool.get(key)
        if loaded is not None:
            self._dealer.send(_loaded_message(message.model, loaded))
            return
        self._awaited.setdefault(key, []).append(message.model)
        self._pool.want(key)

    def _unload(self, model: int) -> None:
        key = self._models.pop(model, None)
        if key is not None and key not in self._models.values():
            self._awaited.pop(key, None)
            self._pool.drop(key)

    def _report_loaded(self) -> None:
        for key, outcome in self._pool.finished():
            for model in self._awaited.pop(key, ()):
                if isinstance(outcome, Failure):
                    self._dealer.send(ModelFailed(model, outcome))
                else:
                    self._dealer.send(_loaded_message(model, outcome))

    def __repr__(self) -> str:
        return f"<Session models={len(self._models)} batches={len(self._batches)} awaited={len(self._awaited)}>"


def _manner(loaded: LoadedVersion) -> tuple[str, int | None]:
    """How it runs: what a ModelNote tells."""
    return loaded.precision, loaded.row_cap


def _loaded_message(model: int, loaded: LoadedVersion) -> ModelLoaded:
    runner = loaded.runner
    return ModelLoaded(
        model, loaded.batch_s, runner.memory_bytes, loaded.precision, loaded.load_s, runner.pads, loaded.row_cap
    )
