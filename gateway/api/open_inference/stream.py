"""ModelStreamInfer: many requests over one call, answered in their order; a failed one is an answer, too.

A text has many answers, sent while it grows: they come in between, and keep no other request's answer waiting.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

import grpc

from gateway.api import status
from gateway.api.bunch import Bunch
from gateway.api.interceptors import Call, Edge
from gateway.api.native_stream import Drain
from gateway.api.open_inference import grpc_codec, grpc_wire
from gateway.api.open_inference.grpc_wire import Received
from gateway.api.outcomes import OK
from shared.clock import FOREVER_S, now_s
from shared.errors import Cancelled, Draining
from shared.settings import GatewaySettings

METHOD = "ModelStreamInfer"
Turn: TypeAlias = "asyncio.Future[bytes | None]"
"""A request's answer, for when those before it are written; None: it writes its own."""


class Growth:
    """Where the answers of one text go."""

    def __init__(self, turn: Turn, write: Callable[[bytes], Awaitable[None]]) -> None:
        self._turn = turn
        self.write = write
        """Takes a serialised answer."""

    def begins(self) -> None:
        """No answer of another request has to wait for it from here on."""
        self._turn.set_result(None)


class StreamAnswers(Protocol):
    """Works on one request of a stream."""

    async def stream_answer(
        self, received: Received, call: Call, transport_s: float | None, growth: Growth
    ) -> bytes | None:
        """The serialised answer, or None when `growth` has taken all answers. Raises HeadraceError.

        `transport_s` is the stream's absolute deadline.
        """


class InferStream:
    """One open stream.

    At most `gateway.stream_in_flight` requests are between read and written: a place is taken before a read and given
    back after the write, so a slow reader of answers stops our reading (HTTP/2 flow control), and the queue of answers
    in their order has the same bound.
    """

    def __init__(self, service: StreamAnswers, edge: Edge, call: Call, settings: GatewaySettings, drain: Drain) -> None:
        self._service = service
        self._edge = edge
        self._call = call
        self._drain = drain
        self._places = asyncio.Semaphore(settings.stream_in_flight)
        self._in_order: asyncio.Queue[Turn | None] = asyncio.Queue()  # None: reading has ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._bunch: Bunch[bytes] = Bunch(self._begin)

    async def run(self) -> None:
        """Until the caller's half-close is answered. Leaving early (cancel, error) drops all work of the stream."""
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(lambda _: self._in_order.put_nowait(None))
        self._drain.add(self)
        try:
            await self._write_all()
            if not self._reader.cancelled():
                self._reader.result()  # raises what ended the reading when it was not the caller's half-close
        except grpc.aio.BaseError:
            raise Cancelled("the caller has left") from None
        finally:
            self._drain.discard(self)
            await self._drop_all(self._reader)
        if self._drain.started:
            raise Draining("the server is stopping; open the stream again elsewhere")

    def stop_reading(self) -> None:
        """Take no more requests; what was read is still answered."""
        if self._reader is not None:
            self._reader.cancel()

    async def _read(self) -> None:
        read, bunch = self._call.context.read, self._bunch
        try:
            while True:
                await self._places.acquire()
                raw = await read()
                if raw is grpc.aio.EOF:
                    return
                bunch.add(raw, len(raw), now_s())
        finally:
            bunch.flush()

    def _begin(self, raw: bytes, arrived_s: float) -> None:
        turn: Turn = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._work(raw, arrived_s, turn))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._in_order.put_nowait(turn)

    async def _write_all(self) -> None:
        while (turn := await self._in_order.get()) is not None:
            answer = await turn
            if answer is not None:
                await self._write_last(answer)
        for growing in list(self._tasks):
            await growing

    async def _write(self, answer: bytes) -> None:
        async with self._writing:
            await self._call.context.write(answer)

    async def _write_last(self, answer: bytes) -> None:
        """A request's last answer: there is room for one request more."""
        await self._write(answer)
        self._answered()

    def _break(self, error: grpc.aio.BaseError) -> None:
        """Nothing can be written any more."""
        turn: Turn = asyncio.get_running_loop().create_future()
        turn.set_exception(error)
        self._in_order.put_nowait(turn)

    def _answered(self) -> None:
        self._bunch.answered()
        self._places.release()

    async def _drop_all(self, reader: asyncio.Task[None]) -> None:
        self._bunch.drop()
        left = [task for task in (reader, *self._tasks) if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    async def _work(self, raw: bytes, arrived_s: float, turn: Turn) -> None:
        """One request to its one answer, or to all answers of a text."""
        call, request_id = Call(self._call.context, arrived_s, 0.0), ""
        try:
            received = self._edge.parse(grpc_wire.parse, raw)
            request_id = received.message.id
            whole_s = self._call.limit_s
            transport_s = None if whole_s >= FOREVER_S else self._call.deadline_s
            with self._drain.waits_for():
                answer = await self._service.stream_answer(received, call, transport_s, Growth(turn, self._write))
            reason = OK
        except asyncio.CancelledError:
            self._edge.outcomes.answered(METHOD + ".answer", self._call.left_reason())
            raise
        except grpc.aio.BaseError as error:  # of a write: the caller has gone, and with it the stream
            self._edge.outcomes.answered(METHOD + ".answer", self._call.left_reason())
            self._break(error)
            return
        except Exception as error:  # noqa: BLE001 - one request of many: its failure is an answer, the stream goes on
            failure = self._edge.foreseen(error, METHOD, call)
            answer = grpc_codec.stream_error(request_id, status.sentence(failure) or failure.code.value)
            reason = failure.code.value
        self._edge.outcomes.answered(METHOD + ".answer", reason)
        if not turn.done():
            turn.set_result(answer)
        elif answer is not None:  # a text that has failed
            await self._write_last(answer)
        else:
            self._answered()
