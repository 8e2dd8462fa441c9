"""The workers, as seen from the gateway: greeting, models they have loaded, batches they hold, their deaths."""

import os
import signal
from collections.abc import Callable, Iterable, Sequence

from shared.board import NOTHING, Board, Doing
from shared.errors import HeadraceError, rebuild
from shared.generation_messages import CancelJobs, Generate, Generated
from shared.logs import get_logger
from shared.messages import (
    BatchDone,
    CancelItems,
    FromWorker,
    Hello,
    KeepModels,
    LoadModel,
    MemoryNote,
    ModelEvicted,
    ModelFailed,
    ModelLoaded,
    ModelNote,
    Refused,
    RunBatch,
    ToWorker,
    UnloadModel,
    Welcome,
    WorkerReady,
)
from shared.model_config import revision_of
from shared.transport import Router

log = get_logger()

MAX_FORGOTTEN = 1024
"""Versions whose late answers are told from others; a worker loads one after another, so far fewer are under way."""


class Worker:
    """One connected worker."""

    def __init__(
        self, identity: bytes, hello: Hello, pid: int, board: Board | None = None, *, is_shared: bool = False
    ) -> None:
        """`board`: where it says what it does. `is_shared`: other gateways send it batches, too."""
        self._board = board
        self.is_shared = is_shared
        self.identity = identity
        self.name = hello.worker
        self.device = hello.device
        self.pid = pid
        self.holder = identity.decode()
        self.ready = False
        self.loaded: set[int] = set()
        """Models that it can run."""
        self.pads: set[int] = set()
        """Those of them whose batches it pads up."""
        self.asked: set[int] = set()
        """Models that it was asked to load on demand, and has not answered yet."""
        self.memory: MemoryNote | None = None
        """As it has told last."""
        self.failed: dict[int, str] = {}
        """Models that it can't load, and why."""
        self.aside = 0
        """Batches of ours that it runs beside the others; as they were, when it has died."""
        self.overran = False
        self.reachable = True
        """False after a batch could not be sent: most likely it is just dying."""

    def doing(self) -> Doing | None:
        """What it does by its own record, true also when it has just died; None when there is none."""
        return self._board.read(self.name) if self._board is not None else None


class WorkerEvents:
    """Who is told. Whoever is derived from it has only what concerns it."""

    def model_loaded(self, worker: Worker, message: ModelLoaded, /) -> None:
        """A version is loaded and warm on this worker."""

    def model_failed(self, worker: Worker, model: int, error: HeadraceError, /) -> None:
        """A version can't be loaded on this worker."""

    def model_noted(self, worker: Worker, message: ModelNote, /) -> None:
        """A worker runs a version differently from now on."""

    def model_evicted(self, worker: Worker, model: int, /) -> None:
        """A worker has given a version up for another one."""

    def batch_done(self, worker: Worker, message: BatchDone, /) -> None:
        """A batch came back."""

    def generated(self, worker: Worker, message: Generated, /) -> None:
        """Texts have grown."""

    def worker_greeted(self, worker: Worker, /) -> None:
        """A worker takes messages; it has been asked to load every served model."""

    def worker_lost(self, worker: Worker, /) -> None:
        """A worker is gone; what it held is in the in-flight table under its `holder`."""


