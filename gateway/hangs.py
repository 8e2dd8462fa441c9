"""Ends workers that live but do not come back from a batch. Asked a few times a second by the dispatcher."""

from collections.abc import Iterator

from gateway.cost_model import CostModel, QueueKey
from gateway.pauses import Pauses
from gateway.running import RunningBatches
from gateway.worker_client import Worker, WorkerClient
from shared.logs import get_logger

SLOWER = 3
"""A batch may take this many times as long as the slowest one of its queue so far, whatever the limit."""

FOREIGN = 2
"""A batch of another gateway is that gateway's to judge: we do it only for one that does not, later."""

ASIDE = 10
"""What runs aside may take so many times as long: it has a lower priority than the rest, and nobody waits for it."""

log = get_logger()


class Hangs:
    """Over the connected workers and what they run."""

    def __init__(self, workers: WorkerClient, running: RunningBatches, cost: CostModel, limit_s: float) -> None:
        """`limit_s` is `worker.hang_limit_ms`."""
        self._workers = workers
        self._running = running
        self._cost = cost
        self._limit_s = limit_s

    def kill(self, now_s: float, pauses: Pauses) -> None:
        """Kill each worker whose batch takes far longer than any before it; its supervisor brings a new one."""
        for worker in list(self._workers.workers()):
            if worker.overran:
                continue
            for since_s, limit_s in self._judged(worker):
                if pauses.age_s(since_s, now_s) > limit_s:
                    worker.overran = True
                    log.error("worker hangs: killed", worker=worker.name, pid=worker.pid, limit_s=limit_s)
                    self._workers.kill(worker)
                    break

    def _judged(self, worker: Worker) -> Iterator[tuple[float, float]]:
        """What it does beside the row of its batches, and in it: since when, and how long it may."""
        aside = self._running.aside(worker)
        if aside is not None:
            # Those of other gateways may be ahead of it.
            yield aside.since_s, self._limit_of(aside.key) * ASIDE * (FOREIGN if worker.is_shared else 1)
        busy = self._running.busy(worker)
        if busy is not None:
            yield busy.since_s, self._limit_of(busy.key)

    def _limit_of(self, key: QueueKey | None) -> float:
        if key is not None:
            return max(self._limit_s, SLOWER * self._cost.slowest(key))
        return FOREIGN * max(self._limit_s, SLOWER * slowest_s(self._cost))


def slowest_s(cost: CostModel) -> float:
    """Seconds of the slowest batch of all; 0.0 before the first one."""
    return max((cost.slowest(known) for known in cost.keys()), default=0.0)  # noqa: SIM118 - no dict
