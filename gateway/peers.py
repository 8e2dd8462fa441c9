"""How the gateways of one server talk with each other: one question and one answer per connection, over Unix sockets.

The sockets lie in the private runtime folder. Questions are rare (a scrape, a model loaded by request), so nothing is
kept open, and a gateway that has just died or hangs costs the one who asks no more than its limit.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from gateway.orders import Order
from shared.errors import HeadraceError, InternalFault, rebuild
from shared.handover import peer_of
from shared.logs import get_logger
from shared.messages import Failure
from shared.traffic import Traffic

_LENGTH = 4
_MAX_BYTES = 64 * 1024 * 1024
"""Far above the longest exposition."""
_TALK_LIMIT_S = 5.0
"""For the question, which is said right after the connection was made, and again for whoever asked to take the answer.
Between the two, the answer may take as long as a load."""
_MAX_TALKING = 32
"""Connections on which a question or an answer is under way; more are cut off, so that silent peers can't pile up."""

Verb: TypeAlias = Literal["load", "unload"]

log = get_logger()


class PeerGone(Exception):
    """It is not there, or does not answer in time."""


class Show(msgspec.Struct, tag="show"):
    """Your own metrics or `/debug`. Answered with text, or JSON."""

    what: Literal["metrics", "debug"]


class Control(msgspec.Struct, tag="control"):
    """Load or unload a model."""

    verb: Verb
    model: str
    everywhere: bool
    """Also at all others, in order with whatever else is asked of you; else only at yours."""


class Changes(msgspec.Struct, tag="changes"):
    """What do you know that the disk does not say? Answered with `News`."""


class News(msgspec.Struct):
    """What a gateway that starts is to know."""

    loaded: dict[str, bool] = {}
    """Models that were loaded (true) or unloaded by request so far."""
    unwritten: dict[str, Traffic] = {}
    """By model, as in `Adopt`."""


class Ordered(msgspec.Struct, tag="order"):
    """Change a model's traffic, at all gateways. Answered with the new traffic, without its history."""

    model: str
    order: Order
    by: str


class Prepare(msgspec.Struct, tag="prepare"):
    """Load and prove what this traffic needs, at yours; it is about to be written."""

    model: str
    traffic: Traffic


class Abandon(msgspec.Struct, tag="abandon"):
    """What you were asked to prepare is not going to be written."""

    model: str
    traffic: Traffic


class Adopt(msgspec.Struct, tag="adopt"):
    """Read the model's traffic.json and model.yaml again, at yours."""

    model: str
    unwritten: Traffic | None = None
    """What traffic.json is to say: it is in force, and can't be written yet. Its history: what is new in it."""


class Figures(msgspec.Struct, tag="figures"):
    """What have a model's versions done at yours since its canary started? Answered with a list of VersionFigures."""

    model: str


class Held(msgspec.Struct, tag="held"):
    """Which versions do you hold? Answered with a list of pairs, model and version."""


class Alive(msgspec.Struct, tag="alive"):
    """Do you answer? Answered with nothing."""


Ask: TypeAlias = Alive | Figures | Held | Show | Control | Changes | Ordered | Prepare | Abandon | Adopt


class Answer(msgspec.Struct):
    """The answer to any of them."""

    body: bytes = b""
    failure: Failure | None = None


class PeerServer:
    """Answers the other gateways. Event loop only."""

    def __init__(self, path: Path, answer: Callable[[Ask], Awaitable[bytes]]) -> None:
        """`answer` gives the body, or raises HeadraceError."""
        self._path = path
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._talking = 0

    async def start(self) -> None:
        """Listen (mode 0600). The caller holds the gateway's lock, so a socket file found here is dead."""
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(os.fspath(self._path))
            self._path.chmod(0o600)
            self._server = await asyncio.start_unix_server(self._connected, sock=listener)
        except OSError:
            listener.close()
            raise

    def close(self) -> None:
        """Answer nobody any more. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._path.unlink(missing_ok=True)
        for task in self._tasks:
            task.cancel()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        why = "too many at once" if self._talking >= _MAX_TALKING else None
        if peer_of(writer.get_extra_info("socket"))[1] != os.getuid():
            why = "it is of another user"
        if why is not None:
            log.warning("a connection between gateways was refused", reason=why)
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # In a callback, since a task that is cancelled before its first step runs no `finally`. Not closed, but cut
        # off: all that the other side is to get it has got, and what it does not take must not be kept for it.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with self._talk():
                asked = msgspec.msgpack.decode(await _read(reader), type=Ask)
            answer = await self._answered(asked)
            async with self._talk():
                await _write(writer, answer)
        except (OSError, EOFError, TimeoutError, msgspec.MsgspecError) as error:
            log.warning("a gateway's question was lost", reason=str(error) or type(error).__name__)

    @contextlib.asynccontextmanager
    async def _talk(self) -> AsyncIterator[None]:
        self._talking += 1
        try:
            async with asyncio.timeout(_TALK_LIMIT_S):
                yield
        finally:
            self._talking -= 1

    async def _answered(self, asked: Ask) -> Answer:
        try:
            return Answer(await self._answer(asked))
        except HeadraceError as error:
            return Answer(failure=Failure(error.code, error.text))
        except Exception:
            log.exception("a gateway's question could not be answered")
            return Answer(failure=Failure(InternalFault.code, InternalFault.TEXT))


async def ask(path: Path, question: Ask, limit_s: float) -> bytes:
    """The answer of the gateway at `path`. Raises PeerGone after at most `limit_s` seconds, or its HeadraceError."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_unix_connection(os.fspath(path))
            await _write(writer, question)
            answer = msgspec.msgpack.decode(await _read(reader), type=Answer)
    except (OSError, EOFError, TimeoutError, msgspec.MsgspecError) as error:
        raise PeerGone(f"{path.stem} does not answer: {str(error) or type(error).__name__}") from None
    finally:
        if writer is not None:
            writer.close()
    if answer.failure is not None:
        raise rebuild(answer.failure.code, answer.failure.text)
    return answer.body


async def _read(reader: asyncio.StreamReader) -> bytes:
    """One frame. Raises EOFError, OSError."""
    size = int.from_bytes(await reader.readexactly(_LENGTH), "little")
    if size > _MAX_BYTES:
        raise OSError(f"a frame of {size} bytes")
    return await reader.readexactly(size)


async def _write(writer: asyncio.StreamWriter, message: Ask | Answer) -> None:
    """Until the kernel has all of it."""
    writer.transport.set_write_buffer_limits(high=0)
    body = msgspec.msgpack.encode(message)
    writer.write(len(body).to_bytes(_LENGTH, "little") + body)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
