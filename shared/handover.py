"""The greeting between worker and gateway, and the stream whose end tells each of the other's death.

A worker connects to the one stable socket of the runtime folder, says `Hello`, and gets `Welcome` with the arena's file
descriptor, or `Refused`. The stream then stays open without traffic: the kernel closes it the moment either process
dies, so both know at once and no heartbeat is needed.

`Welcomer` runs on the gateway's event loop; `Knock` is the worker's side, whose loop serves other gateways meanwhile.
"""

import asyncio
import contextlib
import logging
import os
import select
import socket
import struct
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self, TypeAlias

import msgspec

from shared.clock import now_s
from shared.messages import PROTOCOL_VERSION, Hello, Refused, Welcome

_LENGTH = 4
"""Bytes before each message: its length, little endian."""
_MAX_MESSAGE = 4096
"""A greeting is a few names and numbers."""
_MAX_FDS = 4
"""Descriptors taken from one answer; it carries one."""
_HELLO_LIMIT_S = 2.0
"""A worker says Hello right after it connected; a peer that does not is cut off."""
_MAX_GREETING = 32
"""Connections that have not said Hello yet; more are closed at once, so that silent peers can't fill the table."""

_REST_LIMIT_S = 0.1
"""An answer comes in one piece; whoever sends only its beginning gets no longer than this."""

OnHello: TypeAlias = Callable[[Hello, int], Welcome | Refused]
"""(hello, the peer's pid by the kernel's word) → the answer. A Welcome's identity is one never used before."""

_log = logging.getLogger(__name__)


class Refusal(Exception):
    """The gateway does not want this worker; the text says why, for the log."""


class Welcomer:
    """The gateway's side. Every welcomed identity gets exactly one `on_lost`, unless the gateway itself closes."""

    def __init__(self, path: Path, arena_fd: int, on_hello: OnHello, on_lost: Callable[[bytes], None]) -> None:
        """Listen on `path` from `start` on; the descriptor stays the arena's. What the callbacks raise is logged."""
        self._path = path
        self._arena_fd = arena_fd
        self._on_hello = on_hello
        self._on_lost = on_lost
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._greeting = 0
        self._streams: dict[bytes, socket.socket] = {}
        self.bad_greetings = 0
        """Connections that were of another user, silent, or did not speak the protocol."""

    async def start(self) -> None:
        """Bind (mode 0600) and listen. The caller holds the gateway's lock, so a socket file found here is dead."""
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(os.fspath(self._path))
            self._path.chmod(0o600)
            listener.listen(_MAX_GREETING)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        loop = asyncio.get_running_loop()
        self._spawn(loop, self._accept(loop, listener))

    def drop(self, identity: bytes) -> None:
        """End this worker's stream: the worker sees the gateway gone, `on_lost` follows as for a death."""
        stream = self._streams.get(identity)
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        """Stop listening and end all streams, without `on_lost`. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._path.unlink(missing_ok=True)
            self._listener.close()
            self._listener = None

    def _spawn(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        while True:
            try:
                stream, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors: the backlog keeps the peer until there are some
                _log.warning("can't take a worker's connection: %s", error.strerror)
                await asyncio.sleep(0.1)
                continue
            if self._greeting >= _MAX_GREETING or peer_of(stream)[1] != os.getuid():
                self.bad_greetings += 1
                stream.close()
            else:
                self._greeting += 1
                task = self._spawn(loop, self._serve(loop, stream))
                # In a callback, since a task that is cancelled before its first step runs no `finally`.
                task.add_done_callback(lambda _, stream=stream: stream.close())  # type: ignore[misc]  # binds it now

    async def _serve(self, loop: asyncio.AbstractEventLoop, stream: socket.socket) -> None:
        stream.settimeout(0)
        identity = await self._greet(loop, stream)
        if identity is None:
            return
        self._streams[identity] = stream
        try:
            await _end_of(loop, stream)
        finally:
            del self._streams[identity]
        stream.close()
        self._call_lost(identity)

    async def _greet(self, loop: asyncio.AbstractEventLoop, stream: socket.socket) -> bytes | None:
        """The welcomed worker's identity, or None when it is not welcome."""
        try:
            async with asyncio.timeout(_HELLO_LIMIT_S):
                hello = await _read_hello(loop, stream)
            answer = self._answer(hello, peer_of(stream)[0])
        except (OSError, EOFError, TimeoutError):
            self.bad_greetings += 1
            return None
        except Exception:  # noqa: BLE001 - a bug in the callback must not end the greeting of others
            _log.exception("a worker could not be welcomed")
            return None
        finally:
            self._greeting -= 1
        sent = _send_answer(stream, answer, self._arena_fd)
        if isinstance(answer, Refused):
            return None
        if not sent:
            self._call_lost(answer.identity)
            return None
        return answer.identity

    def _answer(self, hello: Hello | None, pid: int) -> Welcome | Refused:
        if hello is None or hello.protocol_version != PROTOCOL_VERSION:
            self.bad_greetings += 1
            spoken = "another protocol" if hello is None else f"protocol version {hello.protocol_version}"
            return Refused(f"the worker speaks {spoken}, the gateway version {PROTOCOL_VERSION}: use one release")
        answer = self._on_hello(hello, pid)
        if isinstance(answer, Welcome) and answer.identity in self._streams:
            return Refused(f"{hello.worker} is connected already")
        return answer

    def _call_lost(self, identity: bytes) -> None:
        try:
            self._on_lost(identity)
        except Exception:  # noqa: BLE001 - as above
            _log.exception("the loss of a worker could not be handled")

    def __repr__(self) -> str:
        return f"<Welcomer workers={sorted(self._streams)} bad={self.bad_greetings}>"


