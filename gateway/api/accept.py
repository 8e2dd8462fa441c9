"""Accepts several calls at a time, the newest first, and refuses what can't be served before its message is read.

gRPC for Python asks its core for one call at a time, and needs five turns of the event loop and two thread switches
for each: under load calls wait there unseen, oldest first, until the deadlines of all have passed
(docs/decisions/overload.md). Here a method has many requests for calls outstanding at once. In a turn of the loop a
bounded number of calls is started, so that what is in flight goes on; when more come than can be started, the newest go
first, since they have the most time left, and those whose time runs out meanwhile cost no more than this.

The names with which this is built are gRPC's own internal ones (grpcio 1.84 and 1.85). Where a release lacks one of
them, or calls it differently, `Acceptor.start` says so in the log, and gRPC's own loop, for which the methods are
registered in any case, serves them alone: slower under overload, and otherwise the same.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the stubs leave it out

from gateway.api.interceptors import Context, Refusal
from shared.logs import get_logger

_log = get_logger()

OUTSTANDING = 64
"""Requests for a call of one method that core holds at a time: about what comes in a turn of a loop that is late."""
PER_TURN = 16
"""Calls started in one turn of the loop. Refusing them takes 2 ms, and what is in flight has its turn then."""
MOST_WAITING = 1024
"""Calls that were accepted and not started. gRPC holds up to 64 KB of the message of each; beyond it they are started
in any case."""
LINGER_S = 0.1
"""How long a call that nobody waits for is kept: gRPC cancels one that is let go, and its caller, whose clock may be
behind ours, would see that instead of its deadline."""
PARTS = ("_ServicerContext", "_handle_unary_unary_rpc", "_schedule_rpc_coro", "_RequestCallError")
"""Of gRPC's own internals."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Loop = asyncio.AbstractEventLoop


class Door(Protocol):
    """Decides over a call without its message; `interceptors.Edge` is one."""

    def unread(self, method: str, context: Context, reading: int) -> Refusal | None:
        """How a call ends that can't be served; None for one that is worth reading, beside `reading` others."""

    def expired(self, method: str) -> None:
        """A call's time ran out before it was started; its caller waits no more."""


class _Method(NamedTuple):
    full_name: str
    name: str
    handler: Handler


class _Arrived(NamedTuple):
    """A call that was accepted and not started."""

    method: _Method
    state: Any
    until_s: float
    """When its time is over, by the loop's clock."""


class _Reading:
    """One call's handler, as gRPC calls it; tells when the message is there, or won't come any more."""

    __slots__ = ("_serve", "_told")
    request_deserializer = None
    response_serializer = None

    def __init__(self, handler: Handler, told: Callable[[], None]) -> None:
        self._serve: Any = handler.unary_unary
        self._told: Callable[[], None] | None = told

    async def unary_unary(self, raw: bytes, context: Context) -> bytes:
        self.end()
        serve: Callable[[bytes, Context], Awaitable[bytes]] = self._serve
        return await serve(raw, context)

    def end(self) -> None:
        """Idempotent."""
        told, self._told = self._told, None
        if told is not None:
            told()


