"""The one place between gRPC and every method of ours: parse, time limit, error table, trailing metadata, counting.

gRPC's own interceptor interface costs a coroutine per call and sees neither the message nor the answer; these wrappers
are built once per method at start instead. Methods get raw bytes, so that a malformed message is the caller's fault
(INVALID_ARGUMENT) and not gRPC's UNKNOWN.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError

from gateway.api import status
from gateway.api.outcomes import OK, Outcomes
from gateway.api.wire import malformed
from gateway.request import StageTimes, late_s
from shared.clock import FOREVER_S, now_s
from shared.errors import Code, DeadlineExceeded, HeadraceError, InternalFault, TooLarge
from shared.logs import get_logger
from shared.settings import GatewaySettings

_log = get_logger()

Context = grpc.aio.ServicerContext[Any, Any]
_Message = TypeVar("_Message")
_Message_co = TypeVar("_Message_co", covariant=True)


class Parse(Protocol[_Message_co]):
    """A generated message's `FromString`."""

    def __call__(self, serialized: bytes, /) -> _Message_co:
        """Raises DecodeError."""


class Call:
    """One call as its method sees it; the method fills `request_id` and `times` for the trailing metadata."""

    __slots__ = ("arrived_s", "context", "limit_s", "request_id", "times")

    def __init__(self, context: Context, arrived_s: float, limit_s: float) -> None:
        self.context = context
        self.arrived_s = arrived_s
        """Seconds, monotonic."""
        self.limit_s = limit_s
        """Seconds from the arrival that the whole call may take."""
        self.request_id = ""
        self.times: StageTimes | None = None

    @property
    def deadline_s(self) -> float:
        """Absolute, monotonic."""
        return self.arrived_s + self.limit_s

    def trailers(self) -> status.Trailers:
        """Sent with every answer, also with a failure."""
        if self.times is None:
            return ((status.REQUEST_ID, self.request_id),) if self.request_id else ()
        return ((status.REQUEST_ID, self.request_id), (status.SERVER_TIMING, self.times.server_timing()))

    def left_reason(self) -> str:
        """Why a call was cancelled: its time was over (gRPC cancels then, too), or the caller went away."""
        late = now_s() >= late_s(self.arrived_s, self.deadline_s)
        return Code.DEADLINE_EXCEEDED.value if late else Code.CANCELLED.value


def _remaining_s(context: Context) -> float | None:
    """Seconds until the call's gRPC deadline; None when it has none (the stubs' type leaves that out)."""
    return context.time_remaining()


class RequestIds:
    """Ids for calls that bring none: random per process, counted per call, 16 hexadecimal digits."""

    def __init__(self) -> None:
        self._prefix = os.urandom(4).hex()
        self._next = itertools.count(1)

    def __call__(self) -> str:
        """The next id."""
        return f"{self._prefix}{next(self._next) & 0xFFFFFFFF:08x}"


class Gate(Protocol):
    """Knows without a call's message whether anything could be done for it; `gateway/gate.py` implements it."""

    def refusal(self, budget_s: float, reading: int, now_s: float) -> HeadraceError | None:
        """Why nothing could; None: read it. `budget_s` seconds are left for the call; `reading` others passed."""

    def expired(self) -> None:
        """A call's time was over before anything was done for it."""


class Refusal(NamedTuple):
    """How a call ends that is not served: what gRPC's `abort` takes."""

    code: grpc.StatusCode
    text: str
    trailers: status.Trailers


