"""Reads request bodies: limited while they arrive, unpacked where they are compressed. Gateway's event loop only."""

import asyncio
import zlib
from types import TracebackType
from typing import Self

from fastapi import Request

from gateway.api.parse import shown
from shared.errors import Cancelled, DeadlineExceeded, InvalidInput, Overloaded, TooLarge
from shared.settings import Settings

_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_THREAD_BYTES = 64 * 1024
"""Compressed bodies above this are unpacked in a thread: zlib lets the event loop run meanwhile."""


class Bodies:
    """What all requests hold in memory before admission sees them; one per server."""

    def __init__(self, settings: Settings) -> None:
        self.limit = settings.gateway.max_message_bytes
        self._budget = settings.admission.max_bytes + self.limit  # what is admitted, and a little that is on its way
        self.held = 0
        """Bytes of all bodies that are being read or answered."""

    def open(self, request: Request, deadline_s: float) -> "Body":
        """The body of one request, to be used as a context: leaving it gives the memory back."""
        return Body(self, request, deadline_s)

    def take(self, nbytes: int) -> None:
        """Raises Overloaded when there is no room for so much more."""
        if self.held + nbytes > self._budget:
            raise Overloaded(
                f"the bodies of requests on their way have {self.held} bytes; the limit is {self._budget} "
                "(admission.max_bytes + gateway.max_message_bytes)"
            )
        self.held += nbytes


class Body:
    """One request's body."""

    __slots__ = ("_bodies", "_deadline_s", "_held", "_request")

    def __init__(self, bodies: Bodies, request: Request, deadline_s: float) -> None:
        self._bodies = bodies
        self._request = request
        self._deadline_s = deadline_s
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._bodies.held -= self._held
        self._held = 0

    async def read(self) -> bytes:
        """All of it. Raises TooLarge as soon as it is known to be, DeadlineExceeded, Cancelled, InvalidInput."""
        headers = self._request.headers
        declared = headers.get("content-length")
        if declared is not None:
            self._check(int(declared))  # the HTTP server has made sure that it is a number
        body = await self._received()
        encoding = headers.get("content-encoding", "identity").strip().lower()
        return body if encoding == "identity" else await self._unpacked(body, encoding)

    async def _received(self) -> bytes:
        chunks: list[bytes] = []
        more = True
        try:
            async with asyncio.timeout_at(self._deadline_s):  # a caller may send no byte at all
                while more:
                    chunk, more = await self._next()
                    chunks.append(chunk)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the body did not arrive in time: {self._held} bytes came (gateway.default_deadline_ms)"
            ) from None
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _next(self) -> tuple[bytes, bool]:
        message = await self._request.receive()
        if message["type"] != "http.request":
            raise Cancelled("the caller left before the body was complete")
        chunk: bytes = message.get("body", b"")
        self._hold(len(chunk))
        return chunk, message.get("more_body", False)

    def _hold(self, nbytes: int) -> None:
        self._check(self._held + nbytes)
        self._bodies.take(nbytes)
        self._held += nbytes

    def _check(self, nbytes: int) -> None:
        if nbytes > self._bodies.limit:
            raise TooLarge(
                f"the body has {nbytes} bytes or more; the limit is {self._bodies.limit} (gateway.max_message_bytes)"
            )

    async def _unpacked(self, body: bytes, encoding: str) -> bytes:
        bits = _WINDOW_BITS.get(encoding)
        if bits is None:
            raise InvalidInput(f"Content-Encoding is {shown(encoding)}; known: identity, gzip, deflate")
        if len(body) > _THREAD_BYTES:
            unpacked = await asyncio.to_thread(_inflate, body, bits, self._bodies.limit)
        else:
            unpacked = _inflate(body, bits, self._bodies.limit)
        self._hold(len(unpacked) - self._held)
        return unpacked


def _inflate(body: bytes, bits: int, limit: int) -> bytes:
    """At most `limit` bytes are ever made, whatever the stream promises."""
    stream = zlib.decompressobj(bits)
    try:
        unpacked = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise InvalidInput(f"the compressed body can't be unpacked: {error}") from None
    if len(unpacked) > limit:
        raise TooLarge(f"the unpacked body has more than {limit} bytes, the limit (gateway.max_message_bytes)")
    if not stream.eof or stream.unused_data:
        raise InvalidInput("the compressed body is cut short or followed by other bytes")
    return unpacked
