"""Pool processes and workers in virtual time, behind the names of the real ones; each takes as long as a test says.

Inputs and outputs lie in the arena, as they really do.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from gateway.pool_processes import OnLost, OnMessage
from gateway.worker_client import Worker, WorkerClient
from shared.arena import Arena
from shared.errors import Code
from shared.messages import (
    BatchDone,
    BatchItem,
    CancelItems,
    Failure,
    Finished,
    FinishJob,
    FromPool,
    ItemAnswer,
    JobFailed,
    OpenPipeline,
    PoolReady,
    Prepared,
    PrepareJob,
    RunBatch,
    ToPool,
    ToWorker,
)
from shared.results import Text
from shared.tensors import SlotRef, Tensor, as_array

NBYTES = 64
"""Of an input, a tensor and an output."""
POISON = b"poison"
"""Words that begin so end the worker that runs them."""
RESTART_S = 0.05
"""Until a lost worker is back."""

Cost = Callable[[int, int], float]
"""Seconds of a batch: (model, rows)."""


class Ran(NamedTuple):
    """A batch that a worker computed, or a part of it that was still wanted."""

    model: int
    started_s: float
    done_s: float
    rows: int


class VirtualPool:
    """Pool processes with the port's names; each works on one job after the other."""

    def __init__(self, processes: int, prepare_s: Callable[[], float], arena: Arena) -> None:
        self._arena = arena
        self._prepare_s = prepare_s
        self._jobs: dict[bytes, deque[PrepareJob | FinishJob]] = {
            f"pool-{number}.1".encode(): deque() for number in range(processes)
        }
        self._timers: dict[bytes, asyncio.TimerHandle] = {}
        self._lives = 1
        self.started: list[PrepareJob | FinishJob] = []
        """In the order in which processes began with them."""
        self._on_message: OnMessage = lambda _i, _m: None
        self._on_lost: OnLost = lambda _i: None

    def connect(self, on_message: OnMessage, on_lost: OnLost) -> None:
        self._on_message, self._on_lost = on_message, on_lost

    def open(self, message: OpenPipeline) -> None:
        """Nothing to build."""

    def ready(self) -> Iterable[bytes]:
        return list(self._jobs)

    def send(self, identity: bytes, message: ToPool) -> bool:
        if not isinstance(message, PrepareJob | FinishJob):
            raise TypeError(message)
        self._jobs[identity].append(message)
        self._next(identity)
        return True

    def kill(self, identity: bytes) -> None:
        """It is gone, and another one in its place."""
        if (timer := self._timers.pop(identity, None)) is not None:
            timer.cancel()
        del self._jobs[identity]
        self._lives += 1
        successor = f"{identity.decode().split('.', maxsplit=1)[0]}.{self._lives}".encode()
        self._jobs[successor] = deque()
        self._on_lost(identity)
        self._on_message(successor, PoolReady())

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _next(self, identity: bytes) -> None:
        if identity in self._timers or not self._jobs[identity]:
            return
        job = self._jobs[identity].popleft()
        self.started.append(job)
        loop = asyncio.get_running_loop()
        spent_s = self._prepare_s() if isinstance(job, PrepareJob) and loop.time() < job.deadline_s else 0.0
        self._timers[identity] = loop.call_later(spent_s, self._done, identity, job, spent_s)

    def _done(self, identity: bytes, job: PrepareJob | FinishJob, spent_s: float) -> None:
        del self._timers[identity]
        self._next(identity)
        self._on_message(identity, self._answer(job, spent_s))

    def _answer(self, job: PrepareJob | FinishJob, spent_s: float) -> FromPool:
        if isinstance(job, FinishJob):
            arrays = [as_array(tensor, self._arena.memory) for tensor in job.tensors]
            return Finished(job.job, [Text(row.tobytes().decode()) for row in arrays[0]])
        if not spent_s:
            return JobFailed(job.job, Failure(Code.DEADLINE_EXCEEDED, "too late to prepare"))
        place, payload = job.slots[0], job.payload
        data = _at(self._arena, payload) if isinstance(payload, SlotRef) else payload
        _at(self._arena, place)[:] = bytes(data)
        return Prepared(job.job, [Tensor("x", "UINT8", (1, NBYTES), place)], b"\x80", spent_s)


