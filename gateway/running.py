"""The batches that workers hold: how many each has, when it should be done, and whether it hangs."""

from collections.abc import Callable
from typing import NamedTuple

from gateway.batcher import Batch, QueueKey
from gateway.worker_client import Worker
from shared.board import ELSEWHERE
from shared.messages import BatchDone

NEVER_S = float("-inf")
LEARN = 0.2
"""Weight of the newest batch in what others' batches take in between: they come and go within a few batches."""


class Running(NamedTuple):
    """One batch in the hands of a worker."""

    batch: Batch
    worker: Worker
    sent_s: float
    expected_s: float
    """Seconds that the cost model predicted."""
    aside: bool = False
    """It proves a version, beside the others: it does not keep the worker from taking batches."""


class Busy(NamedTuple):
    """What a worker that holds batches of ours does."""

    key: QueueKey | None
    """The queue of the batch that it runs, or should have begun; None: it works for another gateway."""
    since_s: float
    """When it began (monotonic)."""


class Ran(NamedTuple):
    """What a worker of this name has run, in all of its lives."""

    batches: int
    rows: int


class _Held:
    """One worker's batches, in the order in which it runs them."""

    __slots__ = ("aside", "aside_progress_s", "batches", "others_s", "progress_s")

    def __init__(self) -> None:
        self.batches: dict[int, Running] = {}
        self.aside: dict[int, Running] = {}
        """Those that run beside them, one after another."""
        self.progress_s = self.aside_progress_s = NEVER_S
        """When it last answered."""
        self.others_s = 0.0
        """How long a batch of ours, first in the row, waits while those of other gateways run: a moving average."""

    def first(self) -> Running | None:
        return next(iter(self.batches.values()), None)

    def first_free(self) -> Running | None:
        """The first that may run: what a version has aside is ahead of its batches in the row."""
        proving = {running.batch.key.model for running in self.aside.values()}
        return next((each for each in self.batches.values() if each.batch.key.model not in proving), None)

    def started_s(self, running: Running) -> float:
        """When it was first in our row."""
        return max(running.sent_s, self.progress_s)

    def waited(self, running: Running, started_s: float) -> None:
        waited_s = max(0.0, started_s - self.started_s(running))
        self.others_s += LEARN * (waited_s - self.others_s)


class RunningBatches:
    """Bookkeeping by worker, which runs its batches strictly in order, but for those aside. On the event loop only."""

    def __init__(self) -> None:
        self._held: dict[bytes, _Held] = {}
        self._worker_of: dict[int, bytes] = {}
        self.ran: dict[str, Ran] = {}
        """By the workers' names."""

    def add(self, number: int, running: Running) -> None:
        """A batch was sent."""
        identity = running.worker.identity
        held = self._held.setdefault(identity, _Held())
        (held.aside if running.aside else held.batches)[number] = running
        running.worker.aside = len(held.aside)
        self._worker_of[number] = identity

    def done(self, message: BatchDone, now_s: float) -> Running | None:
        """A batch was answered; None when it is not known (its worker was given up)."""
        identity = self._worker_of.pop(message.batch, None)
        if identity is None:
            return None
        held = self._held[identity]
        running = held.aside.pop(message.batch, None)
        if running is not None:
            running.worker.aside, held.aside_progress_s = len(held.aside), now_s
        else:
            running = held.batches.pop(message.batch)
            if running.worker.is_shared:
                held.waited(running, message.started_s)
            held.progress_s = now_s
        name = running.worker.name
        before = self.ran.get(name, Ran(0, 0))
        self.ran[name] = Ran(before.batches + 1, before.rows + message.rows_run)
        return running

    def lost(self, worker: Worker) -> list[Running]:
        """The worker is gone with everything it held; returns the batches of ours that it was running."""
        held = self._held.pop(worker.identity, None)
        if held is None:
            return []
        for number in (*held.batches, *held.aside):
            del self._worker_of[number]
        doing = worker.doing()
        in_row = held.first() if doing is None else held.batches.get(doing.batch)
        return [*held.aside.values(), *([] if in_row is None else [in_row])]

    def aside(self, worker: Worker) -> Busy | None:
        """The batch that the worker runs beside the others, since when it was the first of those; None: there is none.

        They run one at a time, so that only the first can hang.
        """
        held = self._held.get(worker.identity)
        first = next(iter(held.aside.values()), None) if held is not None else None
        if held is None or first is None:
            return None
        return Busy(first.batch.key, max(first.sent_s, held.aside_progress_s))

    def count(self, worker: Worker) -> int:
        """Batches that the worker holds."""
        held = self._held.get(worker.identity)
        return len(held.batches) if held is not None else 0

    def models(self) -> set[int]:
        """Models of which a worker holds a batch."""
        return {
            running.batch.key.model
            for held in self._held.values()
            for running in (*held.batches.values(), *held.aside.values())
        }

    def ends_s(self, worker: Worker) -> float:
        """When the worker should have nothing left to do (monotonic); in the past when it is idle or late."""
        held = self._held.get(worker.identity)
        first = held.first() if held is not None else None
        if held is None or first is None:
            return NEVER_S
        expected_s = sum(running.expected_s for running in held.batches.values())
        return held.started_s(first) + expected_s + held.others_s * len(held.batches)

    def starts_s(self, worker: Worker, now_s: float) -> float:
        """When the next batch for this worker should begin to run."""
        held = self._held.get(worker.identity)
        return max(now_s, self.ends_s(worker)) + (held.others_s if held is not None else 0.0)

    def with_others(self, alone: Callable[[int], float]) -> Callable[[int], float]:
        """Rows → seconds of a batch, from those on a worker of its own: what other gateways run meanwhile is added."""
        return lambda rows: alone(rows) + self.others_s()

    def others_s(self) -> float:
        """Seconds of other gateways' batches between two of ours, on average over the workers."""
        held = self._held  # asked several times for each request: `statistics.fmean` took 6 µs of it
        return sum([each.others_s for each in held.values()]) / len(held) if held else 0.0

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
        late_s = now_s - held.started_s(first) - first.expected_s - held.others_s
        return True, self.ends_s(worker) + (2 * late_s if late_s > 0 else 0.0)

    def busy(self, worker: Worker) -> Busy | None:
        """What the worker does now, by its own record if there is one; None when it has to do nothing of ours."""
        held = self._held.get(worker.identity)
        if held is None or not held.batches:
            return None
        doing = worker.doing()
        if doing is not None and doing.batch == ELSEWHERE:
            return Busy(None, doing.since_s)
        running = held.batches.get(doing.batch) if doing is not None else None
        began_s = doing.since_s if doing is not None else NEVER_S
        if running is None:
            running, began_s = held.first_free(), max(began_s, held.aside_progress_s)
        if running is None:
            return None
        # Batch and time are not written at once: the time may be of the batch before.
        return Busy(running.batch.key, max(held.started_s(running), began_s))

    def __len__(self) -> int:
        return len(self._worker_of)
