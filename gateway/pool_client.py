"""The preprocess pool, as seen from the gateway: one queue, N supervised processes, each job exactly one answer.

A process has at most two jobs: the one it works on and one staged behind it, so that it never waits for the gateway.
When a process dies, its first job is a suspect and gets one more try; the staged one is not blamed. Both are tried
again alone in a process: the first one's answer may have died with it, and then the staged one was the cause. A job
over `pool.job_limit_ms` loses its process and is answered as the input's fault.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

from gateway.inflight import Entry, InFlight
from gateway.line import Line
from gateway.pauses import Pauses
from gateway.pool_processes import PoolProcesses
from gateway.request import DEFAULT_PRIORITY
from shared.arena import Slot
from shared.clock import now_s
from shared.errors import (
    DeadlineExceeded,
    HeadraceError,
    InternalFault,
    InvalidInput,
    Poison,
    TooLarge,
    rebuild,
)
from shared.logs import get_logger
from shared.messages import (
    Finished,
    FinishJob,
    FromPool,
    JobFailed,
    OpenPipeline,
    PipelineOpened,
    PipelineRefused,
    PoolReady,
    Prepared,
    PrepareJob,
)
from shared.transport import FrameTooBig

log = get_logger()

FOR_NOBODY_S = 0.5
"""How long a pool job may go on after its caller has left: about what a new process costs."""
CREDIT = 2  # one running, one staged: the process never idles for a round trip, and a death concerns one job at most

Answered: TypeAlias = Prepared | Finished
Opened: TypeAlias = Callable[[int, HeadraceError | None], None]

FINISH_FIRST, PREPARE = 0, 1  # finished rows leave before new ones come in: they hold memory and a waiting caller


class PoolJob:
    """One job and the future of its answer."""

    __slots__ = ("alone", "deaths", "future", "message", "overran", "priority", "queued_s", "slots")

    def __init__(
        self,
        message: PrepareJob | FinishJob,
        slots: Sequence[Slot],
        future: "asyncio.Future[Answered]",
        queued_s: float,
    ) -> None:
        self.message = message
        self.slots = slots
        self.future = future
        self.queued_s = queued_s
        self.deaths = 0
        self.alone = False
        """Was in a process that died: takes no other job with it from now on."""
        self.overran = False
        self.priority = DEFAULT_PRIORITY


class PoolClient:
    """Queues jobs, sends them to free processes and hands answers back; lives on the event loop."""

    def __init__(self, processes: PoolProcesses, inflight: InFlight[PoolJob], opened: Opened) -> None:
        """`opened(model, failure)` is told once per model when its pipeline was built in a process, or was refused."""
        self._processes = processes
        self._inflight = inflight
        self._opened = opened
        self._queue: Line[PoolJob] = Line(_has_left)
        self._next_job = 1
        self.slots_back: Callable[[], None] = lambda: None
        """Called after slots of a request that had left came back."""
        self.lost_processes = 0
        self.expired = 0
        processes.connect(self._on_message, self._on_lost)

    def open(self, message: OpenPipeline) -> None:
        """Make every present and future process build this pipeline."""
        self._processes.open(message)

    def close(self, model: int) -> None:
        """Nobody needs this pipeline any more; none of its jobs is under way."""
        self._processes.close(model)

    def submit(
        self, message: PrepareJob | FinishJob, slots: Sequence[Slot], priority: int = DEFAULT_PRIORITY
    ) -> "asyncio.Future[Answered]":
        """Queue a job; the future gets its answer or a HeadraceError. Cancelling the future drops the job."""
        future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        message.job = self._next_job
        self._next_job += 1
        job = PoolJob(message, slots, future, now_s())
        job.priority = priority
        self._push(job)
        self._pump()
        return future

    def waiting(self) -> int:
        """Jobs that no process has yet."""
        return len(self._queue)

    def tick(self, limit_s: float, pauses: Pauses) -> None:
        """Called a few times a second: kill processes whose present job has taken longer than `limit_s`.

        A job whose caller has left gets half a second: starting a process anew is cheaper than finishing for nobody
        what keeps everybody waiting.
        """
        now = now_s()
        for identity in self._processes.ready():
            entry = self._inflight.oldest(_holder(identity))
            if entry is None or entry.job.overran:
                continue
            allowed_s = min(limit_s, FOR_NOBODY_S) if entry.job.future.done() else limit_s
            if pauses.age_s(entry.sent_s, now) > allowed_s:
                entry.job.overran = True
                log.warning("pool job over its limit", killed=_holder(identity), limit_s=allowed_s)
                self._processes.kill(identity)

    def _push(self, job: PoolJob) -> None:
        kind = PREPARE if isinstance(job.message, PrepareJob) else FINISH_FIRST
        self._queue.push((kind, job.priority, job.message.deadline_s, job.message.job), job)

    def _pump(self) -> None:
        while (job := self._queue.first()) is not None:  # who has left meanwhile is never started
            identity = self._freest(1 if job.alone else CREDIT)
            if identity is None:
                return
            self._queue.pop()
            now = now_s()
            if now >= job.message.deadline_s:
                self.expired += 1
                job.future.set_exception(DeadlineExceeded("the deadline passed before preparation started"))
                continue
            try:
                sent = self._processes.send(identity, job.message)
            except FrameTooBig:
                text = "the input is larger than one message between the server's processes can be"
                job.future.set_exception(TooLarge(text))
                continue
            if not sent:  # its queue is full or it is just dying
                self._push(job)
                return
            self._inflight.add(job.message.job, job, _holder(identity), job.slots, now)

    def _freest(self, most: int) -> bytes | None:
        """The process with the fewest jobs, below `most`; none behind one that travels alone."""
        best, least = None, most
        for identity in self._processes.ready():
            holder = _holder(identity)
            held = self._inflight.count(holder)
            if held < least and not (held and self._travels_alone(holder)):
                best, least = identity, held
        return best

    def _travels_alone(self, holder: str) -> bool:
        present = self._inflight.oldest(holder)
        return present is not None and present.job.alone

    def _on_message(self, _identity: bytes, message: FromPool) -> None:
        match message:
            case Prepared() | Finished():
                self._settle(message.job, message)
            case JobFailed():
                self._settle(message.job, rebuild(message.failure.code, message.failure.text))
            case PoolReady():
                pass  # it takes jobs once its pipelines are open
            case PipelineOpened():
                self._opened(message.model, None)
            case PipelineRefused():
                self._opened(message.model, rebuild(message.failure.code, message.failure.text))
        self._pump()

    def _settle(self, number: int, outcome: Answered | HeadraceError) -> None:
        entry = self._inflight.answered(number)
        if entry is None:
            return
        self._restart_clock(entry.holder)
        if entry.job.future.done():
            self.slots_back()
        elif isinstance(outcome, HeadraceError):
            entry.job.future.set_exception(outcome)
        else:
            entry.job.future.set_result(outcome)

    def _restart_clock(self, holder: str) -> None:
        following = self._inflight.oldest(holder)
        if following is not None:
            following.sent_s = now_s()  # the staged job starts only now

    def _on_lost(self, identity: bytes) -> None:
        """A process died: its jobs are tried once more, except those whose fault it seems to be."""
        self.lost_processes += 1
        entries = self._inflight.lost(_holder(identity))
        for position, entry in enumerate(entries):
            self._after_death(entry, suspect=position == 0)
        self.slots_back()
        self._pump()

    def _after_death(self, entry: Entry[PoolJob], *, suspect: bool) -> None:
        job = entry.job
        if job.future.done():
            return
        job.deaths += suspect
        job.alone = True
        if job.overran:
            job.future.set_exception(InvalidInput("the input took longer to process than pool.job_limit_ms allows"))
        elif job.deaths > 1:
            job.future.set_exception(_blame(job.message))
        else:
            self._push(job)


def _has_left(job: PoolJob) -> bool:
    return job.future.done()


def _blame(message: PrepareJob | FinishJob) -> HeadraceError:
    if isinstance(message, PrepareJob):
        return Poison("the input ended two processes that tried to decode it")
    return InternalFault()


def _holder(identity: bytes) -> str:
    return identity.decode()
