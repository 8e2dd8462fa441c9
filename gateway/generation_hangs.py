"""Ends workers that live but bring no text any further. Asked a few times a second by the driver of generation."""

from gateway.generation_job import Job
from gateway.generation_lobby import Lobby
from gateway.inflight import InFlight
from gateway.pauses import Pauses
from gateway.worker_client import Worker, WorkerClient
from shared.logs import get_logger

SLOWER = 3
"""What is expected may take so many times as long, whatever the limit."""
FOREIGN = 2
"""Where other gateways send it work, too, it may be at theirs, and that is theirs to judge: we do it later."""

log = get_logger()


class Hangs:
    """Over the connected workers and the texts that they have.

    A worker says what it does by its record (`shared.board`), and by the pieces that it sends. Silent in both for
    longer than a step with its longest prompt may take, it hangs.
    """

    def __init__(self, workers: WorkerClient, held: InFlight[Job], lobby: Lobby, limit_s: float) -> None:
        """`limit_s` is `worker.hang_limit_ms`."""
        self._workers = workers
        self._held = held
        self._lobby = lobby
        self._limit_s = limit_s
        self._heard_s: dict[bytes, float] = {}

    def heard(self, worker: Worker, now_s: float) -> None:
        """Pieces came."""
        self._heard_s[worker.identity] = now_s

    def forget(self, worker: Worker) -> None:
        """It is gone."""
        self._heard_s.pop(worker.identity, None)

    def kill(self, now_s: float, pauses: Pauses) -> None:
        """Kill each worker that hangs; its supervisor brings a new one."""
        for worker in list(self._workers.workers()):
            oldest = self._held.oldest(worker.holder)
            if oldest is None or worker.overran:
                continue
            doing = worker.doing()
            since_s = max(
                oldest.sent_s, self._heard_s.get(worker.identity, 0.0), doing.since_s if doing is not None else 0.0
            )
            limit_s = max(self._limit_s, SLOWER * self._quiet_s(worker)) * (FOREIGN if worker.is_shared else 1)
            if pauses.age_s(since_s, now_s) > limit_s:
                worker.overran = True
                log.error("worker hangs: killed", worker=worker.name, pid=worker.pid, limit_s=limit_s)
                self._workers.kill(worker)

    def _quiet_s(self, worker: Worker) -> float:
        """How long the texts that it has may be expected to bring no piece."""
        return max(self._lobby.of(job.model).pace.quiet_s(job.ticket) for job in self._held.of(worker.holder))