class VirtualWorkers:
    """Workers behind a router with the port's names; each runs one batch after the other."""

    def __init__(self, cost: Cost, arena: Arena) -> None:
        self._cost = cost
        self._arena = arena
        self._batches: dict[bytes, deque[RunBatch]] = {}
        self._timers: dict[bytes, asyncio.TimerHandle] = {}
        self._cancelled: set[int] = set()
        self.client: WorkerClient | None = None
        self.ran: list[Ran] = []
        self.sent: list[tuple[bytes, RunBatch]] = []
        self.late: list[BatchItem] = []
        """Items that were sent after their deadline."""
        self.most_held = 0
        self.running: dict[bytes, RunBatch] = {}
        self.suspects: set[int] = set()
        """Items that a worker was running when it died."""
        self.suspects_in_company: list[RunBatch] = []
        self.bad_frames = self.stale_frames = 0
        self.returned: Callable[[str], None] = lambda _: None
        """Told when a lost worker may come back, with its name."""

    def send(self, identity: bytes, message: ToWorker) -> bool:
        held = self._batches.setdefault(identity, deque())
        if isinstance(message, CancelItems):
            waiting = {item.item for batch in held for item in batch.items}
            self._cancelled.update(waiting.intersection(message.items))
        elif isinstance(message, RunBatch):
            now_s = asyncio.get_running_loop().time()
            self.late += [item for item in message.items if item.deadline_s <= now_s]
            self.sent.append((identity, message))
            if len(message.items) > 1 and any(item.item in self.suspects for item in message.items):
                self.suspects_in_company.append(message)
            held.append(message)
            self.most_held = max(self.most_held, len(held) + (identity in self._timers))
            self._next(identity)
        return True

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def die(self, worker: Worker) -> None:
        """With all that it holds; one of the same name comes back."""
        if (timer := self._timers.pop(worker.identity, None)) is not None:
            timer.cancel()
        self._batches.pop(worker.identity, None)
        if (batch := self.running.pop(worker.identity, None)) is not None:
            self.suspects.update(item.item for item in batch.items)
        self._connected().on_lost(worker.identity)
        asyncio.get_running_loop().call_later(RESTART_S, self.returned, worker.name)

    def _connected(self) -> WorkerClient:
        if self.client is None:
            raise TypeError("no client was connected")
        return self.client

    def _next(self, identity: bytes) -> None:
        held = self._batches.get(identity)
        if identity in self._timers or not held:
            return
        batch = held.popleft()
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        wanted = [i for i in batch.items if i.item not in self._cancelled and i.deadline_s > started_s]
        rows = sum(item.rows for item in wanted)
        spent_s = self._cost(batch.model, rows) if wanted else 0.0
        self.running[identity] = batch
        self._timers[identity] = loop.call_later(spent_s, self._done, identity, batch, wanted, started_s)

    def _done(self, identity: bytes, batch: RunBatch, wanted: list[BatchItem], started_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        del self._timers[identity]
        if any(self._word(item).startswith(POISON) for item in wanted):
            worker = next(w for w in self._connected().workers() if w.identity == identity)
            self.die(worker)
            return
        del self.running[identity]
        rows = sum(item.rows for item in wanted)
        if wanted:
            self.ran.append(Ran(batch.model, started_s, now_s, rows))
        answers = [self._answer(item, wanted) for item in batch.items]
        self._cancelled.difference_update(item.item for item in batch.items)
        self._next(identity)
        done = BatchDone(batch.batch, answers, started_s, 0.0, now_s - started_s, rows)
        self._connected().on_message(identity, done)

    def _word(self, item: BatchItem) -> bytes:
        return as_array(item.tensors[0], self._arena.memory).tobytes()

    def _answer(self, item: BatchItem, wanted: list[BatchItem]) -> ItemAnswer:
        if item not in wanted:
            return ItemAnswer(item.item, failure=Failure(Code.CANCELLED, "nobody wants it"))
        place = item.slots[0]
        _at(self._arena, place)[:] = self._word(item)
        return ItemAnswer(item.item, [Tensor("x", "UINT8", (item.rows, NBYTES), place)])


def _at(arena: Arena, place: SlotRef) -> memoryview:
    return arena.memory[place.offset : place.offset + place.nbytes]
