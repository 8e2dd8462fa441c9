"""The pool's operating-system side: spawns the processes, notices deaths, replaces them with back-off."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from shared.arena import Arena
from shared.clock import now_s
from shared.logs import get_logger
from shared.messages import FromPool, PoolReady, Stop, ToPool
from shared.settings import Settings, SupervisorSettings
from shared.supervision import Backoff, Child
from shared.transport import Router

log = get_logger()

OnMessage = Callable[[bytes, FromPool], None]
OnLost = Callable[[bytes], None]


class _Place:
    """One of the N places of the pool; `life` counts the processes that have stood there."""

    def __init__(self, number: int, backoff: Backoff) -> None:
        self.number = number
        self.life = 0
        self.jobs = 0
        self.ready = False
        self.child: Child | None = None
        self.backoff = backoff

    @property
    def identity(self) -> bytes:
        return f"pool-{self.number}.{self.life}".encode()


class PoolProcesses:
    """N places; each has at most one living process at a time, known by an identity that is never used again."""

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
            high_water_mark=64,  # far above the credit of two jobs
        )
        self.count = settings.pool.processes or os.cpu_count() or 1
        self._places = [_Place(number, _backoff(settings.supervisor)) for number in range(self.count)]
        self._by_identity: dict[bytes, _Place] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._stopping = False
        self._all_gone = asyncio.Event()
        self._on_message: OnMessage = lambda _identity, _message: None
        self._on_lost: OnLost = lambda _identity: None

    def connect(self, on_message: OnMessage, on_lost: OnLost) -> None:
        """Who is told of messages and deaths."""
        self._on_message = on_message
        self._on_lost = on_lost

    def start(self) -> None:
        """Spawn all processes; they report ready by message."""
        self._router.start(asyncio.get_running_loop(), self._receive)
        for place in self._places:
            self._spawn(place)

    def ready(self) -> Iterable[bytes]:
        """Identities of the processes that take jobs."""
        return [place.identity for place in self._places if place.ready]

    def send(self, identity: bytes, message: ToPool) -> bool:
        """False when the process can't take it now."""
        return self._router.send(identity, message)

    def kill(self, identity: bytes) -> None:
        """SIGKILL; `on_lost` follows when the kernel reports the death."""
        place = self._by_identity.get(identity)
        if place is not None and place.child is not None:
            place.child.kill()

    def describe(self) -> list[dict[str, object]]:
        """For `/debug`."""
        return [
            {
                "process": place.identity.decode(),
                "pid": place.child.pid if place.child else None,
                "ready": place.ready,
                "jobs": place.jobs,
            }
            for place in self._places
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
        for place in self._places:
            if not (place.ready and self._router.send(place.identity, Stop())) and place.child is not None:
                place.child.terminate()
        try:
            async with asyncio.timeout(limit_s):
                await self._all_gone.wait()
        except TimeoutError:
            for place in self._places:
                if place.child is not None:
                    place.child.close()
        self._router.close()

    def _spawn(self, place: _Place) -> None:
        place.life += 1
        place.jobs = 0
        identity = place.identity
        argv = [sys.executable, "-m", "preprocess_pool"]
        argv += ["--config", str(self._config)] if self._config is not None else []
        argv += ["--endpoint", self._endpoint, "--identity", identity.decode()]
        argv += ["--generation", str(self._generation)]
        argv += ["--arena-fd", str(self._arena.fd), "--arena-bytes", str(self._arena.nbytes)]
        place.child = Child.spawn(identity.decode(), argv, pass_fds=(self._arena.fd,))
        place.backoff.started(now_s())
        self._by_identity[identity] = place
        place.child.on_exit(asyncio.get_running_loop(), lambda _child, code: self._exited(place, identity, code))

    def _receive(self, identity: bytes, message: FromPool) -> None:
        place = self._by_identity.get(identity)
        if place is None or place.identity != identity:
            return
        if isinstance(message, PoolReady):
            place.ready = True
        else:
            place.jobs += 1
        self._on_message(identity, message)
        if place.jobs >= self._settings.pool.recycle_jobs and place.ready:
            place.ready = False  # takes no more jobs; what it has is answered before it reads Stop
            self._router.send(identity, Stop())

    def _exited(self, place: _Place, identity: bytes, exit_code: int) -> None:
        self._by_identity.pop(identity, None)
        was_ready, place.ready = place.ready, False
        place.child = None
        if self._stopping:
            self._note_if_all_gone()
            return
        delay_s = 0.0
        if exit_code != 0:  # 0: it was recycled
            delay_s = self._delay_s(place, was_ready=was_ready)
            log.warning("pool process lost", lost=identity.decode(), exit_code=exit_code, restart_in_s=delay_s)
        self._on_lost(identity)
        self._later(delay_s, lambda: self._spawn(place))

    def _delay_s(self, place: _Place, *, was_ready: bool) -> float:
        """Back-off is for processes that can't start. One that worked died of an input: the others need it back."""
        if was_ready:
            return self._settings.supervisor.backoff_first_ms / 1000
        place.backoff.failed(now_s())
        return place.backoff.next_delay_s(now_s())

    def _note_if_all_gone(self) -> None:
        if all(place.child is None for place in self._places):
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
