"""The batches that workers hold: how many each has, when it should be done, and whether it hangs."""

from typing import NamedTuple

from gateway.batcher import Batch
from gateway.worker_client import Worker


class Running(NamedTuple):
    """One batch in the hands of a worker."""

    batch: Batch
    worker: Worker
    sent_s: float
    expected_s: float
    """Seconds that the cost model predicted."""


class RunningBatches:
    """Bookkeeping by batch number; a worker runs its batches strictly in order. Used on the event loop only."""

    def __init__(self) -> None:
        self._batches: dict[int, Running] = {}
        self._progress_s: dict[bytes, float] = {}

    def add(self, number: int, running: Running) -> None:
        """A batch was sent."""
        self._batches[number] = running

    def done(self, number: int, now_s: float) -> Running | None:
        """A batch was answered; None when it is not known (its worker was given up)."""
        running = self._batches.pop(number, None)
        if running is not None:
            self._progress_s[running.worker.identity] = now_s
        return running

    def lost(self, worker: Worker) -> None:
        """The worker is gone with everything it held."""
        for number in [number for number, running in self._batches.items() if running.worker is worker]:
            del self._batches[number]
        self._progress_s.pop(worker.identity, None)

    def count(self, worker: Worker) -> int:
        """Batches that the worker holds."""
        return sum(1 for running in self._batches.values() if running.worker is worker)

    def ends_s(self, worker: Worker) -> float:
        """When the worker should have nothing left to do (monotonic); in the past when it is idle or late."""
        held = [running for running in self._batches.values() if running.worker is worker]
        if not held:
            return float("-inf")
        return self._started_s(held[0]) + sum(running.expected_s for running in held)

    def running_for_s(self, worker: Worker, now_s: float) -> tuple[Running, float] | None:
        """The batch that the worker runs now, and for how long already."""
        for running in self._batches.values():
            if running.worker is worker:
                return running, now_s - self._started_s(running)
        return None

    def _started_s(self, running: Running) -> float:
        return max(running.sent_s, self._progress_s.get(running.worker.identity, 0.0))

    def __len__(self) -> int:
        return len(self._batches)