class Greeting:
    """A worker's successful greeting: owns the arena's descriptor and the stream."""

    def __init__(self, welcome: Welcome, arena_fd: int, stream: socket.socket) -> None:
        self.welcome = welcome
        self.arena_fd = arena_fd
        self.stream = stream

    def fileno(self) -> int:
        """Becomes readable when the gateway is gone; for `Dealer.receive(watch=…)`."""
        return self.stream.fileno()

    def gateway_alive(self) -> bool:
        """False once the stream has ended. Never blocks."""
        return not _readable(self.stream)

    def close(self) -> None:
        """Close stream and descriptor: the gateway takes this worker for lost. Idempotent."""
        self.stream.close()
        if self.arena_fd >= 0:
            os.close(self.arena_fd)
            self.arena_fd = -1


class Knock:
    """A worker's greeting under way: Hello is said, the answer has not come. Owns the stream until the answer."""

    def __init__(self, stream: socket.socket) -> None:
        """Use `at`."""
        self._stream = stream

    @classmethod
    def at(cls, path: Path, hello: Hello) -> Self | None:
        """Say Hello to the gateway at `path`; None when nobody is there. Never blocks. Raises Refusal."""
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            stream.connect(os.fspath(path))
            foreign = peer_of(stream)[1] != os.getuid()
            if not foreign:
                stream.sendall(_framed(hello))  # into an empty socket buffer
        except OSError:
            stream.close()
            return None
        if foreign:
            stream.close()
            raise Refusal("the gateway's socket belongs to another user")
        return cls(stream)

    def fileno(self) -> int:
        """Becomes readable when the gateway has answered, or is gone. How long to wait is the caller's business."""
        return self._stream.fileno()

    def answered(self) -> bool:
        """Whether there is something to read. Never blocks."""
        return _readable(self._stream)

    def answer(self) -> Greeting | None:
        """The answer, once there is something to read; None when there was no more than an end. Raises Refusal."""
        fds: list[int] = []
        stream = self._stream
        try:
            answer = _read_answer(stream, now_s() + _REST_LIMIT_S, fds)
            if isinstance(answer, Welcome) and answer.protocol_version == PROTOCOL_VERSION and len(fds) == 1:
                stream.settimeout(0)
                return Greeting(answer, fds.pop(), socket.socket(fileno=stream.detach()))
            raise Refusal(answer.reason if isinstance(answer, Refused) else "the gateway speaks another protocol")
        except (OSError, EOFError):
            return None
        finally:
            stream.close()
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Give up. Idempotent."""
        self._stream.close()


def _readable(stream: socket.socket) -> bool:
    poller = select.poll()
    poller.register(stream, select.POLLIN)
    return bool(poller.poll(0))


def _framed(message: Hello | Welcome | Refused) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_LENGTH, "little") + body


def peer_of(stream: socket.socket) -> tuple[int, int]:
    """(pid, uid) of a Unix stream's other end, by the kernel's word. Raises OSError."""
    pid, uid, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


async def _read_hello(loop: asyncio.AbstractEventLoop, stream: socket.socket) -> Hello | None:
    """None when it is no Hello. Raises EOFError."""
    size = int.from_bytes(await _read_exactly(loop, stream, _LENGTH), "little")
    if size > _MAX_MESSAGE:
        return None
    body = await _read_exactly(loop, stream, size)
    try:
        return msgspec.msgpack.decode(body, type=Hello)
    except (msgspec.MsgspecError, ValueError):
        return None


async def _read_exactly(loop: asyncio.AbstractEventLoop, stream: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = await loop.sock_recv(stream, size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


async def _end_of(loop: asyncio.AbstractEventLoop, stream: socket.socket) -> None:
    """Return when the other side is gone; a worker says nothing after Hello, so what it says ends the stream, too."""
    with contextlib.suppress(OSError):
        await loop.sock_recv(stream, 1)


def _send_answer(stream: socket.socket, answer: Welcome | Refused, arena_fd: int) -> bool:
    # A few hundred bytes into an empty socket buffer: this can't block, so it needs no waiting.
    fds = [arena_fd] if isinstance(answer, Welcome) else []
    frame = _framed(answer)
    try:
        return socket.send_fds(stream, [frame], fds) == len(frame)
    except OSError:
        return False


def _read_answer(stream: socket.socket, until_s: float, fds: list[int]) -> Welcome | Refused | None:
    """The answer, None when it is none; adds received descriptors to `fds`. Raises OSError, EOFError."""
    data = b""
    while True:
        stream.settimeout(max(0.001, until_s - now_s()))
        part, control, _, _ = stream.recvmsg(
            _LENGTH + _MAX_MESSAGE, socket.CMSG_SPACE(4 * _MAX_FDS), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, attached in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds += struct.unpack(f"{len(attached) // 4}i", attached)
        if not part:
            raise EOFError
        data += part
        size = int.from_bytes(data[:_LENGTH], "little")
        if len(data) >= _LENGTH and (size > _MAX_MESSAGE or len(data) >= _LENGTH + size):
            break
    try:
        return msgspec.msgpack.decode(data[_LENGTH:], type=Welcome | Refused)
    except (msgspec.MsgspecError, ValueError):
        return None
