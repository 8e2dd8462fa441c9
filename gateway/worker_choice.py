"""Which worker is offered the next batch, and from when on it takes one. Asked by the dispatcher on the event loop.

Of several workers that have a model, its next batch goes to the one that should be done first: an idle one before all
others, of two idle ones the one that has been idle for longest.
"""

from collections.abc import Iterator
from math import ceil

from gateway.running import NEVER_S, RunningBatches
from gateway.worker_client import Worker, WorkerClient

AT_ANSWER_S = float("inf")
STAGE_LEAD_S = 0.002
"""A batch is staged this long before the running one should end: about two loop turns."""
LONGEST_SLEEP_S = 0.25
SHORTEST_SLEEP_S = 0.001
ROUNDING_MS = 1e-6
"""Differences of times are this much off at most."""


class WorkerChoice:
    """Over the connected workers and what they hold."""

    def __init__(self, workers: WorkerClient, running: RunningBatches, staged_batches: int) -> None:
        """`staged_batches`: how many one worker may hold."""
        self._workers = workers
        self._running = running
        self._staged_batches = staged_batches

    def offers(self, now_s: float) -> Iterator[tuple[Worker, set[int], bool]]:
        """Workers with credit in the order in which they are to be asked, each with the models that it may be given.

        A busy worker is asked only for what no worker before it has: that one will be free sooner, so it is worth
        waiting for, and only with it a deadline counts as missed. The third value says whether only a full batch may
        go to the worker yet.
        """
        offered: set[int] = set()
        for worker in sorted(self._workers.workers(), key=lambda worker: self._running.load(worker, now_s)):
            if not worker.reachable:
                continue
            models = worker.loaded - offered if self._running.count(worker) else worker.loaded
            if models and self._has_credit(worker):
                yield worker, models, self._opens_s(worker) > now_s
            offered |= worker.loaded

    def sleep_s(self, now_s: float, due_s: float) -> float:
        """How long nothing can change without an event, when the batcher's next decision is due at `due_s`.

        Whole milliseconds: uvloop's timers round to them, so that what is due in less than half of one would be looked
        at again and again. The leads of this file and of the batcher cover what that is late.
        """
        opens = [self._opens_s(worker) for worker in self._workers.workers() if worker.loaded and worker.reachable]
        wake_s = max(due_s, min(opens, default=NEVER_S))  # nothing can be sent before a worker is about to be free
        wake_s = min([wake_s, *(open_s for open_s in opens if open_s > now_s)])  # what is ready may be staged then
        sleep_s = min(wake_s - now_s, LONGEST_SLEEP_S)  # the difference may be infinite
        return max(1, ceil(sleep_s * 1e3 - ROUNDING_MS)) / 1e3 if sleep_s > 0 else SHORTEST_SLEEP_S

    def _has_credit(self, worker: Worker) -> bool:
        return self._running.count(worker) < self._staged_batches

    def _opens_s(self, worker: Worker) -> float:
        """From when on the worker takes a batch that is not full."""
        if not self._running.count(worker):
            return NEVER_S
        return self._running.ends_s(worker) - STAGE_LEAD_S if self._has_credit(worker) else AT_ANSWER_S
