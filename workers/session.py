"""One gateway's life as the worker sees it: what it asks for, its batches that wait, and the answers to it.

Nothing here ever waits: a gateway that takes no messages must not hold up the others.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, TypeAlias

from shared.arena import AttachedArena
from shared.board import Board, Doing
from shared.clock import Clock
from shared.errors import Code
from shared.generation_messages import CancelJobs, Generate, Generated, Piece
from shared.handover import Greeting
from shared.logs import get_logger
from shared.messages import (
    BatchDone,
    CancelItems,
    Failure,
    FromWorker,
    KeepModels,
    LoadModel,
    ModelEvicted,
    ModelFailed,
    ModelNote,
    RunBatch,
    ToWorker,
    UnloadModel,
    WorkerReady,
)
from shared.model_config import revision_of
from shared.transport import SEND_LIMIT_S, Dealer, FrameTooBig
from workers.engine import refuse_all
from workers.jobs import Inbox
from workers.loaded import Key, LoadedVersion
from workers.model_pool import ModelPool, News
from workers.replies import instead_of, loaded_message

HIGH_WATER_MARK = 256
"""Messages queued each way. The gateway has at most a few batches outstanding; the rest is cancellations, which may
pile up during one long batch."""

_log = get_logger()


class Link(NamedTuple):
    """What ties a worker to one gateway's life."""

    worker: str
    """Our name."""
    greeting: Greeting
    dealer: Dealer[ToWorker, FromWorker]
    arena: AttachedArena
    board: Board


