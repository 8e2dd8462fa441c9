"""`grpc.health.v1.Health`, answered from what the server can do at this moment, never from a stored wish."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from gateway.api.interceptors import Call, Context, Edge
from gateway.state import ServerState, comes_by_request
from shared.clock import FOREVER_S, now_s
from shared.errors import HeadraceError, UnknownModel

SERVICE = "grpc.health.v1.Health"

_Response = health_pb2.HealthCheckResponse
SERVING: int = _Response.SERVING
NOT_SERVING: int = _Response.NOT_SERVING
UNKNOWN: int = _Response.SERVICE_UNKNOWN


class Health:
    """Services are `""` (all models), the inference services' own names (the same), and each model's name."""

    def __init__(self, edge: Edge, state: ServerState, services: tuple[str, ...]) -> None:
        self._edge = edge
        self._state = state
        self._whole = ("", *services)
        self._stopping = False
        self._closed = False
        self._changed = asyncio.Event()
        state.subscribe(self.notify)

    def handlers(self) -> dict[str, "grpc.RpcMethodHandler[Any, Any]"]:
        """Method name → handler."""
        parse = health_pb2.HealthCheckRequest.FromString
        return {
            "Check": self._edge.unary("Check", parse, self.check),
            "Watch": grpc.unary_stream_rpc_method_handler(self.watch),
        }

    def notify(self) -> None:
        """Something changed: wake every watcher. Event loop only."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def stop_serving(self) -> None:
        """NOT_SERVING from now on, for every service; watchers are told."""
        self._stopping = True
        self.notify()

    def close(self) -> None:
        """End all watches, so that the server need not wait for them."""
        self._closed = True
        self.notify()

    def status(self, service: str) -> int:
        """A ServingStatus; SERVICE_UNKNOWN for a name that is neither a service nor a model."""
        if service in self._whole:
            ready = not self._stopping and self._state.not_ready_reason() is None
        else:
            current = [model for model in self._state.models() if model.name == service and model.role == "current"]
            if not current:
                return UNKNOWN
            ready = not self._stopping and any(each.phase == "ready" or comes_by_request(each) for each in current)
        return SERVING if ready else NOT_SERVING

    async def check(self, message: "health_pb2.HealthCheckRequest", _call: Call) -> bytes:
        """The status now; NOT_FOUND for an unknown service, as the protocol says."""
        status = self.status(message.service)
        if status == UNKNOWN:
            raise UnknownModel("service is neither empty nor the name of a served model")
        return _serialised(status)

    async def watch(self, raw: bytes, context: Context) -> AsyncIterator[bytes]:
        """The status now and after every change, until the caller leaves or the server stops."""
        try:
            service = self._edge.parse(health_pb2.HealthCheckRequest.FromString, raw).service
        except HeadraceError as error:
            await self._edge.refuse(error, Call(context, now_s(), FOREVER_S))
        told: int | None = None
        while True:
            changed = self._changed
            status = self.status(service)
            if status != told:
                told = status
                yield _serialised(status)
            if self._closed:
                return
            if changed is self._changed:
                await changed.wait()


def _serialised(status: int) -> bytes:
    data: bytes = _Response(status=status).SerializeToString()
    return data
