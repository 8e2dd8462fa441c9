import asyncio
from typing import cast

import pytest

from bench import http2
from bench.http2 import Kind, Setting
from bench.http2_wire import Http2Wire, _Connection
from bench.wire import NotThere, Target

TARGET = Target("127.0.0.1:1", "/test.Load/Call", 1, stages=False)


class _Transport:
    """A socket that takes everything until it is gone."""

    def __init__(self) -> None:
        self.writes = 0
        self.breaks_at = 0
        self.gone = False

    def write(self, _data: bytes) -> None:
        self.writes += 1
        self.gone = self.gone or self.writes == self.breaks_at

    def is_closing(self) -> bool:
        return self.gone

    def abort(self) -> None:
        self.gone = True


class _Call:
    """A connection with the ends of its calls."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, str]] = []
        self.samples: dict[str, str] = {}
        self.transport = _Transport()
        self.connection = _Connection(TARGET, lambda index, word, _: self.ends.append((index, word)), self.samples)
        self.connection.connection_made(cast("asyncio.Transport", self.transport))

    def answer(self, stream: int, status: str, text: str) -> None:
        trailers = http2.header_block({"grpc-status": status, "grpc-message": text, "error-reason": "invalid_input"})
        flags = http2.END_STREAM | http2.END_HEADERS
        self.connection.data_received(http2.frame(Kind.HEADERS, flags, stream, trailers))


async def test_once_the_connection_is_lost_calls_are_unreachable_and_nothing_is_written() -> None:
    call = _Call()
    settings = Setting.MAX_CONCURRENT_STREAMS.to_bytes(2, "big") + (1).to_bytes(4, "big")
    call.connection.data_received(http2.frame(Kind.SETTINGS, 0, 0, settings))
    call.connection.send(0, b"under way", 0.01)
    call.connection.send(1, b"waits for a stream", 0.01)
    written = call.transport.writes
    call.transport.gone = True
    call.connection.send(2, b"before anyone was told", 0.01)
    call.connection.connection_lost(None)
    call.connection.send(3, b"after", 0.01)
    await asyncio.sleep(0.02)  # their deadlines pass, and have no meaning any more
    assert sorted(call.ends) == [(index, "unreachable") for index in range(4)]
    assert call.samples == {"unreachable": "the connection was lost"}
    assert call.transport.writes == written


async def test_a_write_that_finds_the_connection_broken_is_the_last_one() -> None:
    call = _Call()
    call.transport.breaks_at = call.transport.writes + 1
    call.connection.send(0, b"its headers break, its bytes stay", 0.01)
    assert call.transport.writes == call.transport.breaks_at
    call.connection.connection_lost(BrokenPipeError())
    assert call.ends == [(0, "unreachable")]


async def test_the_first_text_of_each_outcome_is_kept() -> None:
    call = _Call()
    for index, text in enumerate(("INPUT0 must have 16 elements, 100%25 of them", "another")):
        call.connection.send(index, b"request", 5.0)
        call.answer(1 + 2 * index, "3", text)
    call.connection.close()
    assert call.ends == [(0, "invalid_input"), (1, "invalid_input")]
    assert call.samples == {"invalid_input": "INPUT0 must have 16 elements, 100% of them"}


async def test_a_server_that_hangs_up_at_once_is_not_there() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        with pytest.raises(NotThere, match=rf"no gRPC server answered at {host}:{port}: the connection was closed"):
            await Http2Wire(TARGET._replace(address=f"{host}:{port}"), lambda *_: None).open()
