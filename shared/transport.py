"""The control plane: typed ZeroMQ channels between the gateway and its pool processes and workers.

The only file that imports zmq. `Router` lives in the gateway, on its event loop; `Dealer` in a pool process or worker,
in a blocking loop. Both speak over `ipc://` sockets in the private runtime folder.

One message is one frame: 8 bytes generation (little endian) and MessagePack. The generation is the gateway's life that
the sender believes in; a frame of another life is dropped and counted, as is everything that does not decode to one of
the declared message types. Nothing that arrives here is ever executed.

ZeroMQ never tells whether a peer lives: that is known from the peer's process or stream (`shared.supervision`,
`shared.handover`). Here a message is queued, or the sender is told at once that it is not.
"""

import asyncio
import atexit
import errno
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from shared.clock import now_s

In = TypeVar("In")
Out = TypeVar("Out")

_HEADER = 8
MAX_FRAME_BYTES = 256 * 1024 * 1024
"""Larger frames cut the connection. Room for the largest batch of inline tensors; payloads lie in the arena."""
SEND_LIMIT_S = 5.0
"""How long a Dealer waits for room. The gateway reads within milliseconds: after this it hangs or is gone."""
_LINGER_MS = 200
"""Answers under way when a socket closes may still leave; a dead peer must not delay the end."""
_HANDSHAKE_MS = 5_000
"""A connection that has not said the ZeroMQ greeting by then is closed."""
_DRAIN_AT_ONCE = 128
"""Messages handled per turn of the event loop (about 1 ms), so that a burst can't starve gRPC."""

_NO_PEER = {errno.EHOSTUNREACH, zmq.ENOTSOCK}
"""Unknown identity, or our own socket is closed already: late work of a gateway that stops."""

_log = logging.getLogger(__name__)


class PeerLost(Exception):
    """The gateway takes no more messages."""


class FrameTooBig(ValueError):
    """A message over the frame limit: sending it would cut the connection, so it is refused here."""


class _Codec(Generic[In, Out]):
    """Frames ⇄ messages, with the counters of what was dropped."""

    def __init__(self, incoming: Any, generation: int) -> None:  # noqa: ANN401 - a union of types has no static type
        self.generation = generation
        self.stale_frames = 0
        self.bad_frames = 0
        self._header = generation.to_bytes(_HEADER, "little")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._buffer = bytearray(self._header)

    def encode(self, message: Out) -> bytearray:
        """The frame, in a buffer that the next call overwrites. Raises FrameTooBig."""
        buffer = self._buffer
        self._encoder.encode_into(message, buffer, _HEADER)
        if len(buffer) > MAX_FRAME_BYTES:
            size = len(buffer)
            self._buffer = bytearray(self._header)
            raise FrameTooBig(f"a message of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
        return buffer

    def decode(self, frame: bytes) -> In | None:
        """The message, or None after counting why not."""
        if frame[:_HEADER] != self._header:
            if len(frame) < _HEADER:
                self.bad_frames += 1
            else:
                self.stale_frames += 1
            return None
        try:
            return self._decoder.decode(memoryview(frame)[_HEADER:])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self.bad_frames += 1
            return None


@functools.cache
def _context() -> zmq.Context[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    # At exit: the last answers leave from a thread of ZeroMQ's, which needs its linger time.
    atexit.register(context.destroy, _LINGER_MS)
    return context


def _socket(kind: int, high_water_mark: int) -> zmq.Socket[bytes]:
    socket = _context().socket(kind)
    # ZeroMQ hands credit back in steps of half the mark, so only half of it can be relied on.
    socket.setsockopt(zmq.SNDHWM, 2 * high_water_mark)
    socket.setsockopt(zmq.RCVHWM, 2 * high_water_mark)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    return socket


class Router(_Codec[In, Out]):
    """The gateway's end: knows its peers by identity. One thread, the event loop's.

    `high_water_mark` messages per peer can always be under way; some multiples of it later `send` returns False.
    """

    def __init__(
        self,
        endpoint: str,
        incoming: Any,  # noqa: ANN401 - a union of types has no static type
        *,
        generation: int,
        high_water_mark: int,
    ) -> None:
        """Bind `endpoint` (`ipc://…`); `incoming` is the union of message types accepted. Raises zmq.ZMQError."""
        super().__init__(incoming, generation)
        self._socket = _socket(zmq.ROUTER, high_water_mark)
        # Without it a message to an unknown identity or a full queue would vanish silently.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._endpoint = endpoint
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[bytes, In], None] | None = None
        self._draining = False
        self._scheduled = False
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._socket.close()
            raise

    def send(self, identity: bytes, message: Out) -> bool:
        """Queue a message. False: no such peer (yet), or its queue is full. Never blocks. Raises FrameTooBig."""
        socket = self._socket
        frame = self.encode(message)
        try:
            socket.send(identity, zmq.SNDMORE | zmq.DONTWAIT)
            socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno not in _NO_PEER:
                raise
            return False
        finally:
            # A send may swallow the edge that would have told of messages waiting to be read.
            if not self._draining and self._loop is not None and int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._schedule(self._loop)
        return True

    def start(self, loop: asyncio.AbstractEventLoop, on_message: Callable[[bytes, In], None]) -> None:
        """Call `on_message(identity, message)` on the loop for everything that arrives. What it raises is logged."""
        self._loop = loop
        self._on_message = on_message
        loop.add_reader(self._fd, self._drain)
        self._schedule(loop)  # what came before this call has spent its edge

    def close(self) -> None:
        """Unbind and stop reading; what is queued may leave for a fifth of a second. Idempotent."""
        if self._socket.closed:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None
        self._socket.close()

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._drain_soon)

    def _drain_soon(self) -> None:
        self._scheduled = False
        self._drain()

    def _drain(self) -> None:
        """Read until empty: the socket's descriptor is edge-triggered and says nothing about what is left unread."""
        if self._loop is None:
            return
        self._draining = True
        try:
            for _ in range(_DRAIN_AT_ONCE):
                if self._socket.closed or not self._read_one():
                    return
        finally:
            self._draining = False
        if self._loop is not None:  # on_message may have closed us
            self._schedule(self._loop)

    def _read_one(self) -> bool:
        """Handle one message; False when there is none."""
        socket = self._socket
        try:
            identity = socket.recv(zmq.DONTWAIT)
        except zmq.Again:
            return False
        frame = socket.recv(zmq.DONTWAIT) if socket.getsockopt(zmq.RCVMORE) else b""
        if socket.getsockopt(zmq.RCVMORE):
            _discard_rest(socket)
            self.bad_frames += 1
            return True
        message = self.decode(frame)
        if message is not None and self._on_message is not None:
            try:
                self._on_message(identity, message)
            except Exception:  # noqa: BLE001 - one bad message must not end the loop for all
                _log.exception("a message handler failed: %s", type(message).__name__)
        return True

    def __repr__(self) -> str:
        return f"<Router {self._endpoint} stale={self.stale_frames} bad={self.bad_frames}>"


