"""The pool's operating-system side: spawns the processes, opens pipelines in them, notices deaths, replaces them."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from gateway.openings import Openings
from gateway.pauses import Pauses
from shared.arena import Arena
from shared.clock import now_s
from shared.logs import get_logger
from shared.messages import (
    ClosePipeline,
    FromPool,
    OpenPipeline,
    PipelineOpened,
    PipelineRefused,
    PoolReady,
    Stop,
    ToPool,
)
from shared.settings import Settings, SupervisorSettings
from shared.supervision import Backoff, Child
from shared.transport import Router

log = get_logger()

OPEN_LIMIT_S = 60.0
"""A pipeline's constructor reads vocabularies and compiles tables; longer than this it hangs."""

OnMessage = Callable[[bytes, FromPool], None]
OnLost = Callable[[bytes], None]


class _Place:
    """One of the N places of the pool; `life` counts the processes that have stood there."""

    def __init__(self, number: int, backoff: Backoff) -> None:
        self.number = number
        self.life = 0
        self.backoff = backoff


class _Process:
    """One living process, known by an identity that is never used again."""

    def __init__(self, place: _Place, identity: bytes, child: Child, predecessor: "_Process | None") -> None:
        self.place = place
        self.identity = identity
        self.child = child
        self.predecessor = predecessor
        """Whom it replaces once it is ready: a planned change leaves no gap."""
        self.successor = False
        self.up = False
        self.retiring = False
        self.opening: dict[int, float] = {}
        """Pipelines that it builds now, since when: meanwhile it gets no job, whose clock would run."""
        self.jobs = 0

    @property
    def ready(self) -> bool:
        """Takes jobs."""
        return self.up and not self.opening and not self.retiring


