"""Ends workers that live but do not come back from a batch. Asked a few times a second by the dispatcher."""

from gateway.cost_model import CostModel
from gateway.running import RunningBatches
from gateway.worker_client import WorkerClient
from shared.logs import get_logger

SLOWER = 3
"""A batch may take this many times as long as the slowest one of its queue so far, whatever the limit."""

log = get_logger()


class Hangs:
    """Over the connected workers and what they run."""

    def __init__(self, workers: WorkerClient, running: RunningBatches, cost: CostModel, limit_s: float) -> None:
        """`limit_s` is `worker.hang_limit_ms`."""
        self._workers = workers
        self._running = running
        self._cost = cost
        self._limit_s = limit_s

    def kill(self, now_s: float) -> None:
        """Kill each worker whose batch takes far longer than any before it; its supervisor brings a new one."""
        for worker in list(self._workers.workers()):
            running = self._running.running_for_s(worker, now_s)
            if running is None or worker.overran:
                continue
            limit_s = max(self._limit_s, SLOWER * self._cost.slowest(running[0].batch.key))
            if running[1] > limit_s:
                worker.overran = True
                log.error("worker hangs: killed", worker=worker.name, pid=worker.pid, limit_s=limit_s)
                self._workers.kill(worker)
