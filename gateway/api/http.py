"""The HTTP side: health, metrics for Prometheus, `/debug` for people, and the endpoints for inference.

Same event loop as gRPC.
"""

import asyncio
import errno
import socket
from typing import Any, NamedTuple, Protocol

import h11
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException as StarletteHTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.api import http_page, upload_tasks
from gateway.api.addresses import split
from gateway.api.http_call import HttpEdge
from gateway.api.native import Answers
from gateway.api.open_inference import rest_docs
from gateway.api.open_inference.rest import Rest
from gateway.api.open_inference.service import OpenInference
from gateway.api.outcomes import Outcomes
from gateway.api.upload import Upload
from gateway.state import ServerState
from shared.errors import ExitCode, StartupError
from shared.settings import Settings

_BACKLOG = 1024  # connections of a burst that the event loop has not looked at yet
_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False}
"""Newer versions of FastAPI look for OpenTelemetry with every request; our counts are on /metrics."""
_IDLE_S = 75  # between two requests; clients and proxies that reuse connections give up after a minute
_LAST_WORDS_S = 0.25
_UNFINISHED_S = 10  # for a head (the first one counts from the connection), or for a body that nobody waits for

DOCS = (*(task.doc for task in upload_tasks.TASKS), *rest_docs.DOCS)
"""Every endpoint for inference."""


class AllGateways(Protocol):
    """What the gateways of one server show together, whichever was asked."""

    async def metrics(self) -> bytes:
        """As `/metrics`."""

    async def debug(self) -> dict[str, Any]:
        """As `/debug`."""


class RestParts(NamedTuple):
    """What stands behind the endpoints for inference."""

    flow: Answers
    open_inference: OpenInference
    """The same as behind the gRPC form."""
    outcomes: Outcomes
    """Every answered request is counted here; the server's stop waits for those in flight."""
    gateways: AllGateways | None = None
    """Where there are several."""


def build_app(
    settings: Settings, state: ServerState, registry: CollectorRegistry, parts: RestParts | None = None
) -> FastAPI:
    """The routes; without `parts` only those that tell how the server is."""
    # FastAPI's own documentation pages would load scripts from elsewhere: /docs is a page of ours.
    gateways = None if parts is None else parts.gateways
    app = FastAPI(title="Headrace", openapi_url="/openapi.json", docs_url=None, redoc_url=None, telemetry=_NO_TELEMETRY)
    if parts is not None:
        edge = HttpEdge(settings, parts.outcomes)
        for task in upload_tasks.TASKS:
            app.include_router(Upload(task, edge, parts.flow, parts.open_inference.models).router())
        app.include_router(Rest(edge, parts.open_inference).router())

    @app.exception_handler(StarletteHTTPException)
    async def refused(_: Request, error: StarletteHTTPException) -> Response:
        """Unknown paths and methods, in the form of all our errors."""
        return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """What the endpoints take and answer, with examples."""
        return HTMLResponse(http_page.page(DOCS), headers=http_page.HEADERS)

    @app.get("/healthz")
    async def healthz() -> Response:
        """Alive: the event loop answers. Says nothing about models."""
        return PlainTextResponse("ok\n")

    @app.get("/readyz")
    async def readyz() -> Response:
        """200 when every served model can answer a request now, else 503 and why."""
        reason = state.not_ready_reason()
        return PlainTextResponse("ready\n") if reason is None else PlainTextResponse(f"{reason}\n", status_code=503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        text = generate_latest(registry) if gateways is None else await gateways.metrics()
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @app.get("/debug")
    async def debug() -> Response:
        """Queues, stages, processes, memory."""
        return JSONResponse(state.debug() if gateways is None else await gateways.debug())

    return app


class RunningHttp:
    """A started HTTP server. Event loop only."""

    def __init__(self, server: uvicorn.Server, serving: "asyncio.Task[None]", address: str, port: int) -> None:
        self._server = server
        self._serving = serving
        self.address = address
        """host:port as bound."""
        self.port = port

    async def stop(self) -> None:
        """Close the listener and all connections. Takes at most about a second."""
        self._server.should_exit = True
        await self._serving


class _Connection(H11Protocol):
    """A connection that is closed when the caller does not finish what it has begun to say.

    uvicorn's own timer runs only between two requests, and the first byte of a head ends it. Ours runs while the rest
    of a head is awaited, or the rest of a body that has been answered already, and no byte before the last ends it.
    """

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Called by the event loop."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Called after the last byte of an answer was written."""
        super().on_response_complete()
        if self.conn.their_state is not h11.IDLE:  # else uvicorn's timer runs until the next head begins
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        super().connection_lost(exc)
        self._calm()

    def _watch(self) -> None:
        theirs = self.conn.their_state
        if not (theirs is h11.IDLE or (theirs is h11.SEND_BODY and self.conn.our_state is h11.DONE)):
            self._calm()
        elif self._patience is None:
            self._patience = self.loop.call_later(_UNFINISHED_S, self.timeout_keep_alive_handler)

    def _calm(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


async def start_http(
    settings: Settings, state: ServerState, registry: CollectorRegistry, parts: RestParts | None = None
) -> RunningHttp:
    """Bind `gateway.http_address` and serve. Raises StartupError: IN_USE, or BAD_SETTINGS for an unusable address."""
    host, port = split(settings.gateway.http_address, "gateway.http_address")
    listener = _listen(host, port, shared=settings.gateway.processes > 1)
    config = uvicorn.Config(
        build_app(settings, state, registry, parts),
        http=_Connection,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=1,
        # Admission refuses what is too much, with its reason; this only bounds what a mistake or an attack may open.
        limit_concurrency=2 * settings.admission.max_requests + 256,
        ws="none",
    )
    # uvicorn's own `serve` takes over the process's signals; its steps do not.
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    serving = asyncio.create_task(_serve(server, listener), name="http")
    bound = listener.getsockname()[1]
    return RunningHttp(server, serving, f"{host}:{bound}", bound)


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    await server.main_loop()
    await server.shutdown(sockets=[listener])
    if server.server_state.tasks:  # cancelled by now: their refusals are on their way
        await asyncio.wait(list(server.server_state.tasks), timeout=_LAST_WORDS_S)


def _listen(host: str, port: int, *, shared: bool) -> socket.socket:
    """A listening TCP socket; bound here so that a used port is our error, with our exit code.

    `shared`: with the other gateways of this server, which is all that `shared.held_ports` lets in.
    """
    family: Any = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only where the protocol is named; with it every answer waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        used = error.errno == errno.EADDRINUSE
        raise StartupError(
            ExitCode.IN_USE if used else ExitCode.BAD_SETTINGS,
            f"gateway.http_address {host}:{port} can't be bound: {error.strerror or error}",
        ) from None
    listener.settimeout(0)
    return listener