class Dealer(_Codec[In, Out]):
    """The end of a pool process or worker: one peer, the gateway. One thread, blocking."""

    def __init__(
        self,
        endpoint: str,
        incoming: Any,  # noqa: ANN401 - a union of types has no static type
        *,
        identity: bytes,
        generation: int,
        high_water_mark: int,
    ) -> None:
        """Connect (in the background) under `identity`; `incoming` is the union of message types accepted."""
        super().__init__(incoming, generation)
        self._socket = _socket(zmq.DEALER, high_water_mark)
        self._socket.setsockopt(zmq.ROUTING_ID, identity)
        # Queue only on a connection that stands: otherwise messages would wait for a gateway that may never come.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDTIMEO, int(SEND_LIMIT_S * 1000))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._watched: tuple[int, ...] = ()
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self._socket.close()
            raise

    def send(self, message: Out) -> None:
        """Queue a message. Raises PeerLost when there was no room for `SEND_LIMIT_S`, FrameTooBig."""
        try:
            self._socket.send(self.encode(message))
        except zmq.Again:
            raise PeerLost(f"the gateway took no message for {SEND_LIMIT_S:g} s") from None

    def try_send(self, message: Out) -> bool:
        """Queue a message; False when there is no room, or no connection yet. Never blocks. Raises FrameTooBig."""
        try:
            self._socket.send(self.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_s: float | None, watch: Sequence[int] = ()) -> In | None:
        """The next message; None after `timeout_s` seconds, or when only a watched file descriptor became ready.

        No time-out waits for ever, 0 only looks. A message comes before a descriptor: look at flags between messages.
        """
        deadline_s = math.inf if timeout_s is None else now_s() + timeout_s
        while True:
            while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # a look is a fraction of a poll
                if (message := self._read_one()) is not None:
                    return message
            if timeout_s == 0:
                return None
            self._watch(tuple(watch))
            ready = dict(self._poller.poll(_milliseconds(deadline_s)))
            if self._socket not in ready and (ready or now_s() >= deadline_s):
                return None

    def close(self) -> None:
        """Disconnect; what is queued may leave for a fifth of a second. Idempotent."""
        self._socket.close()

    def _watch(self, watch: tuple[int, ...]) -> None:
        if watch != self._watched:
            for fd in self._watched:
                self._poller.unregister(fd)
            for fd in watch:
                self._poller.register(fd, zmq.POLLIN)
            self._watched = watch

    def _read_one(self) -> In | None:
        try:
            frame = self._socket.recv(zmq.DONTWAIT)
        except zmq.Again:
            return None
        if self._socket.getsockopt(zmq.RCVMORE):
            _discard_rest(self._socket)
            self.bad_frames += 1
            return None
        return self.decode(frame)

    def __repr__(self) -> str:
        return f"<Dealer generation={self.generation:x} stale={self.stale_frames} bad={self.bad_frames}>"


def wait(dealers: Sequence[Dealer[Any, Any]], watch: Sequence[int], timeout_s: float | None) -> None:
    """Sleep until a dealer has a message, a descriptor is readable, or after `timeout_s` seconds (None: for ever)."""
    waited = [(dealer._socket, zmq.POLLIN) for dealer in dealers]  # noqa: SLF001 - one mechanism
    zmq.zmq_poll(
        [*waited, *((fd, zmq.POLLIN) for fd in watch)], -1 if timeout_s is None else math.ceil(timeout_s * 1e3)
    )


def _discard_rest(socket: zmq.Socket[bytes]) -> None:
    while socket.getsockopt(zmq.RCVMORE):
        socket.recv(zmq.DONTWAIT)


def _milliseconds(deadline_s: float) -> int | None:
    if deadline_s == math.inf:
        return None
    # Rounded up: waking before the deadline would spin.
    return max(0, math.ceil((deadline_s - now_s()) * 1000))
