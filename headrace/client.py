"""The blocking client. Light on purpose: grpcio and protobuf are all it needs.

    with Client("127.0.0.1:8001") as client:
        answer = client.classify("cat.jpg", top_k=5)
        print(answer.top.name, answer.server_timing.run_ms)

Every failure is a `headrace.client_errors.InferenceError`. A Client may be used by many threads; it must be made after
a fork, not before.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import grpc

from headrace import client_calls as calls
from headrace import client_errors as errors
from headrace import client_results as results
from headrace.client_aio import AsyncClient
from headrace.client_calls import Image, Input
from headrace.client_errors import InferenceError
from headrace.client_results import Classified, Outcome, Prediction
from protos.headrace.v1 import inference_pb2 as pb
from protos.headrace.v1 import inference_pb2_grpc as pb_grpc

__all__ = ["AsyncClient", "Client", "InferenceError"]


class Client:
    """Calls one Headrace server. Connects with the first call."""

    def __init__(
        self,
        address: str = calls.DEFAULT_ADDRESS,
        *,
        timeout_s: float = calls.DEFAULT_TIMEOUT_S,
        max_attempts: int = calls.MAX_ATTEMPTS,
        channel: grpc.Channel | None = None,
    ) -> None:
        """`timeout_s` is the default of every call, retries included. A given `channel` is used and not closed."""
        self._own = None if channel else grpc.insecure_channel(address, options=calls.channel_options(address))
        self._stub = pb_grpc.InferenceStub(channel or self._own)  # type: ignore[arg-type]  # one of the two is set
        self._timeout_s = timeout_s
        self._max_attempts = max_attempts

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls that still run end with CANCELLED."""
        if self._own is not None:
            self._own.close()

    def classify(
        self,
        image: Image,
        *,
        top_k: int | None = None,
        model: str = "",
        version: str = "",
        timeout_s: float | None = None,
    ) -> Classified:
        """Classes of one image. `model` may be empty when the server has only one. Raises InferenceError, OSError."""
        message = calls.wire_request([image], {"top_k": top_k}, model=model, version=version)
        return results.classified(*self._predict(message, timeout_s))

    def predict(
        self,
        inputs: Iterable[Input],
        *,
        model: str = "",
        options: Mapping[str, Any] | None = None,
        partial_results: bool = False,
        routing_key: str = "",
        timeout_s: float | None = None,
    ) -> Prediction:
        """Any task, one or many inputs in one request. Raises InferenceError, OSError.

        `routing_key`: requests with the same one go to the same version while a canary has a share of them.
        """
        message = calls.wire_request(
            inputs, options or {}, model=model, partial_results=partial_results, routing_key=routing_key
        )
        return results.prediction(*self._predict(message, timeout_s))

    def classify_many(
        self,
        images: Iterable[Image],
        *,
        top_k: int | None = None,
        model: str = "",
        in_flight: int = calls.IN_FLIGHT,
        timeout_s: float | None = None,
    ) -> Iterator[Outcome]:
        """Every image's outcome, in the order in which they finish, over one stream.

        At most `in_flight` images are read and on their way at a time. One image's failure is its outcome's `error`;
        InferenceError is raised when the stream itself breaks. Leaving the loop early drops the rest.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        feed = _Feed(images, in_flight, {"top_k": top_k}, model, calls.timeout_ms(limit_s))
        stream = self._stub.PredictStream(feed)
        try:
            for answer in stream:
                yield feed.outcome(answer)
                yield from feed.unreadable()
            yield from feed.unreadable()
            feed.check()
        except grpc.RpcError as error:
            raise _error(error) from error
        finally:
            feed.close()
            stream.cancel()

    def _predict(self, message: pb.PredictRequest, timeout_s: float | None) -> tuple[pb.PredictResponse, str]:
        """The answer and its server timing, with retries."""
        end_s = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        attempt = 1
        while True:
            try:
                response, call = self._stub.Predict.with_call(message, timeout=end_s - time.monotonic())
                return response, errors.trailers_of(call.trailing_metadata()).get("server-timing", "")
            except grpc.RpcError as rpc_error:
                error = _error(rpc_error)
                wait_s = calls.retry_wait_s(error, attempt, self._max_attempts, end_s - time.monotonic())
                if wait_s is None:
                    raise error from rpc_error
            time.sleep(wait_s)
            attempt += 1


def _error(error: grpc.RpcError) -> InferenceError:
    return errors.from_call(error.code(), error.details(), error.trailing_metadata())


class _Feed(Iterator[pb.PredictStreamRequest]):
    """The stream's requests, pulled by a thread of gRPC's; waits when enough are in flight."""

    def __init__(
        self, images: Iterable[Image], in_flight: int, options: Mapping[str, Any], model: str, timeout_ms: int
    ) -> None:
        self._images = enumerate(images)
        self._places = threading.Semaphore(in_flight)
        self._fields = (options, model, timeout_ms)
        self._sent: dict[int, Image] = {}
        self._unreadable: deque[Outcome] = deque()
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
        options, model, timeout_ms = self._fields
        for index, image in self._images:
            try:
                request = calls.wire_request([image], options, model=model)
            except OSError as error:
                self._unreadable.append(Outcome(index, image, error=error))
                continue
            self._sent[index] = image
            return pb.PredictStreamRequest(id=index, request=request, timeout_ms=timeout_ms)
        return None

    def outcome(self, answer: pb.PredictStreamResponse) -> Outcome:
        """An answer with what was asked; makes room for the next request."""
        self._places.release()
        image = self._sent.pop(answer.id)
        if answer.WhichOneof("outcome") == "error":
            return Outcome(answer.id, image, error=errors.from_message(answer.error))
        return Outcome(answer.id, image, result=results.classified(answer.response, answer.server_timing))

    def unreadable(self) -> Iterator[Outcome]:
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
