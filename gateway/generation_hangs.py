"""Ends workers that live but bring no text any further. Asked a few times a second by the driver of generation."""

from collections.abc import Callable

from gateway.generation_job import Job
from gateway.generation_lobby import Lobby
from gateway.inflight import InFlight
from gateway.pauses import Pauses
from gateway.worker_client import Worker, WorkerClient
from shared.board import ELSEWHERE, IDLE, Doing
from shared.logs import get_logger

SLOWER = 3
"""What is expected may take so many times as long, whatever the limit."""
FOREIGN = 2
"""Where other gateways send it work, too, it may be at theirs, and that is theirs to judge: we do it later."""
_NO_BATCH = (IDLE, ELSEWHERE)

log = get_logger()


class Hangs:
    """Over the connected workers and the texts that they have.

    A worker says what it does by its record (`shared.board`), anew for each step, and by the pieces that it sends.
    Silent in both for longer than a step may take, or another gateway's batch, it hangs. One that is at a batch of ours
    is left to `gateway.hangs`. Without a record only pieces tell: a whole prompt, or a beam search, may bring none.
    """

    def __init__(self, workers: WorkerClient, held: InFlight[Job], lobby: Lobby, limit_s: float) -> None:
        """`limit_s` is `worker.hang_limit_ms`."""
        self._workers = workers
        self._held = held
        self._lobby = lobby
        self._limit_s = limit_s
        self._heard_s: dict[bytes, float] = {}
        self.slowest_s: Callable[[], float] = lambda: 0.0
        """Seconds of the slowest batch of all; the composition says how it is asked for."""

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
            if doing is not None and doing.batch not in _NO_BATCH:
                continue
            since_s = max(
                oldest.sent_s, self._heard_s.get(worker.identity, 0.0), doing.since_s if doing is not None else 0.0
            )
            limit_s = self._limit_of(worker, doing)
            if pauses.age_s(since_s, now_s) > limit_s:
                worker.overran = True
                log.error("worker hangs: killed", worker=worker.name, pid=worker.pid, limit_s=limit_s)
                self._workers.kill(worker)

    def _limit_of(self, worker: Worker, doing: Doing | None) -> float:
        paces = ((self._lobby.of(job.model).pace, job.ticket) for job in self._held.of(worker.holder))
        if doing is None:
            quiet_s = max(pace.quiet_s(ticket) for pace, ticket in paces)
        else:
            quiet_s = max(pace.beat_s for pace, _ in paces)
        if not worker.is_shared:
            return max(self._limit_s, SLOWER * quiet_s)
        return FOREIGN * max(self._limit_s, SLOWER * max(quiet_s, self.slowest_s()))
