"""PredictStream: one task reads, one task a request works, the call's own task writes answers as they finish."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import grpc

from gateway.api.bunch import Bunch
from gateway.api.interceptors import Call, Edge
from gateway.api.outcomes import OK
from gateway.api.status import error_message
from protos.headrace.v1 import inference_pb2 as pb
from shared.clock import now_s
from shared.errors import Cancelled, Draining
from shared.settings import GatewaySettings

METHOD = "PredictStream"


class StreamAnswers(Protocol):
    """Works on one request of a stream."""

    async def stream_answer(self, message: pb.PredictRequest, call: Call) -> pb.PredictResponse:
        """Raises HeadraceError."""


class Stoppable(Protocol):
    """An open stream of any service."""

    def stop_reading(self) -> None:
        """Take no more requests; what was read is still answered."""


class Drain:
    """Tells all open streams that the server is stopping. Event loop only."""

    def __init__(self) -> None:
        self.started = False
        self.is_over = False
        """The server has waited as long as it may."""
        self._streams: set[Stoppable] = set()
        self._waited_for: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Every stream stops reading, answers what it has, and ends with UNAVAILABLE."""
        self.started = True
        for stream in tuple(self._streams):
            stream.stop_reading()

    def end(self) -> None:
        """What still runs under `waits_for` ends with UNAVAILABLE: without it the closed connection would say less."""
        self.is_over = True
        for task in tuple(self._waited_for):
            task.cancel()

    @contextmanager
    def waits_for(self) -> Iterator[None]:
        """Around work of the current task that a stop lets finish, if it does so in time. Raises Draining otherwise."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a call is answered in a task of its own")
        self._waited_for.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self.is_over:
                raise
            task.uncancel()
            raise Draining("the server is stopping and can't wait for the rest of this call") from None
        finally:
            self._waited_for.discard(task)

    def add(self, stream: Stoppable) -> None:
        """The stream is open."""
        self._streams.add(stream)
        if self.started:
            stream.stop_reading()

    def discard(self, stream: Stoppable) -> None:
        """The stream has ended."""
        self._streams.discard(stream)


class Stream:
    """One open PredictStream.

    At most `gateway.stream_in_flight` requests are between read and written: a place is taken before a read and given
    back after the write, so a slow reader of answers stops our reading (HTTP/2 flow control), and the queue of finished
    answers has the same bound.
    """

    def __init__(
        self, inference: StreamAnswers, edge: Edge, call: Call, settings: GatewaySettings, drain: Drain
    ) -> None:
        self._inference = inference
        self._edge = edge
        self._call = call
        self._settings = settings
        self._drain = drain
        self._places = asyncio.Semaphore(settings.stream_in_flight)
        self._bunch: Bunch[pb.PredictStreamRequest] = Bunch(self._begin)
        self._finished: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: reading has ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until the caller's half-close is answered. Leaving early (cancel, error) drops all work of the stream."""
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(lambda _: self._finished.put_nowait(None))
        self._drain.add(self)
        try:
            with self._drain.waits_for():
                await self._write_all(self._reader)
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
                bunch.add(self._edge.parse(pb.PredictStreamRequest.FromString, raw), len(raw), now_s())
        finally:
            bunch.flush()

    def _begin(self, message: pb.PredictStreamRequest, arrived_s: float) -> None:
        task = asyncio.create_task(self._work(message, arrived_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write_all(self, reader: asyncio.Task[None]) -> None:
        while self._bunch.open or not reader.done():
            answer = await self._finished.get()
            if answer is not None:
                await self._call.context.write(answer)
                self._bunch.answered()
                self._places.release()
            elif not reader.cancelled():
                reader.result()  # raises what ended the reading when it was not the caller's half-close

    async def _drop_all(self, reader: asyncio.Task[None]) -> None:
        self._bunch.drop()
        left = [task for task in (reader, *self._tasks) if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    async def _work(self, message: pb.PredictStreamRequest, arrived_s: float) -> None:
        """One request to its one answer."""
        call = Call(self._call.context, arrived_s, 0.0)
        answer = pb.PredictStreamResponse(id=message.id)
        try:
            call.limit_s = self._limit_s(message, arrived_s)
            self._edge.check_time(call)
            answer.response.CopyFrom(await self._inference.stream_answer(message.request, call))
            reason = OK
        except asyncio.CancelledError:
            self._edge.outcomes.answered(METHOD + ".answer", call.left_reason())
            raise
        except Exception as error:  # noqa: BLE001 - one request of many: its failure is an answer, the stream goes on
            failure = self._edge.foreseen(error, METHOD, call)
            answer.error.CopyFrom(error_message(failure))
            reason = failure.code.value
        if call.times is not None:
            answer.server_timing = call.times.server_timing()
        self._edge.outcomes.answered(METHOD + ".answer", reason)
        self._finished.put_nowait(answer.SerializeToString())

    def _limit_s(self, message: pb.PredictStreamRequest, arrived_s: float) -> float:
        """Seconds for this request: its own time limit, but never past the stream's gRPC deadline."""
        settings = self._settings
        asked_ms = min(message.timeout_ms or settings.default_deadline_ms, settings.max_deadline_ms)
        return min(asked_ms / 1e3, self._call.deadline_s - arrived_s)
