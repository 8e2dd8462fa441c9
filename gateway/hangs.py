"""Ends workers that live but do not come back from a batch. Asked a few times a second by the dispatcher."""

from gateway.cost_model import CostModel, QueueKey
from gateway.pauses import Pauses
from gateway.running import Busy, RunningBatches
from gateway.worker_client import Worker, WorkerClient
from shared.logs import get_logger

SLOWER = 3
"""A batch may take this many times as long as the slowest one of its queue so far, whatever the limit."""

FOREIGN = 2
"""A batch of another gateway is that gateway's to judge: we do it only for one that does not, later."""

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
            for busy in self._busy(worker):
                limit_s = self._limit_of(busy.key)
                if pauses.age_s(busy.since_s, now_s) > limit_s:
                    worker.overran = True
                    log.error("worker hangs: killed", worker=worker.name, pid=worker.pid, limit_s=limit_s)
                    self._workers.kill(worker)
                    break

    def _busy(self, worker: Worker) -> list[Busy]:
        """What it does in the row of its batches, and beside it."""
        aside = [Busy(running.batch.key, running.sent_s) for running in self._running.aside(worker)]
        busy = self._running.busy(worker)
        return aside if busy is None else [*aside, busy]

    def _limit_of(self, key: QueueKey | None) -> float:
        if key is not None:
            return max(self._limit_s, SLOWER * self._cost.slowest(key))
        slowest_s = max((self._cost.slowest(known) for known in self._cost.keys()), default=0.0)  # noqa: SIM118 - no dict
        return FOREIGN * max(self._limit_s, SLOWER * slowest_s)
