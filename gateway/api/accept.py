"""Accepts several calls at a time, and refuses what can't be served before its message is read.

gRPC for Python asks its core for one call at a time, and needs five turns of the event loop and two thread switches
for each: under load calls wait there unseen until their deadlines have passed, while the loop is idle for a third of
the time (docs/decisions/overload.md). Here a method has several requests for calls outstanding at once.

The names with which this is built are gRPC's own internal ones (grpcio 1.85). Where a release lacks one of them
`Acceptor.start` says so in the log, and gRPC's own loop, for which the methods are registered in any case, serves
them alone: slower under overload, and otherwise the same.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the stubs leave it out

from gateway.api.interceptors import Context
from shared.logs import get_logger

_log = get_logger()

OUTSTANDING = 16
"""Requests for a call of one method that core holds at a time. More gives no more calls a second, and a turn of the
loop that accepts many is a turn in which nothing else moves: what is in flight comes first."""

PARTS = ("_ServicerContext", "_handle_unary_unary_rpc", "_schedule_rpc_coro", "InternalError")
"""Of gRPC's own internals."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Loop = asyncio.AbstractEventLoop
Gate = Callable[[str, Context], Awaitable[None]]
"""Ends a call of this method that can't be served: aborts it, so that it raises. Decides without the call's message."""


class Acceptor:
    """Takes the calls of some unary methods of a started server. Event loop only."""

    def __init__(self, server: grpc.aio.Server, methods: Mapping[str, Handler], gate: Gate) -> None:
        """Before the server starts. `methods` by full name (`/package.Service/Method`); registers them.

        gRPC's own loop still gets every seventeenth call, so the gate stands there, too.
        """
        for name, handler in methods.items():
            _, service, method = name.split("/")
            server.add_registered_method_handlers(service, {method: _gated(method, handler, gate)})
        self._core: Any = getattr(server, "_server", None)
        self._methods = methods
        self._gate = gate
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self) -> bool:
        """Ask for calls; False where this release of gRPC can't (then its own loop takes them all)."""
        lacks = [name for name in PARTS if not hasattr(cygrpc, name)]
        if not hasattr(self._core, "_request_registered_call"):
            lacks.append("_request_registered_call")
        if lacks:
            _log.warning("this release of gRPC accepts one call at a time", lacks=lacks, grpcio=grpc.__version__)
            return False
        loop = asyncio.get_running_loop()
        for name, method in self._methods.items():
            for _ in range(OUTSTANDING):
                self._keep(loop.create_task(self._accept(name, method, loop)))
        return True

    async def _accept(self, name: str, method: Handler, loop: Loop) -> None:
        """One request for a call after another, until the server stops."""
        core, full_name = self._core, name.encode()
        while core.is_running():
            try:
                state = await core._request_registered_call(full_name)  # noqa: SLF001
            except cygrpc.InternalError:
                _log.exception("gRPC takes no more requests for calls", method=name)
                return
            except Exception:  # noqa: BLE001, S112 - gRPC's name for "this one is gone" is not exported
                continue  # one call ended before it was ours, or the server stops: the loop's condition says which
            served = self._serve(name, method, state, loop)
            self._keep(loop.create_task(cygrpc._schedule_rpc_coro(served, state, loop, name)))  # noqa: SLF001
            del served, state  # while it waits for the next call

    async def _serve(self, name: str, method: Handler, state: Any, loop: Loop) -> None:  # noqa: ANN401 - gRPC's own
        try:
            await self._gate(name.rpartition("/")[2], cygrpc._ServicerContext(state, None, None, loop))  # noqa: SLF001
            await cygrpc._handle_unary_unary_rpc(method, state, loop)  # noqa: SLF001
        finally:
            del state  # it keeps how the call was ended, and with it this frame: see `Edge.refuse`

    def _keep(self, task: "asyncio.Task[Any]") -> None:
        """The loop itself holds tasks only weakly."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def __repr__(self) -> str:
        return f"<Acceptor methods={len(self._methods)} tasks={len(self._tasks)}>"


def _gated(method: str, handler: Handler, gate: Gate) -> Handler:
    serve: Callable[[bytes, Context], Awaitable[bytes]] = handler.unary_unary  # type: ignore[assignment]  # it is unary

    async def handle(raw: bytes, context: Context) -> bytes:
        try:
            await gate(method, context)
            return await serve(raw, context)
        finally:
            del raw, context  # as above

    return grpc.unary_unary_rpc_method_handler(handle)