class Acceptor:
    """Takes the calls of some unary methods of a started server. Event loop only."""

    def __init__(self, server: grpc.aio.Server, methods: Mapping[str, Handler], door: Door) -> None:
        """Before the server starts. `methods` by full name (`/package.Service/Method`); registers them.

        gRPC's own loop still gets one in some calls, so they come through the same door.
        """
        self._core: Any = getattr(server, "_server", None)
        self._methods: list[_Method] = []
        self._door = door
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: deque[_Arrived] = deque()
        self._over: deque[_Arrived] = deque()
        self._reading = 0
        self._left = PER_TURN
        self._turning = False
        for full_name, handler in methods.items():
            _, service, name = full_name.split("/")
            server.add_registered_method_handlers(service, {name: _behind(door, name, handler)})
            self._methods.append(_Method(full_name, name, handler))

    def start(self) -> bool:
        """Ask for calls; False where this release of gRPC can't (then its own loop takes them all)."""
        loop = asyncio.get_running_loop()
        if reason := _unusable(self._core, loop):
            _log.warning("this release of gRPC accepts one call at a time", reason=reason, grpcio=grpc.__version__)
            return False
        for method in self._methods:
            for _ in range(OUTSTANDING):
                self._keep(loop.create_task(self._accept(method, loop)))
        return True

    async def _accept(self, method: _Method, loop: Loop) -> None:
        """One request for a call after another, until the server stops."""
        core, full_name = self._core, method.full_name.encode()
        while core.is_running():
            try:
                state = await core._request_registered_call(full_name)  # noqa: SLF001
            except cygrpc._RequestCallError:  # noqa: SLF001 - the call ended before it was ours, or the server stops
                continue
            except Exception:  # noqa: BLE001 - nobody else would see it, and the loop would be still
                _log.exception("gRPC takes no more requests for calls", method=method.full_name)
                return
            if not self._turning:
                self._turning = True
                loop.call_soon(self._turn, loop)
            if self._left > 0 or len(self._waiting) >= MOST_WAITING:
                self._begin(method, state, loop)
            else:
                remaining_s = cygrpc._ServicerContext(state, None, None, loop).time_remaining()  # noqa: SLF001
                until_s = float("inf") if remaining_s is None else loop.time() + remaining_s
                self._waiting.append(_Arrived(method, state, until_s))
            del state  # while it waits for the next call

    def _turn(self, loop: Loop) -> None:
        """A new turn of the loop: some of those that wait may start, the newest first."""
        self._left = PER_TURN
        now_s = loop.time()
        while self._waiting and self._waiting[0].until_s <= now_s:
            over = self._waiting.popleft()
            self._door.expired(over.method.name)
            self._over.append(over)
        while self._over and self._over[0].until_s + LINGER_S <= now_s:
            self._over.popleft()
        while self._waiting and self._left > 0:
            newest = self._waiting.pop()
            self._begin(newest.method, newest.state, loop)
        if self._waiting:
            loop.call_soon(self._turn, loop)
        elif self._over:
            loop.call_later(LINGER_S, self._turn, loop)
        else:
            self._turning = False

    def _begin(self, method: _Method, state: Any, loop: Loop) -> None:  # noqa: ANN401 - gRPC's own, without a type
        self._left -= 1
        context = cygrpc._ServicerContext(state, None, None, loop)  # noqa: SLF001
        refusal = self._door.unread(method.name, context, self._reading)
        if refusal is not None:
            self._keep(loop.create_task(_refuse(context, refusal)))
            return
        served = self._read_and_serve(method, state, loop)
        self._keep(loop.create_task(cygrpc._schedule_rpc_coro(served, state, loop, method.full_name)))  # noqa: SLF001

    async def _read_and_serve(self, method: _Method, state: Any, loop: Loop) -> None:  # noqa: ANN401
        reading = _Reading(method.handler, self._read)
        self._reading += 1
        served = cygrpc._handle_unary_unary_rpc(reading, state, loop)  # noqa: SLF001
        del state
        try:
            await served
        except grpc.aio.AbortError as end:
            # A call keeps the error that ended it, with the frames that keep the call and its message: they would stay
            # until the garbage collector comes.
            raise end.with_traceback(None)  # noqa: B904 - it is the same one
        finally:
            reading.end()

    def _read(self) -> None:
        self._reading -= 1

    def _keep(self, task: "asyncio.Task[Any]") -> None:
        """The loop itself holds tasks only weakly."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def __repr__(self) -> str:
        return f"<Acceptor methods={len(self._methods)} tasks={len(self._tasks)} waiting={len(self._waiting)}>"


def _unusable(core: Any, loop: Loop) -> str | None:  # noqa: ANN401 - gRPC's own
    """Why this release's internals can't be used as they are here; None when they can."""
    lacks = [name for name in PARTS if not hasattr(cygrpc, name)]
    if not hasattr(core, "_request_registered_call"):
        lacks.append("_request_registered_call")
    if lacks:
        return f"it has no {', '.join(lacks)}"
    try:  # a coroutine that was never begun is only made, with all its arguments, and thrown away
        cygrpc._ServicerContext(None, None, None, loop)  # noqa: SLF001
        cygrpc._handle_unary_unary_rpc(None, None, loop).close()  # noqa: SLF001
        cygrpc._schedule_rpc_coro(None, None, loop, "").close()  # noqa: SLF001
    except TypeError as error:
        return str(error)
    return None


async def _refuse(context: Context, refusal: Refusal) -> None:
    """Send the status. gRPC ends the call when nobody holds it any more, so nothing more is asked of it."""
    try:
        await context.abort(*refusal)
    except (grpc.aio.AbortError, grpc.aio.InternalError) as end:  # the end of every abort; the caller was faster
        end.__traceback__ = None  # the call keeps its error: together they would wait for the garbage collector


def _behind(door: Door, method: str, handler: Handler) -> Handler:
    serve: Callable[[bytes, Context], Awaitable[bytes]] = handler.unary_unary  # type: ignore[assignment]  # it is unary

    async def handle(raw: bytes, context: Context) -> bytes:
        try:
            refusal = door.unread(method, context, 0)
            if refusal is not None:
                await context.abort(*refusal)
            return await serve(raw, context)
        finally:
            del raw, context  # see `_read_and_serve`

    return grpc.unary_unary_rpc_method_handler(handle)