class Session:
    """Messages are drained before each batch, so that a cancellation overtakes the batches that wait."""

    def __init__(self, link: Link, pool: ModelPool, clock: Clock) -> None:
        """Says that it is ready, as soon as there is a connection."""
        self.link = link
        self.cancelled: set[int] = set()
        """Items of waiting batches whose callers have left."""
        self.inbox = Inbox()
        """Prompts that wait to be taken up."""
        self.wanted_by_others: Callable[[], set[Key]] = set
        """The versions that other gateways have asked for: they stay, whatever this one lets go."""
        self._pool = pool
        self._clock = clock
        self._models: dict[int, Key] = {}
        """The gateway's numbers, also of versions that are not loaded at present; another gateway has others."""
        self._pins: set[int] = set()
        self._awaited: dict[Key, list[int]] = {}
        self._batches: deque[RunBatch] = deque()
        self._unsent: deque[FromWorker] = deque([WorkerReady()])
        self._unsent_since_s = clock()
        self._lost = False

    def alive(self) -> bool:
        """False once the gateway is gone, or has taken no message for long."""
        return not self._lost and self.link.greeting.gateway_alive()

    def drain(self) -> None:
        """Take in what the gateway has said, and say what could not be said before."""
        while (message := self.link.dealer.receive(0)) is not None:
            self._handle(message)
        if self._unsent:
            self._flush()

    @property
    def is_waiting_to_send(self) -> bool:
        """Whether there is something to say that the gateway can't take now."""
        return bool(self._unsent)

    def _handle(self, message: ToWorker) -> None:
        match message:
            case RunBatch():
                self._queue(message)
            case CancelItems(items=items):
                # Only what waits can be cancelled; what is answered already must not be remembered for ever.
                waiting = {item.item for batch in self._batches for item in batch.items}
                self.cancelled.update(waiting.intersection(items))
            case KeepModels(models=models):
                self._pool.keep({Key(*model) for model in models} | self.wanted_by_others())
                if (memory := self._pool.memory()) is not None:
                    self._send(memory)
            case LoadModel():
                self._load(message)
            case UnloadModel(model=model):
                self._unload(model)
            case Generate():
                self._generate(message)
            case CancelJobs(jobs=jobs):
                self.inbox.cancel(jobs)

    # -------------------------------------------------------------- batches

    def next(self, apart: Collection[LoadedVersion] = ()) -> tuple[LoadedVersion, RunBatch] | None:
        """The first batch that waits for none of the versions `apart`; None when there is none.

        Batches of models that are not loaded are answered.
        """
        for batch in list(self._batches):
            loaded = self.version(batch.model)
            if loaded is None:
                self._batches.remove(batch)
                self._refuse(batch)
            elif loaded not in apart:
                return loaded, batch
        return None

    def begin(self, batch: RunBatch) -> None:
        """One that `next` has given waits no longer."""
        self._batches.remove(batch)

    def queued(self) -> set[Key]:
        """The versions that batches wait for."""
        return {self._models[batch.model] for batch in self._batches if batch.model in self._models}

    def version(self, model: int) -> LoadedVersion | None:
        """The loaded version behind one of the gateway's numbers."""
        key = self._models.get(model)
        return None if key is None else self._pool.get(key)

    def _queue(self, batch: RunBatch) -> None:
        """A version that is being given up runs only what was there before: it would never fall idle."""
        key = self._models.get(batch.model)
        if key is None or self._pool.takes(key):
            self._batches.append(batch)
        else:
            self._refuse(batch)

    def _refuse(self, batch: RunBatch) -> None:
        self.answer(batch, refuse_all(batch, Code.NOT_READY, "the model is not loaded", self._clock()))

    def answer(self, batch: RunBatch, done: BatchDone) -> None:
        """A batch is done with."""
        self.cancelled.difference_update(item.item for item in batch.items)
        self._send(done)

    def _generate(self, message: Generate) -> None:
        key = self._models.get(message.model)
        if key is not None and self._pool.takes(key):
            self.inbox.add(key, message)
        else:
            self.say([Piece(message.job, failure=Failure(Code.NOT_READY, "the model is not loaded"))])

    def say(self, pieces: list[Piece]) -> None:
        """Parts of texts."""
        self.inbox.ended(pieces)
        self._send(Generated(pieces))

    def doing(self, doing: Doing) -> None:
        """For the gateway to see, whatever happens next."""
        self.link.board.write(self.link.worker, doing)

    # -------------------------------------------------------------- models

    def wanted(self) -> Iterable[Key]:
        """Versions that this gateway has asked for."""
        return self._models.values()

    def pinned(self) -> set[Key]:
        """Those of them that it wants kept, whatever else is asked for."""
        return {self._models[model] for model in self._pins}

    def waiting(self) -> set[Key]:
        """Those of them with a batch or a prompt that waits."""
        return self.queued().union(self.inbox.keys())

    def tell(self, news: News) -> None:
        """Versions have been loaded, or have failed to, or were given up."""
        for key, outcome in news.finished:
            for model in self._awaited.pop(key, ()):
                if isinstance(outcome, Failure):
                    self._send(ModelFailed(model, outcome))
                else:
                    self._send(loaded_message(model, outcome))
        for key in news.evicted:
            for model in self._numbers(key):
                self._send(ModelEvicted(model))
        if news.memory is not None:
            self._send(news.memory)

    def note(self, loaded: LoadedVersion) -> None:
        """A version runs differently from now on."""
        for model in self._numbers(loaded.key):
            self._send(ModelNote(model, *manner(loaded)))

    def _numbers(self, key: Key) -> list[int]:
        return [model for model, each in self._models.items() if each == key]

    def _load(self, message: LoadModel) -> None:
        key = Key(message.name, message.version, revision_of(message.config))
        self._models[message.model] = key
        if message.pinned:
            self._pins.add(message.model)
        else:
            self._pins.discard(message.model)
        loaded = self._pool.get(key)
        if loaded is not None and self._pool.takes(key):
            self._send(loaded_message(message.model, loaded))
            return
        self._awaited.setdefault(key, []).append(message.model)
        self._pool.want(key, message.config)

    def _unload(self, model: int) -> None:
        self._pins.discard(model)
        key = self._models.pop(model, None)
        if key is None or key in self._models.values():
            return
        self._awaited.pop(key, None)
        if key not in self.wanted_by_others():
            self._pool.drop(key)

    # -------------------------------------------------------------- sending

    def _send(self, message: FromWorker) -> None:
        """In order, now or when the gateway takes messages again."""
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._unsent_since_s = self._clock()
            self._flush()

    def _flush(self) -> None:
        while self._unsent and self._sent(self._unsent[0]):
            self._unsent_since_s = self._clock()
        if self._unsent and self._clock() - self._unsent_since_s > SEND_LIMIT_S:
            _log.warning("gateway lost", reason=f"it took no message for {SEND_LIMIT_S:g} s")
            self._lost = True

    def _sent(self, message: FromWorker) -> bool:
        """Whether the first that waits has gone, or has been replaced by what may go."""
        try:
            if not self.link.dealer.try_send(message):
                return False
            self._unsent.popleft()
        except FrameTooBig as error:
            others = instead_of(message)
            if not others:
                raise
            if isinstance(message, BatchDone):  # outputs that should have had slots
                _log.error("an answer is too big for a message", batch=message.batch, reason=str(error))
            self._unsent.popleft()
            self._unsent.extendleft(reversed(others))
        return True

    def __repr__(self) -> str:
        return f"<Session models={len(self._models)} batches={len(self._batches)} awaited={len(self._awaited)}>"


Manner: TypeAlias = tuple[str, int | None]


def manner(loaded: LoadedVersion) -> Manner:
    """How it runs: what a ModelNote tells."""
    return loaded.precision, loaded.row_cap
