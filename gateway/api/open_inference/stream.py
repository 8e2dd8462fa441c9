"""ModelStreamInfer: many requests over one call, answered in their order; a failed one is an answer, too."""

import asyncio
from typing import Protocol

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


class StreamAnswers(Protocol):
    """Works on one request of a stream."""

    async def stream_answer(self, received: Received, call: Call, transport_s: float | None) -> bytes:
        """The serialised answer. `transport_s` is the stream's absolute deadline. Raises HeadraceError."""


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
        self._in_order: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue()  # None: reading has ended
        self._tasks: set[asyncio.Task[bytes]] = set()
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
        task = asyncio.create_task(self._work(raw, arrived_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._in_order.put_nowait(task)

    async def _write_all(self) -> None:
        while (task := await self._in_order.get()) is not None:
            await self._call.context.write(await task)
            self._bunch.answered()
            self._places.release()

    async def _drop_all(self, reader: asyncio.Task[None]) -> None:
        self._bunch.drop()
        left = [task for task in (reader, *self._tasks) if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    async def _work(self, raw: bytes, arrived_s: float) -> bytes:
        """One request to its one answer."""
        call, request_id = Call(self._call.context, arrived_s, 0.0), ""
        try:
            received = self._edge.parse(grpc_wire.parse, raw)
            request_id = received.message.id
            whole_s = self._call.limit_s
            transport_s = None if whole_s >= FOREVER_S else self._call.deadline_s
            answer = await self._service.stream_answer(received, call, transport_s)
            reason = OK
        except asyncio.CancelledError:
            self._edge.outcomes.answered(METHOD + ".answer", self._call.left_reason())
            raise
        except Exception as error:  # noqa: BLE001 - one request of many: its failure is an answer, the stream goes on
            failure = self._edge.foreseen(error, METHOD, call)
            answer = grpc_codec.stream_error(request_id, status.sentence(failure) or failure.code.value)
            reason = failure.code.value
        self._edge.outcomes.answered(METHOD + ".answer", reason)
        return answer
