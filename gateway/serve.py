"""The gateway's main wait: until a stop is asked for, with a tick a few times a second and the word "ready"."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from gateway.state import ServerState
from shared.child import Announcer, StopSignal
from shared.errors import ExitCode
from shared.logs import get_logger
from shared.settings import Settings

log = get_logger()

_LOOPBACK = ("127.", "localhost", "[::1]")
_LOOPBACK_HINT = "this machine only; gateway.grpc_address and gateway.http_address open it"

TICK_S = 0.25  # a hang is noticed this late at most; all limits that it guards are seconds


LISTEN_LATEST_S = 5.0
"""A gateway among several listens when it is ready, so that no connection goes to one that has just started while
others can serve it; but no later than this, for somebody has to say why it isn't."""


class Announcement:
    """Tells the supervisor (and the log) once that all models are proven, or that none can be loaded."""

    def __init__(
        self, announcer: Announcer, state: ServerState, ports: tuple[int, int], settings: Settings, name: str
    ) -> None:
        """`ports`: of gRPC and HTTP, as bound. `name`: this gateway's."""
        self._name = name
        grpc_port, http_port = ports
        self._announcer = announcer
        self._state = state
        self._grpc = f"{_host(settings.gateway.grpc_address)}:{grpc_port}"
        self._http = f"{_host(settings.gateway.http_address)}:{http_port}"
        self._announced = False
        self.hopeless: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        state.subscribe(self._changed)
        addresses = (self._grpc, self._http)
        hint = _LOOPBACK_HINT if all(address.startswith(_LOOPBACK) for address in addresses) else "open to the network"
        log.info("listening", grpc=self._grpc, http=self._http, note=hint)
        self._changed()

    def _changed(self) -> None:
        models = self._state.models()
        if self._announced or not is_settled(self._state):
            return
        ready = [model.name for model in models if model.phase == "ready"]
        if all(model.phase == "failed" for model in models):
            if not self.hopeless.done():
                self.hopeless.set_result("; ".join(f"model {model.name!r}: {model.reason}" for model in models))
            return
        self._announced = True
        failed = [f"{model.name} ({model.reason})" for model in models if model.phase == "failed"]
        detail = f"gRPC {self._grpc}, HTTP {self._http}, models {', '.join(ready) or 'none'}"
        detail += f"; NOT ready: {', '.join(failed)}" if failed else ""
        log.info("ready", detail=detail)
        self._announcer.ready(self._name, detail)


def is_settled(state: ServerState) -> bool:
    """Whether each model is ready, has failed, or was unloaded while it was not."""
    return all(model.phase in {"ready", "failed", "unloaded", "on_demand"} for model in state.models())


async def until_settled(state: ServerState, stop: StopSignal, tick: Callable[[], None]) -> None:
    """Wait until it is known of each model whether it is ready, for a stop, or for `LISTEN_LATEST_S`."""
    changed = asyncio.Event()
    state.subscribe(changed.set)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LISTEN_LATEST_S):
            while not (stop.requested or is_settled(state)):
                changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), TICK_S)
                _guarded(tick)


def _host(address: str) -> str:
    return address.rpartition(":")[0]


async def serve(stop: StopSignal, announcement: Announcement, tick: Callable[[], None]) -> ExitCode:
    """Wait for the end. Returns OK after an asked-for stop, MODEL_LOAD when no model could be loaded at start."""
    with _asked_for(stop) as asked:
        while True:
            done, _ = await asyncio.wait(
                (asked, announcement.hopeless), timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED
            )
            if asked in done:
                return ExitCode.OK
            if announcement.hopeless in done:
                log.error("no model could be loaded", reason=announcement.hopeless.result())
                return ExitCode.MODEL_LOAD
            _guarded(tick)


async def unless_stopped(work: Coroutine[Any, Any, None], stop: StopSignal) -> None:
    """Do something of the start; given up as soon as a stop is asked for."""
    task = asyncio.create_task(work)
    with _asked_for(stop) as asked:
        await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
    if not task.cancelled():
        task.result()


@contextlib.contextmanager
def _asked_for(stop: StopSignal) -> Iterator["asyncio.Future[None]"]:
    """Done once a stop is asked for."""
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[None] = loop.create_future()

    def look() -> None:
        if stop.requested and not asked.done():
            asked.set_result(None)

    loop.add_reader(stop.fileno(), look)
    look()
    try:
        yield asked
    finally:
        loop.remove_reader(stop.fileno())


def _guarded(tick: Callable[[], None]) -> None:
    """What watches over hung processes must not end the gateway itself: it is tried again a quarter second later."""
    try:
        tick()
    except Exception:
        log.exception("a periodic check failed")