class WorkerClient:
    """Keeps the connected workers; lives on the event loop."""

    def __init__(
        self,
        router: Router[FromWorker, ToWorker],
        welcome: Callable[[bytes], Welcome],
        board: Board | None = None,
        *,
        shared: bool = False,
    ) -> None:
        """`welcome(identity)` makes the greeting of this gateway's life. `shared`: there are other gateways, too."""
        self._board = board
        self._shared = shared
        self._router = router
        self._welcome = welcome
        self._workers: dict[bytes, Worker] = {}
        self._lives = 0
        self._models: dict[int, LoadModel] = {}
        self._forgotten: dict[int, None] = {}
        self._events: list[WorkerEvents] = []

    def connect(self, events: Sequence[WorkerEvents]) -> None:
        """Who is told of what happens."""
        self._events = list(events)

    def serve(self, message: LoadModel) -> None:
        """Every present and future worker loads this version; one that is not pinned only when it is demanded."""
        self._models[message.model] = message
        self._forgotten.pop(message.model, None)
        for worker in self._workers.values():
            worker.failed.pop(message.model, None)
            if worker.ready and message.pinned:
                self._router.send(worker.identity, message)

    def demand(self, model: int) -> None:
        """Every worker that neither has nor was asked for this version loads it; pinned ones were asked before."""
        message = self._models.get(model)
        if message is None or message.pinned:
            return
        for worker in self._workers.values():
            if worker.ready and model not in worker.loaded and model not in worker.asked:
                worker.failed.pop(model, None)
                if self._router.send(worker.identity, message):
                    worker.asked.add(model)

    def forget(self, model: int) -> None:
        """No worker keeps this version any longer."""
        if self._models.pop(model, None) is None:
            return
        self._forgotten[model] = None
        if len(self._forgotten) > MAX_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]
        for worker in self._workers.values():
            worker.loaded.discard(model)
            worker.asked.discard(model)
            worker.pads.discard(model)
            worker.failed.pop(model, None)
            if worker.ready:
                self._router.send(worker.identity, UnloadModel(model))

    def workers(self) -> Iterable[Worker]:
        """Connected workers."""
        return self._workers.values()

    def memory(self) -> list[tuple[str, MemoryNote]]:
        """What each worker has last said of its memory, by name."""
        return [(worker.name, worker.memory) for worker in self._workers.values() if worker.memory is not None]

    def with_model(self, model: int) -> list[Worker]:
        """Workers that can run a batch of this model."""
        return [worker for worker in self._workers.values() if model in worker.loaded]

    def may_get(self, model: int) -> bool:
        """Whether a connected worker may still come to have this model."""
        return any(model not in worker.loaded and model not in worker.failed for worker in self._workers.values())

    def try_unreachable(self) -> bool:
        """Workers that could not be sent a batch may not have been dying after all; False when there are none."""
        unreachable = [worker for worker in self._workers.values() if not worker.reachable]
        for worker in unreachable:
            worker.reachable = True
        return bool(unreachable)

    def send(self, worker: Worker, message: RunBatch | CancelItems | Generate | CancelJobs) -> bool:
        """False when the worker can't take it now."""
        return self._router.send(worker.identity, message)

    def kill(self, worker: Worker) -> None:
        """End a hung worker; its supervisor brings a new one. `worker_lost` follows."""
        try:
            handle = os.pidfd_open(worker.pid)  # no race with a reused pid: its greeting stream is still open
        except ProcessLookupError:
            return
        except OSError as error:  # no descriptor left, or a pid of another namespace
            log.error("hung worker can't be killed", worker=worker.name, reason=str(error))  # noqa: TRY400 - foreseen
            return
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except OSError as error:
            log.error("hung worker can't be killed", worker=worker.name, reason=str(error))  # noqa: TRY400 - foreseen
        finally:
            os.close(handle)

    @property
    def bad_frames(self) -> int:
        """Frames dropped because they could not be decoded."""
        return self._router.bad_frames

    @property
    def stale_frames(self) -> int:
        """Frames dropped because they belong to another life of the gateway."""
        return self._router.stale_frames

    def close(self) -> None:
        """Leave the workers in peace: they keep their models and greet the next gateway."""
        self._router.close()

    # ------------------------------------------------------------ called by the listener and the router

    def on_hello(self, hello: Hello, pid: int) -> Welcome | Refused:
        """Greet a worker that speaks our protocol (the listener has looked), or say why not."""
        if any(worker.name == hello.worker for worker in self._workers.values()):
            return Refused(f"a worker named {hello.worker} is connected already")
        self._lives += 1
        identity = f"{hello.worker}.{self._lives}".encode()
        self._workers[identity] = Worker(identity, hello, pid, self._board, is_shared=self._shared)
        if self._board is not None:
            self._board.write(hello.worker, NOTHING)  # what another life of it has left there
        return self._welcome(identity)

    def on_lost(self, identity: bytes) -> None:
        """The greeting stream closed: the worker is dead or has left."""
        worker = self._workers.pop(identity, None)
        if worker is None:
            return
        log.warning("worker lost", worker=worker.name, pid=worker.pid)
        for events in self._events:
            events.worker_lost(worker)

    def on_message(self, identity: bytes, message: FromWorker) -> None:
        """One message of a worker."""
        worker = self._workers.get(identity)
        if worker is None:
            return  # a message that was on its way when its worker died
        match message:
            case BatchDone():
                self._tell(lambda events: events.batch_done(worker, message))
            case Generated():
                self._tell(lambda events: events.generated(worker, message))
            case WorkerReady():
                worker.ready = True
                served = [(load.name, load.version, revision_of(load.config)) for load in self._models.values()]
                self._router.send(identity, KeepModels(served))
                for load in self._models.values():
                    if load.pinned:
                        self._router.send(identity, load)
                self._tell(lambda events: events.worker_greeted(worker))
            case ModelLoaded() | ModelFailed():
                if message.model not in self._forgotten:  # else its answer and our UnloadModel have crossed
                    self._loaded(worker, message)
            case ModelNote() | ModelEvicted() | MemoryNote():
                self._noted(worker, message)

    def _noted(self, worker: Worker, message: ModelNote | ModelEvicted | MemoryNote) -> None:
        match message:
            case ModelNote():
                self._tell(lambda events: events.model_noted(worker, message))
            case ModelEvicted(model=model):
                worker.loaded.discard(model)
                worker.asked.discard(model)
                self._tell(lambda events: events.model_evicted(worker, model))
            case MemoryNote():
                worker.memory = message

    def _loaded(self, worker: Worker, message: ModelLoaded | ModelFailed) -> None:
        worker.asked.discard(message.model)
        if isinstance(message, ModelLoaded):
            worker.loaded.add(message.model)
            if message.pads:
                worker.pads.add(message.model)
            self._tell(lambda events: events.model_loaded(worker, message))
        else:
            error = rebuild(message.failure.code, message.failure.text)
            worker.failed[message.model] = error.text
            self._tell(lambda events: events.model_failed(worker, message.model, error))

    def _tell(self, what: Callable[[WorkerEvents], None]) -> None:
        for events in self._events:
            what(events)
