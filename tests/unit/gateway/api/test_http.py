import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from gateway.api import http
from gateway.api.http import build_app, start_http
from shared.errors import ExitCode, StartupError
from tests.support.fake_flow import State, settings


def client(state: State, registry: CollectorRegistry | None = None) -> httpx.AsyncClient:
    app = build_app(settings(), state, registry or CollectorRegistry())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://edge")


async def test_healthz_answers_whatever_the_models_do() -> None:
    state = State()
    state.set_reason("no worker has said hello")
    async with client(state) as edge:
        answer = await edge.get("/healthz")

    assert (answer.status_code, answer.text) == (200, "ok\n")


async def test_readyz_says_why_not() -> None:
    state = State()
    async with client(state) as edge:
        ready = await edge.get("/readyz")
        state.set_reason("model fake: no worker has loaded it")
        not_ready = await edge.get("/readyz")

    assert (ready.status_code, ready.text) == (200, "ready\n")
    assert (not_ready.status_code, not_ready.text) == (503, "model fake: no worker has loaded it\n")


async def test_metrics_are_those_of_the_registry() -> None:
    registry = CollectorRegistry()
    Counter("rows", "Rows.", registry=registry).inc(3)
    async with client(State(), registry) as edge:
        answer = await edge.get("/metrics")

    assert "rows_total 3.0" in answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=")


async def test_debug_is_json() -> None:
    async with client(State("a", "b")) as edge:
        assert (await edge.get("/debug")).json() == {"models": ["a", "b"], "queue": {"fake": 0}}


@pytest.mark.parametrize("path", ["/redoc", "/docs/oauth2-redirect", "/", "/v2"])
async def test_there_is_nothing_else_and_the_error_is_json(path: str) -> None:
    async with client(State()) as edge:
        answer = await edge.get(path)

    assert (answer.status_code, answer.json()) == (404, {"error": "Not Found"})


async def test_small_answers_are_not_held_back_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    delayed: list[int] = []
    made = http._Connection.connection_made

    def connection_made(self: http._Connection, transport: asyncio.Transport) -> None:
        delayed.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    monkeypatch.setattr(http._Connection, "connection_made", connection_made)
    running = await start_http(settings(), State(), CollectorRegistry())
    try:
        async with httpx.AsyncClient(base_url=f"http://{running.address}") as client:
            await client.get("/healthz")
    finally:
        await running.stop()

    assert delayed == [1]


UNFINISHED_S = 0.05
HEALTHZ = b"GET /healthz HTTP/1.1\r\nhost: edge\r\n\r\n"


@contextlib.asynccontextmanager
async def connection(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """To a server with little patience."""
    monkeypatch.setattr(http, "_UNFINISHED_S", UNFINISHED_S)
    running = await start_http(settings(), State(), CollectorRegistry())
    reader, writer = await asyncio.open_connection(*running.address.split(":"))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await running.stop()


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        (b"", 0),
        (HEALTHZ[:-2], 0),
        (HEALTHZ + HEALTHZ[:9], 1),
        (b"POST /healthz HTTP/1.1\r\nhost: edge\r\ncontent-length: 9000\r\n\r\n{", 1),
    ],
    ids=["silent", "half a head", "half a second head", "half a body, answered already"],
)
async def test_a_caller_that_does_not_finish_loses_its_connection_whatever_it_drips(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, answers: int
) -> None:
    async with connection(monkeypatch) as (reader, writer), asyncio.timeout(5):
        writer.write(sent)
        got = b""
        with contextlib.suppress(ConnectionError):  # closed while a byte was on its way to it
            read = asyncio.ensure_future(reader.read(4096))
            while not read.done() or (await read):
                if read.done():
                    got += read.result()
                    read = asyncio.ensure_future(reader.read(4096))
                elif sent:
                    writer.write(b"x")
                await asyncio.wait([read], timeout=0.005)

    assert got.count(b"HTTP/1.1 ") == answers


async def test_a_caller_that_finishes_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connection(monkeypatch) as (reader, writer), asyncio.timeout(5):
        writer.write(HEALTHZ)
        await reader.readuntil(b"ok\n")
        more = asyncio.ensure_future(reader.read(1))
        done, _ = await asyncio.wait([more], timeout=3 * UNFINISHED_S)
        assert not done

        writer.write(HEALTHZ)
        assert await more == b"H"


async def test_a_used_port_is_in_use_and_a_foreign_address_a_bad_setting() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(StartupError, match=rf"gateway\.http_address {address}") as used:
            await start_http(settings(gateway={"http_address": address}), State(), CollectorRegistry())
    with pytest.raises(StartupError, match=r"gateway\.http_address 192\.0\.2\.1:0") as foreign:
        await start_http(settings(gateway={"http_address": "192.0.2.1:0"}), State(), CollectorRegistry())

    assert used.value.exit_code is ExitCode.IN_USE
    assert foreign.value.exit_code is ExitCode.BAD_SETTINGS
