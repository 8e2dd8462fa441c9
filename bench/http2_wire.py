"""Calls as bare HTTP/2 frames: on the wire what a gRPC client sends, for a fraction of grpc.aio's CPU.

A load generator that shares the machine with the server takes from it what it uses. Here a call is two writes and a
look at a few bytes. What a gRPC client does about a full server is done here, too: no more streams than the server
allows (the others wait here, and expire here), no more bytes than its windows, and a call that ends before its upload
stops uploading. Like grpc.aio's, a call whose time is over is cancelled with RST_STREAM.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast
from urllib.parse import unquote

import grpc

from bench import http2
from bench.http2 import Kind, Setting, Stream
from bench.ledger import EXPIRED, OK, UNREACHABLE, word
from bench.wire import REASON, TIMING, Ended, NotThere, Target, connecting

_NAMES = {str(code.value[0]).encode(): code.name for code in grpc.StatusCode}
_CODES = {http2.CANCEL: "CANCELLED", 11: "RESOURCE_EXHAUSTED"}
"""RST_STREAM's codes as gRPC statuses; all others are UNAVAILABLE."""
_GIVE_BACK = 1 << 30
"""Bytes of answers on a connection after which the server may send as many more: half of its window."""
_STATUS, _MESSAGE, _REASON, _TIMING = b"grpc-status", b"grpc-message", REASON.encode(), TIMING.encode()
_LOST = "the connection was lost"


class Http2Wire:
    """Some connections, used in turn. The event loop's thread only."""

    def __init__(self, target: Target, ended: Ended) -> None:
        self.samples: dict[str, str] = {}
        self._target = target
        self._ended = ended
        self._connections: list[_Connection] = []

    async def open(self) -> None:
        """Connect and wait for the server's settings. Raises NotThere."""
        loop = asyncio.get_running_loop()
        host, _, port = self._target.address.rpartition(":")
        make = partial(_Connection, self._target, self._ended, self.samples)
        async with connecting(self._target.address):
            for _ in range(self._target.channels):
                _, connection = await loop.create_connection(make, host.strip("[]"), int(port))
                await connection.greeted.wait()
                if connection.lost:
                    raise NotThere("the connection was closed at once")
                self._connections.append(connection)

    def send(self, index: int, request: bytes, left_s: float) -> None:
        """Begin a call; `ended` is told its end."""
        self._connections[index % len(self._connections)].send(index, request, left_s)

    async def close(self) -> None:
        """Drop the connections."""
        for connection in self._connections:
            connection.close()


