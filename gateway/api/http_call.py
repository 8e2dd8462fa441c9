"""The one place between HTTP and every endpoint: body, time limit, error table, headers, counting.

What `interceptors.Edge` is for gRPC. Endpoints read the raw body themselves: FastAPI's own handling of parameters and
bodies costs more than the rest of a small request.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from gateway.api import status
from gateway.api.http_body import Bodies, Body
from gateway.api.http_events import Events, EventStream
from gateway.api.interceptors import RequestIds
from gateway.api.outcomes import OK, Outcomes
from gateway.api.parse import sentence
from gateway.request import StageTimes
from shared.clock import now_s
from shared.errors import Cancelled, Draining, HeadraceError, InternalFault, InvalidInput
from shared.logs import get_logger
from shared.settings import Settings

_log = get_logger()
_encode = msgspec.json.Encoder().encode
_T = TypeVar("_T")

JSON = "application/json"


class DirectRoute(APIRoute):
    """A route whose endpoint takes the request and gives the response, with nothing of FastAPI's in between.

    It is described by hand (`openapi_extra`); path parameters are in `request.path_params`.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint itself."""
        return self.endpoint


class HttpCall:
    """One request as its endpoint sees it; the endpoint fills `request_id` and `times` for the response's headers."""

    __slots__ = ("arrived_s", "body", "deadline_s", "request", "request_id", "times")

    def __init__(self, request: Request, arrived_s: float, deadline_s: float, body: Body) -> None:
        self.request = request
        self.arrived_s = arrived_s
        """Seconds, monotonic."""
        self.deadline_s = deadline_s
        """Absolute, monotonic: `gateway.default_deadline_ms` after the arrival, until the request says otherwise."""
        self.body = body
        self.request_id = ""
        self.times: StageTimes | None = None

    def headers(self) -> dict[str, str]:
        """Sent with every answer, also with a failure."""
        headers = {status.REQUEST_ID: self.request_id}
        if self.times is not None:
            headers[status.SERVER_TIMING] = self.times.server_timing()
        return headers

    async def json(self, kind: type[_T]) -> _T:
        """The body as this type; an empty one is an empty object. Raises InvalidInput and as `Body.read`."""
        body = await self.body.read()
        try:
            return msgspec.json.decode(body if body.strip() else b"{}", type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidInput(f"the request's JSON: {sentence(error)}") from None

    async def while_connected(self, work: Awaitable[_T]) -> _T:
        """The result of `work`; cancels it and raises Cancelled when the caller leaves. Read the body before."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request is answered in a task of its own")
        left = False

        async def watch() -> None:
            nonlocal left
            while (await self.request.receive())["type"] != "http.disconnect":
                pass
            left = True
            task.cancel()

        watcher = asyncio.create_task(watch())
        try:
            return await work
        except asyncio.CancelledError:
            if not left:
                raise
            task.uncancel()
            raise Cancelled("the caller left before the answer was ready") from None
        finally:
            watcher.cancel()


Serve = Callable[[HttpCall], Awaitable[Response]]
Grow = Callable[[HttpCall, Events], Awaitable[None]]


class HttpEdge:
    """Wraps endpoints. One per server, built at start."""

    def __init__(self, settings: Settings, outcomes: Outcomes) -> None:
        self.settings = settings
        self._outcomes = outcomes
        self._make_id = RequestIds()
        self._bodies = Bodies(settings)
        self._default_s = settings.gateway.default_deadline_ms / 1e3
        self._most_s = settings.gateway.max_deadline_ms / 1e3

    def counted(self, method: str, serve: Serve) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """An endpoint whose every end is counted under `method`, and which a stopping server waits for."""

        async def handle(request: Request) -> Response:
            arrived_s = now_s()
            deadline_s = arrived_s + self._default_s
            self._outcomes.started()
            with self._bodies.open(request, deadline_s) as body:
                call = HttpCall(request, arrived_s, deadline_s, body)
                call.request_id = self._make_id()
                try:
                    response = await serve(call)
                except asyncio.CancelledError:  # the HTTP server's stop has waited long enough; not the caller's doing
                    if task := asyncio.current_task():
                        task.uncancel()
                    failure: HeadraceError = Draining("the server is stopping and can't wait for this request")
                except Exception as error:  # noqa: BLE001 - the last line: whatever it is, the caller gets a status
                    failure = _foreseen(error, method, call)
                else:
                    self._outcomes.ended(method, OK)
                    return response
            self._outcomes.ended(method, failure.code.value)
            return refusal(failure, call.headers())

        return handle

    def growing(self, method: str, serve: Grow) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The same for an answer of many events; a failure after the first one is an event, too."""

        async def handle(request: Request) -> Response:
            return EventStream(lambda events: self._grow(method, serve, request, events))

        return handle

    async def _grow(self, method: str, serve: Grow, request: Request, events: Events) -> None:
        arrived_s = now_s()
        deadline_s = arrived_s + self._default_s
        self._outcomes.started()
        with self._bodies.open(request, deadline_s) as body:
            call = HttpCall(request, arrived_s, deadline_s, body)
            call.request_id = self._make_id()
            try:
                await serve(call, events)
            except asyncio.CancelledError:  # as above
                if task := asyncio.current_task():
                    task.uncancel()
                failure: HeadraceError = Draining("the server is stopping and can't wait for this text")
            except Exception as error:  # noqa: BLE001 - the last line: whatever it is, the caller is told
                failure = _foreseen(error, method, call)
            else:
                self._outcomes.ended(method, OK)
                await events.end()
                return
        self._outcomes.ended(method, failure.code.value)
        if events.has_begun:
            await events.write(_encode({"error": status.sentence(failure), "reason": failure.code.value}))
            await events.end()
        else:
            await events.instead(refusal(failure, call.headers()))

    def plain(self, serve: Serve) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """An endpoint that only tells what is there: not counted."""

        async def handle(request: Request) -> Response:
            arrived_s = now_s()
            deadline_s = arrived_s + self._default_s
            with self._bodies.open(request, deadline_s) as body:
                call = HttpCall(request, arrived_s, deadline_s, body)
                try:
                    return await serve(call)
                except Exception as error:  # noqa: BLE001 - the last line: whatever it is, the caller gets a status
                    call.request_id = self._make_id()
                    return refusal(_foreseen(error, "http", call), call.headers())

        return handle

    def limited(self, arrived_s: float, limit_s: float) -> float:
        """The absolute deadline of a request that names its own limit; cut to `gateway.max_deadline_ms`."""
        return arrived_s + min(limit_s, self._most_s)


def json_response(content: object, headers: dict[str, str] | None = None) -> Response:
    """Anything that msgspec can encode."""
    return Response(_encode(content), media_type=JSON, headers=headers)


def refusal(error: HeadraceError, headers: dict[str, str] | None = None) -> Response:
    """The failure as JSON `{"error": sentence}` with its status; the reason as a word is in a header."""
    headers = {**(headers or {}), status.REASON: error.code.value}
    wait_ms = status.retry_after_ms(error)
    if wait_ms is not None:
        headers["retry-after"] = str(max(1, math.ceil(wait_ms / 1000)))
        headers["retry-after-ms"] = str(wait_ms)
    return Response(
        _encode({"error": status.sentence(error)}), status.TABLE[error.code].http, headers=headers, media_type=JSON
    )


def _foreseen(error: Exception, method: str, call: HttpCall) -> HeadraceError:
    """The error itself when it is one of ours; otherwise INTERNAL with fixed text, the trace only in the log."""
    if isinstance(error, HeadraceError) and not isinstance(error, InternalFault):
        return status.bare(error)
    _log.error("request failed unexpectedly", method=method, request_id=call.request_id, exc_info=error)
    return InternalFault()
