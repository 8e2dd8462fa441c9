"""The HTTP side: health for orchestrators, metrics for Prometheus, `/debug` for people. Same event loop as gRPC."""

import asyncio
import errno
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from gateway.api.addresses import split
from gateway.state import ServerState
from shared.errors import ExitCode, StartupError
from shared.settings import Settings

_BACKLOG = 128


def build_app(state: ServerState, registry: CollectorRegistry) -> FastAPI:
    """The routes. No generated documentation pages: they would load scripts from elsewhere."""
    app = FastAPI(title="Headrace", openapi_url=None, docs_url=None, redoc_url=None)

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
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/debug")
    async def debug() -> Response:
        """Queues, stages, processes, memory."""
        return JSONResponse(state.debug())

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


async def start_http(settings: Settings, state: ServerState, registry: CollectorRegistry) -> RunningHttp:
    """Bind `gateway.http_address` and serve. Raises StartupError: IN_USE, or BAD_SETTINGS for an unusable address."""
    host, port = split(settings.gateway.http_address, "gateway.http_address")
    listener = _listen(host, port)
    config = uvicorn.Config(
        build_app(state, registry),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
        limit_concurrency=256,  # scrapes and probes; more is a mistake or an attack
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


def _listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; bound here so that a used port is our error, with our exit code."""
    family: Any = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
