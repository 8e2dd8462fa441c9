"""The batches that workers hold: how many each has, when it should be done, and whether it hangs."""

from typing import NamedTuple

from gateway.batcher import Batch
from gateway.worker_client import Worker

NEVER_S = float("-inf")


class Running(NamedTuple):
    """One batch in the hands of a worker."""

    batch: Batch
    worker: Worker
    sent_s: float
    expected_s: float
    """Seconds that the cost model predicted."""


class Ran(NamedTuple):
    """What a worker of this name has run, in all of its lives."""

    batches: int
    rows: int


class _Held:
    """One worker's batches, in the order in which it runs them."""

    __slots__ = ("batches", "progress_s")

    def __init__(self) -> None:
        self.batches: dict[int, Running] = {}
        self.progress_s = NEVER_S
        """When it last answered."""

    def first(self) -> Running | None:
        return next(iter(self.batches.values()), None)

    def started_s(self, running: Running) -> float:
        return max(running.sent_s, self.progress_s)


class RunningBatches:
    """Bookkeeping by worker; a worker runs its batches strictly in order. Used on the event loop only."""

    def __init__(self) -> None:
        self._held: dict[bytes, _Held] = {}
        self._worker_of: dict[int, bytes] = {}
        self.ran: dict[str, Ran] = {}
        """By the workers' names."""

    def add(self, number: int, running: Running) -> None:
        """A batch was sent."""
        identity = running.worker.identity
        self._held.setdefault(identity, _Held()).batches[number] = running
        self._worker_of[number] = identity

    def done(self, number: int, now_s: float, rows_run: int) -> Running | None:
        """A batch was answered; None when it is not known (its worker was given up)."""
        identity = self._worker_of.pop(number, None)
        if identity is None:
            return None
        held = self._held[identity]
        running = held.batches.pop(number)
        held.progress_s = now_s
        name = running.worker.name
        before = self.ran.get(name, Ran(0, 0))
        self.ran[name] = Ran(before.batches + 1, before.rows + rows_run)
        return running

    def lost(self, worker: Worker) -> Running | None:
        """The worker is gone with everything it held; returns the batch that it was running."""
        held = self._held.pop(worker.identity, None)
        if held is None:
            return None
        for number in held.batches:
            del self._worker_of[number]
        return held.first()

    def count(self, worker: Worker) -> int:
        """Batches that the worker holds."""
        held = self._held.get(worker.identity)
        return len(held.batches) if held is not None else 0

    def ends_s(self, worker: Worker) -> float:
        """When the worker should have nothing left to do (monotonic); in the past when it is idle or late."""
        held = self._held.get(worker.identity)
        first = held.first() if held is not None else None
        if held is None or first is None:
            return NEVER_S
        return held.started_s(first) + sum(running.expected_s for running in held.batches.values())

    def load(self, worker: Worker, now_s: float) -> tuple[bool, float]:
        """Sorts workers, the one to be given the next batch first: whether it has work, and until when.

        Of idle workers, the one that has been idle for longest: each one's health shows soon, also while few call. A
        worker whose batch takes longer than predicted is taken to need as long again as it is late already, so that
        one that hangs gets no more work while there are others.
        """
        held = self._held.get(worker.identity)
        first = held.first() if held is not None else None
        if held is None or first is None:
            return False, held.progress_s if held is not None else NEVER_S
        late_s = now_s - held.started_s(first) - first.expected_s
        return True, self.ends_s(worker) + (2 * late_s if late_s > 0 else 0.0)

    def running_for_s(self, worker: Worker, now_s: float) -> tuple[Running, float] | None:
        """The batch that the worker runs now, and for how long already."""
        held = self._held.get(worker.identity)
        first = held.first() if held is not None else None
        if held is None or first is None:
            return None
        return first, now_s - held.started_s(first)

    def __len__(self) -> int:
        return len(self._worker_of)