class Edge:
    """Wraps methods. One per server, built at start."""

    def __init__(self, settings: GatewaySettings, outcomes: Outcomes, gate: "Gate | None" = None) -> None:
        self.settings = settings
        self.outcomes = outcomes
        self._gate = gate
        self.make_id = RequestIds()
        self._default_s = settings.default_deadline_ms / 1e3
        self._most_s = settings.max_deadline_ms / 1e3

    def check_time(self, call: Call) -> None:
        """Raises DeadlineExceeded when the call arrived too late already."""
        if call.limit_s <= 0:
            self.outcomes.refused_unread(Code.DEADLINE_EXCEEDED)
            raise DeadlineExceeded("the call's deadline had passed when it arrived")

    def parse(self, parse: Parse[_Message], raw: bytes) -> _Message:
        """Raises TooLarge and InvalidInput."""
        if len(raw) > self.settings.max_message_bytes:
            raise TooLarge(
                f"the request message has {len(raw)} bytes; the limit is {self.settings.max_message_bytes} "
                "(gateway.max_message_bytes)"
            )
        try:
            return parse(raw)
        except DecodeError:
            raise malformed() from None

    def unary(
        self, method: str, parse: Parse[_Message], serve: Callable[[_Message, Call], Awaitable[bytes]]
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """A unary method: `serve` takes the parsed message and returns the serialised answer."""

        async def handle(raw: bytes, context: Context) -> bytes:
            arrived_s = now_s()
            remaining_s = _remaining_s(context)
            call = Call(context, arrived_s, self._default_s if remaining_s is None else min(remaining_s, self._most_s))
            self.outcomes.started()
            try:
                self.check_time(call)
                serving = serve(self.parse(parse, raw), call)
                raw = b""  # what the message has become is enough
                answer = await serving
                context.set_trailing_metadata(call.trailers())
            except asyncio.CancelledError:
                self.outcomes.ended(method, call.left_reason())
                raise
            except Exception as error:  # noqa: BLE001 - the last line: whatever it is, the caller gets a status
                failure = self.foreseen(error, method, call)
            else:
                self.outcomes.ended(method, OK)
                return answer
            self.outcomes.ended(method, failure.code.value)
            refusing = self.refuse(failure, call)
            raw = b""
            del context, call, failure  # gRPC keeps how the call was ended, and with it this frame: see `refuse`
            return await refusing

        return grpc.unary_unary_rpc_method_handler(handle)

    def unread(self, method: str, context: Context, reading: int) -> Refusal | None:
        """Ask the gate whether a call of a unary method can be served at all, before its message is read.

        Counts the call as ended when it can't; its message then never becomes a Python object. `reading` calls passed
        the gate before it, and their messages are on the way.
        """
        if self._gate is None:
            return None
        remaining_s = _remaining_s(context)
        limit_s = self._default_s if remaining_s is None else min(remaining_s, self._most_s)
        failure = self._gate.refusal(limit_s, reading, now_s())
        if failure is None:
            return None
        self.outcomes.started()
        self.outcomes.ended(method, failure.code.value)
        return self._refusal(failure, ((status.REQUEST_ID, self.make_id()),))

    def expired(self, method: str) -> None:
        """A call's time was over before it was begun; count it."""
        if self._gate is not None:
            self._gate.expired()
        self.outcomes.started()
        self.outcomes.ended(method, Code.DEADLINE_EXCEEDED.value)

    def _refusal(self, failure: HeadraceError, trailers: status.Trailers) -> Refusal:
        text = status.sentence(failure)
        return Refusal(status.TABLE[failure.code].grpc, text, trailers + status.error_trailers(failure, text))

    def stream(self, method: str, serve: Callable[[Call], Awaitable[None]]) -> "grpc.RpcMethodHandler[Any, Any]":
        """A bidirectional method: `serve` reads and writes raw bytes through `call.context`."""

        async def handle(_requests: object, context: Context) -> None:
            remaining_s = _remaining_s(context)
            call = Call(context, now_s(), FOREVER_S if remaining_s is None else remaining_s)
            call.request_id = self.make_id()
            failure = await self._failure_of(method, call, lambda: serve(call))
            if failure is not None:
                refusing = self.refuse(failure, call)
                del context, call, failure  # as above
                await refusing

        return grpc.stream_stream_rpc_method_handler(handle)

    def growing(
        self, method: str, parse: Parse[_Message], serve: Callable[[_Message, Call], Awaitable[None]]
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """A method with one request and a stream of answers: `serve` writes raw bytes through `call.context`."""

        async def handle(raw: bytes, context: Context) -> None:
            remaining_s = _remaining_s(context)
            limit_s = self._default_s if remaining_s is None else min(remaining_s, self._most_s)
            call = Call(context, now_s(), limit_s)

            async def grow() -> None:
                self.check_time(call)
                await serve(self.parse(parse, raw), call)

            failure = await self._failure_of(method, call, grow)
            if failure is not None:
                refusing = self.refuse(failure, call)
                raw = b""
                del context, call, failure, grow  # as above
                await refusing

        return grpc.unary_stream_rpc_method_handler(handle)

    async def _failure_of(self, method: str, call: Call, serve: Callable[[], Awaitable[None]]) -> HeadraceError | None:
        """Serve a call that writes its own answers, and count its end; what it is to be refused for, if anything."""
        self.outcomes.started()
        try:
            await serve()
            call.context.set_trailing_metadata(call.trailers())
        except asyncio.CancelledError:
            self.outcomes.ended(method, call.left_reason())
            raise
        except Exception as error:  # noqa: BLE001 - the last line: whatever it is, the caller gets a status
            failure = self.foreseen(error, method, call)
        else:
            self.outcomes.ended(method, OK)
            return None
        self.outcomes.ended(method, failure.code.value)
        return failure

    def foreseen(self, error: Exception, method: str, call: Call) -> HeadraceError:
        """The error itself when it is one of ours; otherwise INTERNAL with fixed text, the trace only in the log."""
        if not call.request_id:
            call.request_id = self.make_id()
        if isinstance(error, HeadraceError) and not isinstance(error, InternalFault):
            return status.bare(error)
        _log.error("call failed unexpectedly", method=method, request_id=call.request_id, exc_info=error)
        return InternalFault()

    async def refuse(self, failure: HeadraceError, call: Call) -> NoReturn:
        """End the call with the failure's status. Always raises (gRPC's AbortError).

        gRPC's state of the call keeps the AbortError, and that keeps the frames that it went through. Nothing in them
        may lead to the call when it is raised: the ring would keep the message until the garbage collector runs.
        """
        aborting = call.context.abort(*self._refusal(failure, call.trailers()))
        del call, failure
        try:
            await aborting
        except grpc.aio.InternalError:  # the caller left meanwhile: nobody to tell, and nothing for the log
            raise asyncio.CancelledError from None
        raise AssertionError("gRPC's abort always raises")

    async def parsed(
        self, parse: Parse[_Message], requests: AsyncIterable[bytes], context: Context
    ) -> AsyncIterator[_Message]:
        """A stream's messages, for services that are not ours (reflection); a malformed one ends the call."""
        async for raw in requests:
            try:
                message = self.parse(parse, raw)
            except HeadraceError as error:
                await self.refuse(error, Call(context, now_s(), FOREVER_S))
            yield message