class PoolProcesses:
    """N places with one process each, or two for a moment while one is replaced as planned."""

    def __init__(self, settings: Settings, config: Path | None, arena: Arena, endpoint: str, generation: int) -> None:
        self._settings = settings
        self._config = config
        self._arena = arena
        self._endpoint = endpoint
        self._generation = generation
        self._router: Router[FromPool, ToPool] = Router(
            endpoint,
            FromPool,
            generation=generation,
            high_water_mark=1024,  # far above the credit of two jobs and one message for each served model
        )
        self.count = settings.pool.processes or os.cpu_count() or 1
        self._processes: dict[bytes, _Process] = {}
        self._models: dict[int, OpenPipeline] = {}
        self._openings = Openings()
        self._timers: set[asyncio.TimerHandle] = set()
        self._stopping = False
        self._all_gone = asyncio.Event()
        self._on_message: OnMessage = lambda _identity, _message: None
        self._on_lost: OnLost = lambda _identity: None

    def connect(self, on_message: OnMessage, on_lost: OnLost) -> None:
        """Who is told of messages, and of processes that died with whatever they held."""
        self._on_message = on_message
        self._on_lost = on_lost

    def start(self) -> None:
        """Spawn all processes; they report ready by message."""
        self._router.start(asyncio.get_running_loop(), self._receive)
        for number in range(self.count):
            self._spawn(_Place(number, _backoff(self._settings.supervisor)))

    def open(self, message: OpenPipeline) -> None:
        """Make every present and future process build this pipeline, one that has jobs after another."""
        self._models[message.model] = message
        self._openings.wanted(message.model)
        self._open_due()

    def close(self, model: int) -> None:
        """No process needs this pipeline any more; none of its jobs is under way."""
        if self._models.pop(model, None) is None:
            return
        self._openings.closed(model)
        for process in self._processes.values():
            process.opening.pop(model, None)
            if process.up:
                self._router.send(process.identity, ClosePipeline(model))
        self._open_due()

    def ready(self) -> Iterable[bytes]:
        """Identities of the processes that take jobs."""
        return [process.identity for process in self._processes.values() if process.ready]

    def send(self, identity: bytes, message: ToPool) -> bool:
        """False when the process can't take it now."""
        return self._router.send(identity, message)

    def kill(self, identity: bytes) -> None:
        """SIGKILL; `on_lost` follows when the kernel reports the death."""
        process = self._processes.get(identity)
        if process is not None:
            process.child.kill()

    def tick(self, pauses: Pauses) -> None:
        """Called a few times a second: kill processes in which a pipeline's constructor hangs."""
        now = now_s()
        for process in list(self._processes.values()):
            stuck = [model for model, since_s in process.opening.items() if pauses.age_s(since_s, now) > OPEN_LIMIT_S]
            if stuck:
                names = ", ".join(self._models[model].name for model in stuck)
                log.error("pipeline hangs while it is built", killed=process.identity.decode(), models=names)
                process.child.kill()

    def describe(self) -> list[dict[str, object]]:
        """For `/debug`."""
        return [
            {
                "process": process.identity.decode(),
                "pid": process.child.pid,
                "ready": process.ready,
                "opening": len(process.opening),
                "jobs": process.jobs,
            }
            for process in self._processes.values()
        ]

    @property
    def bad_frames(self) -> int:
        """Frames dropped because they could not be decoded."""
        return self._router.bad_frames

    @property
    def stale_frames(self) -> int:
        """Frames dropped because they belong to another life of the gateway."""
        return self._router.stale_frames

    async def stop(self, limit_s: float) -> None:
        """Ask all to leave after their present job; kill what is left at the limit."""
        self._stopping = True
        for timer in self._timers:
            timer.cancel()
        self._note_if_all_gone()
        for process in self._processes.values():
            if not (process.up and self._router.send(process.identity, Stop())):
                process.child.terminate()
        try:
            async with asyncio.timeout(limit_s):
                await self._all_gone.wait()
        except TimeoutError:
            for process in self._processes.values():
                process.child.close()
        self._router.close()

    # ------------------------------------------------------------ inside

    def _spawn(self, place: _Place, predecessor: _Process | None = None) -> None:
        place.life += 1
        identity = f"pool-{place.number}.{place.life}".encode()
        argv = [sys.executable, "-P", "-m", "preprocess_pool"]
        argv += ["--config", str(self._config)] if self._config is not None else []
        argv += ["--endpoint", self._endpoint, "--identity", identity.decode()]
        argv += ["--generation", str(self._generation)]
        argv += ["--arena-fd", str(self._arena.fd), "--arena-bytes", str(self._arena.nbytes)]
        try:
            child = Child.spawn(identity.decode(), argv, pass_fds=(self._arena.fd,))
        except OSError as error:  # no process or descriptor to be had just now
            log.error("pool process can't be started", failed=identity.decode(), reason=str(error))  # noqa: TRY400 - foreseen
            if predecessor is None:
                self._later(self._delay_s(place, worked=False), lambda: self._spawn(place))
            return
        place.backoff.started(now_s())
        process = self._processes[identity] = _Process(place, identity, child, predecessor)
        if predecessor is not None:
            predecessor.successor = True
        child.on_exit(asyncio.get_running_loop(), lambda _child, code: self._exited(process, code))

    def _open_due(self) -> None:
        for identity, model in self._openings.due():
            if self._router.send(identity, self._models[model]):
                self._processes[identity].opening[model] = now_s()

    def _receive(self, identity: bytes, message: FromPool) -> None:
        process = self._processes.get(identity)
        if process is None:
            return
        match message:
            case PoolReady():
                process.up = True
                self._openings.came(identity, self._models)
            case PipelineOpened(model=model):
                process.opening.pop(model, None)
                self._openings.built(identity, model)
            case PipelineRefused(model=model):
                process.opening.pop(model, None)
                self._openings.refused(identity, model)
            case _:
                process.jobs += 1
        if process.ready and process.predecessor is not None:
            self._retire(process.predecessor)
            process.predecessor = None
        self._open_due()
        self._tell(identity, message)
        if process.jobs >= self._settings.pool.recycle_jobs:
            self._replace(process)

    def _tell(self, identity: bytes, message: FromPool) -> None:
        """That a pipeline is open is told when a job for it may go to any process that takes jobs."""
        if not isinstance(message, PipelineOpened):
            self._on_message(identity, message)
        for model in self._openings.open():
            self._on_message(identity, PipelineOpened(model))

    def _replace(self, process: _Process) -> None:
        """A planned change, one place at a time: the successor comes first."""
        busy = any(other.predecessor is not None or other.retiring for other in self._processes.values())
        if process.ready and not process.successor and not busy:
            self._spawn(process.place, predecessor=process)

    def _retire(self, process: _Process) -> None:
        process.retiring = True  # what it has is answered before it reads Stop
        self._openings.left(process.identity)
        self._router.send(process.identity, Stop())

    def _exited(self, process: _Process, exit_code: int) -> None:
        self._processes.pop(process.identity, None)
        self._openings.left(process.identity)
        if self._stopping:
            self._note_if_all_gone()
            return
        self._open_due()
        if process.predecessor is not None:
            process.predecessor.successor = False
        if process.retiring and exit_code == 0:
            return
        log.warning("pool process lost", lost=process.identity.decode(), exit_code=exit_code)
        self._on_lost(process.identity)
        replaced = process.successor or process.predecessor is not None
        if not replaced:
            place, worked = process.place, process.up and not process.opening
            self._later(self._delay_s(place, worked=worked), lambda: self._spawn(place))

    def _delay_s(self, place: _Place, *, worked: bool) -> float:
        """Back-off is for processes that can't start. One that worked died of an input: the others need it back."""
        if worked:
            return self._settings.supervisor.backoff_first_ms / 1000
        place.backoff.failed(now_s())
        return place.backoff.next_delay_s(now_s())

    def _note_if_all_gone(self) -> None:
        if not self._processes:
            self._all_gone.set()

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        def run() -> None:
            self._timers.discard(timer)
            action()

        timer = asyncio.get_running_loop().call_later(delay_s, run)
        self._timers.add(timer)


def _backoff(settings: SupervisorSettings) -> Backoff:
    return Backoff(
        first_s=settings.backoff_first_ms / 1000,
        max_s=settings.backoff_max_ms / 1000,
        stable_s=settings.stable_ms / 1000,
    )