class _Connection(asyncio.Protocol):
    def __init__(self, target: Target, ended: Ended, samples: dict[str, str]) -> None:
        self.greeted = asyncio.Event()
        self._samples = samples
        self._ended = ended
        self._stages = target.stages
        self._loop = asyncio.get_running_loop()
        self._headers = http2.header_block(
            {
                ":method": "POST",
                ":scheme": "http",
                ":path": target.method,
                ":authority": target.address,
                "content-type": "application/grpc",
                "te": "trailers",
                "user-agent": "headrace-load",
            }
        )
        self._received = bytearray()
        self._streams: dict[int, Stream] = {}
        self._waiting: deque[Stream] = deque()
        """For the server to allow one more stream."""
        self._uploads: deque[Stream] = deque()
        """With bytes to send, in the order of their turn."""
        self._in_time: deque[Stream] = deque()
        """By deadline; ended ones are skipped."""
        self._timer: asyncio.TimerHandle | None = None
        self._next_id = 1
        self._most_streams = http2.MAX_WINDOW
        self._window = http2.DEFAULT_WINDOW
        self._stream_window = http2.DEFAULT_WINDOW
        self._most_bytes = http2.DEFAULT_FRAME
        self._taken = 0
        """Bytes of answers since the server was given a new window."""
        self._may_write = True

    # ---- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(http2.greeting())

    def connection_lost(self, _error: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()
        for stream in (*self._streams.values(), *self._waiting):
            self._end(stream, UNREACHABLE, _LOST)
        self.greeted.set()

    @property
    def lost(self) -> bool:
        """Or about to be: nothing can be sent any more."""
        return self._transport.is_closing()

    def pause_writing(self) -> None:
        self._may_write = False

    def resume_writing(self) -> None:
        self._may_write = True
        self._upload()

    def data_received(self, data: bytes) -> None:
        self._received += data
        for frame in http2.frames(self._received):
            handle = _HANDLERS.get(frame.kind)
            if handle:
                handle(self, frame)
        self._open_waiting()
        self._upload()

    # ---- sending

    def _write(self, data: bytes) -> None:
        if not self.lost:
            self._transport.write(data)

    def send(self, index: int, request: bytes, left_s: float) -> None:
        if self.lost:
            self._end(Stream(index, request, 0.0), UNREACHABLE, _LOST)
            return
        stream = Stream(index, request, time.monotonic() + left_s)
        self._in_time.append(stream)
        if self._timer is None:
            self._timer = self._loop.call_later(left_s, self._expire)
        self._waiting.append(stream)
        self._open_waiting()
        self._upload()

    def close(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._transport.abort()

    def _open_waiting(self) -> None:
        while self._waiting and len(self._streams) < self._most_streams:
            stream = self._waiting.popleft()
            if stream.id < 0:
                continue
            stream.id, self._next_id = self._next_id, self._next_id + 2
            stream.window = self._stream_window
            self._streams[stream.id] = stream
            left_us = max(1, round((stream.deadline_s - time.monotonic()) * 1e6))
            timeout = f"{left_us}u" if left_us < 1e8 else f"{left_us // 1000}m"
            block = self._headers + http2.header_block({"grpc-timeout": timeout})
            self._write(http2.frame(Kind.HEADERS, http2.END_HEADERS, stream.id, block))
            self._uploads.append(stream)

    def _upload(self) -> None:
        """Send as much of the requests as windows and socket take, one after the other."""
        for _ in range(len(self._uploads)):
            if not self._may_write or self._window <= 0:
                return
            stream = self._uploads.popleft()
            if stream.id in self._streams and self._upload_one(stream):
                self._uploads.append(stream)  # its own window is used up: the others' turn

    def _upload_one(self, stream: Stream) -> bool:
        """True when there is more to send."""
        total = len(stream.request) + 5
        pieces: list[Any] = []
        request = memoryview(stream.request)
        while stream.at < total and (size := min(total - stream.at, self._window, stream.window, self._most_bytes)) > 0:
            last = stream.at + size == total
            pieces.append(http2.frame_header(size, Kind.DATA, http2.END_STREAM if last else 0, stream.id))
            if stream.at < 5:  # gRPC's prefix goes with the first bytes
                prefix = b"\0" + len(stream.request).to_bytes(4, "big")
                pieces.append(prefix[stream.at : stream.at + size])
            pieces.append(request[max(0, stream.at - 5) : max(0, stream.at + size - 5)])
            stream.at += size
            stream.window -= size
            self._window -= size
        self._write(b"".join(pieces))
        return stream.at < total

    def _expire(self) -> None:
        """Cancel what is over, and come back for the next."""
        self._timer = None
        now_s = time.monotonic()
        while self._in_time and (self._in_time[0].id < 0 or self._in_time[0].deadline_s <= now_s):
            stream = self._in_time.popleft()
            if stream.id >= 0:
                self._reset(stream)
                self._end(stream, EXPIRED, "the caller's deadline passed")
        if self._in_time:
            self._timer = self._loop.call_later(self._in_time[0].deadline_s - now_s, self._expire)
        self._open_waiting()

    def _reset(self, stream: Stream) -> None:
        if stream.id > 0:
            self._write(http2.frame(Kind.RST_STREAM, 0, stream.id, http2.CANCEL.to_bytes(4, "big")))

    def _end(self, stream: Stream, outcome: str, text: str, timing: str = "") -> None:
        self._streams.pop(stream.id, None)
        if outcome != OK:
            self._samples.setdefault(outcome, text)
        if stream.id >= 0:
            stream.id = -1
            self._ended(stream.index, outcome, timing)

    # ---- receiving

    def _on_headers(self, frame: http2.Frame) -> None:
        stream = self._streams.get(frame.stream)
        if stream is None or not frame.flags & http2.END_STREAM:
            return
        if frame.flags & (http2.PADDED | http2.PRIORITY) or not frame.flags & http2.END_HEADERS:
            raise http2.ProtocolError("the server's trailers are padded, or more than one frame")
        headers = http2.literals(frame.payload)
        status = headers.get(_STATUS, b"2")
        if stream.at < len(stream.request) + 5:
            self._reset(stream)  # refused before it was read: there is no use for the rest
        timing = headers.get(_TIMING, b"").decode() if self._stages else ""
        reason = headers.get(_REASON, b"").decode()
        text = unquote(headers.get(_MESSAGE, b"").decode()) or _NAMES[status]
        self._end(stream, OK if status == b"0" else word(_NAMES[status], reason), text, timing)

    def _on_reset(self, frame: http2.Frame) -> None:
        stream = self._streams.pop(frame.stream, None)
        if stream is None:
            return
        if http2.number(frame.payload) == http2.REFUSED_STREAM:  # never looked at: a gRPC client sends it again, too
            stream.id = stream.at = 0
            self._waiting.appendleft(stream)
        else:
            self._end(
                stream, word(_CODES.get(http2.number(frame.payload), "UNAVAILABLE"), ""), "the server reset the stream"
            )

    def _on_settings(self, frame: http2.Frame) -> None:
        if frame.flags & http2.ACK:
            return
        given = http2.read_settings(frame.payload)
        self._most_streams = given.get(Setting.MAX_CONCURRENT_STREAMS, self._most_streams)
        self._most_bytes = given.get(Setting.MAX_FRAME_SIZE, self._most_bytes)
        more = given.get(Setting.INITIAL_WINDOW_SIZE, self._stream_window) - self._stream_window
        self._stream_window += more
        for stream in self._streams.values():
            stream.window += more
        self._write(http2.frame(Kind.SETTINGS, http2.ACK, 0))
        self.greeted.set()

    def _on_ping(self, frame: http2.Frame) -> None:
        if not frame.flags & http2.ACK:
            self._write(http2.frame(Kind.PING, http2.ACK, 0, frame.payload))

    def _on_window(self, frame: http2.Frame) -> None:
        more = http2.number(frame.payload)
        if not frame.stream:
            self._window += more
        elif frame.stream in self._streams:
            self._streams[frame.stream].window += more

    def _on_data(self, frame: http2.Frame) -> None:
        self._taken += len(frame.payload)
        if self._taken >= _GIVE_BACK:
            self._write(http2.frame(Kind.WINDOW_UPDATE, 0, 0, self._taken.to_bytes(4, "big")))
            self._taken = 0


_HANDLERS: dict[int, Callable[[_Connection, http2.Frame], None]] = {
    Kind.DATA: _Connection._on_data,  # noqa: SLF001 - a table of its own methods
    Kind.HEADERS: _Connection._on_headers,  # noqa: SLF001
    Kind.RST_STREAM: _Connection._on_reset,  # noqa: SLF001
    Kind.SETTINGS: _Connection._on_settings,  # noqa: SLF001
    Kind.PING: _Connection._on_ping,  # noqa: SLF001
    Kind.WINDOW_UPDATE: _Connection._on_window,  # noqa: SLF001
}
