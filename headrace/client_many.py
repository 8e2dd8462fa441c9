"""Many inputs over one stream, for every task and both clients: what goes out, how much at a time, what comes back."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import grpc

from headrace import client_calls as calls
from headrace import client_errors as errors
from headrace.client_results import Outcome
from protos.headrace.v1 import inference_pb2 as pb
from protos.headrace.v1 import inference_pb2_grpc as pb_grpc

T = TypeVar("T")
Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.PredictStreamRequest, pb.PredictStreamResponse]"


def _itself(given: Any) -> calls.Input:  # noqa: ANN401 - the caller's
    return given  # type: ignore[no-any-return]  # `wire_input` refuses what is none


@dataclass(frozen=True, slots=True)
class Many(Generic[T]):
    """What the requests of one stream have in common."""

    options: Mapping[str, Any]
    """By the names of the contract's `Options`; None: not given."""
    model: str
    in_flight: int
    """Requests on their way at a time; so many inputs are in memory."""
    timeout_s: float
    """Of each request."""
    read: Callable[[pb.PredictResponse, str], T]
    """An answer and its server timing → what the caller gets."""
    as_input: Callable[[Any], calls.Input] = _itself
    """Where what the caller gives is no input yet: a `str` that is text, no path."""
    task: str | None = None
    """That is meant where no model is named; None: the classification that takes such an input."""

    def request(self, index: int, given: object) -> pb.PredictStreamRequest:
        """Reads the file, if it is one. Raises OSError."""
        one = self.as_input(given)
        task = calls.classification_of(one) if self.task is None else self.task
        request = calls.wire_request([one], self.options, model=self.model, task=task)
        return pb.PredictStreamRequest(id=index, request=request, timeout_ms=calls.timeout_ms(self.timeout_s))

    def outcome(self, answer: pb.PredictStreamResponse, given: object) -> Outcome[T]:
        """What became of one input. Raises what `read` raises."""
        if answer.WhichOneof("outcome") == "error":
            return Outcome(answer.id, given, error=errors.from_message(answer.error))
        return Outcome(answer.id, given, result=self.read(answer.response, answer.server_timing))


def outcomes(stub: pb_grpc.InferenceStub, given: Iterable[object], many: Many[T]) -> Iterator[Outcome[T]]:
    """Every input's outcome, in the order in which they finish; leaving the loop early drops the rest.

    Raises InferenceError when the stream itself breaks, and whatever the given iterable raises.
    """
    feed = _Feed(given, many)
    stream = stub.PredictStream(feed)
    try:
        for answer in stream:
            yield feed.outcome(answer)
            yield from feed.unreadable()
        yield from feed.unreadable()
        feed.check()
    except grpc.RpcError as error:
        raise errors.from_call(error.code(), error.details(), error.trailing_metadata()) from error
    finally:
        feed.close()
        stream.cancel()


class _Feed(Iterator[pb.PredictStreamRequest], Generic[T]):
    """The stream's requests, pulled by a thread of gRPC's; waits when enough are in flight."""

    def __init__(self, given: Iterable[object], many: Many[T]) -> None:
        self._given = enumerate(given)
        self._many = many
        self._places = threading.Semaphore(many.in_flight)
        self._sent: dict[int, object] = {}
        self._unreadable: deque[Outcome[T]] = deque()
        self._broken: Exception | None = None
        self._closed = False

    def __next__(self) -> pb.PredictStreamRequest:
        self._places.acquire()
        try:
            request = None if self._closed else self._next_readable()
        except Exception as error:  # noqa: BLE001 - gRPC would swallow it; the caller's thread raises it again
            self._broken = error
            request = None
        if request is None:
            raise StopIteration
        return request

    def _next_readable(self) -> pb.PredictStreamRequest | None:
        for index, one in self._given:
            try:
                request = self._many.request(index, one)
            except OSError as error:
                self._unreadable.append(Outcome(index, one, error=error))
                continue
            self._sent[index] = one
            return request
        return None

    def outcome(self, answer: pb.PredictStreamResponse) -> Outcome[T]:
        """An answer with what was asked; makes room for the next request."""
        self._places.release()
        return self._many.outcome(answer, self._sent.pop(answer.id))

    def unreadable(self) -> Iterator[Outcome[T]]:
        """Files that could not be read, each once."""
        while self._unreadable:
            yield self._unreadable.popleft()

    def check(self) -> None:
        """Raise what the given iterable, or an unusable entry of it, raised in gRPC's thread."""
        if self._broken is not None:
            raise self._broken

    def close(self) -> None:
        """No more requests; sets gRPC's thread free."""
        self._closed = True
        self._places.release()


async def outcomes_async(
    open_call: Callable[[], Call], given: Iterable[object], many: Many[T]
) -> AsyncIterator[Outcome[T]]:
    """As `outcomes`, over a stream of its own."""
    call = open_call()
    feed = _AsyncFeed(call, many)
    feeding = asyncio.create_task(feed.write_all(given))
    try:
        async for answer in call:
            yield feed.outcome(answer)
            for outcome in feed.unreadable():
                yield outcome
        await feeding
        for outcome in feed.unreadable():
            yield outcome
    except grpc.aio.AioRpcError as error:
        raise errors.from_call(error.code(), error.details(), error.trailing_metadata()) from error
    finally:
        feeding.cancel()
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([feeding])


class _AsyncFeed(Generic[T]):
    """Writes the stream's requests; waits when enough are in flight."""

    def __init__(self, call: Call, many: Many[T]) -> None:
        self._call = call
        self._many = many
        self._places = asyncio.Semaphore(many.in_flight)
        self._sent: dict[int, object] = {}
        self._unreadable: list[Outcome[T]] = []

    async def write_all(self, given: Iterable[object]) -> None:
        """Write every input, then half-close, also when the given iterable raises. Quiet when the stream is over."""
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            try:
                for index, one in enumerate(given):
                    await self._places.acquire()
                    request = await self._readable(index, one)
                    if request is not None:
                        self._sent[index] = one
                        await self._call.write(request)
            finally:
                await self._call.done_writing()

    async def _readable(self, index: int, one: object) -> pb.PredictStreamRequest | None:
        """The message, built beside the loop: it reads files."""
        try:
            return await asyncio.to_thread(self._many.request, index, one)
        except OSError as error:
            self._unreadable.append(Outcome(index, one, error=error))
            self._places.release()
            return None

    def outcome(self, answer: pb.PredictStreamResponse) -> Outcome[T]:
        """An answer with what was asked; makes room for the next request."""
        self._places.release()
        return self._many.outcome(answer, self._sent.pop(answer.id))

    def unreadable(self) -> list[Outcome[T]]:
        """Files that could not be read, each once."""
        found, self._unreadable = self._unreadable, []
        return found
