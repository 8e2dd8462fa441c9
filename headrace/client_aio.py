"""The asyncio client: the same calls and results as `headrace.client.Client`.

async with AsyncClient() as client:
    answer = await client.classify("cat.jpg", top_k=5)
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from headrace import client_calls as calls
from headrace import client_errors as errors
from headrace import client_read as read
from headrace.client_calls import DETECTION, EMBEDDING, ENTITIES, DetectOptions, EmbedOptions, Image, Input, TextOptions
from headrace.client_errors import InferenceError
from headrace.client_many import Many, outcomes_async
from headrace.client_results import Classified, Detected, Embedded, File, Outcome, Prediction, Recognised, Text
from headrace.client_text import AsyncGrowingText, GenerateOptions, Prompt, wire_generate
from protos.headrace.v1 import inference_pb2 as pb
from protos.headrace.v1 import inference_pb2_grpc as pb_grpc


class AsyncClient:
    """Calls one Headrace server from one event loop. Connects with the first call."""

    def __init__(
        self,
        address: str = calls.DEFAULT_ADDRESS,
        *,
        timeout_s: float = calls.DEFAULT_TIMEOUT_S,
        max_attempts: int = calls.MAX_ATTEMPTS,
        channel: grpc.aio.Channel | None = None,
    ) -> None:
        """`timeout_s` is the default of every call, retries included. A given `channel` is used and not closed."""
        self._own = None if channel else grpc.aio.insecure_channel(address, options=calls.channel_options(address))
        self._stub = pb_grpc.InferenceStub(channel or self._own)  # type: ignore[arg-type]  # one of the two is set
        self._timeout_s = timeout_s
        self._max_attempts = max_attempts

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls that still run end with CANCELLED."""
        if self._own is not None:
            await self._own.close()

    async def classify(
        self,
        given: Image | Text | File,
        *,
        top_k: int | None = None,
        model: str = "",
        version: str = "",
        timeout_s: float | None = None,
        **options: Unpack[TextOptions],
    ) -> Classified:
        """Classes of one image, one `File`, or one `Text`, which alone takes `options`. Raises InferenceError, OSError.

        `model` may be empty when the server has only one for this, or only one that takes such an input.
        """
        options_given, task = {"top_k": top_k, **options}, calls.classification_of(given)
        message = await _request([given], options_given, model=model, version=version, task=task)
        return read.classified(*await self._predict(message, timeout_s))

    async def detect(
        self,
        image: Image,
        *,
        model: str = "",
        version: str = "",
        timeout_s: float | None = None,
        **options: Unpack[DetectOptions],
    ) -> Detected:
        """Boxes of one image, in pixels of the upright image. Raises InferenceError, OSError.

        `model` may be empty when the server has only one for this, or only one that takes images.
        """
        message = await _request([image], options, model=model, version=version, task=DETECTION)
        return read.detected(*await self._predict(message, timeout_s))

    async def embed(
        self,
        text: str,
        *,
        model: str = "",
        version: str = "",
        timeout_s: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Embedded:
        """One text as a vector. `model` may be empty when only one does this. Raises InferenceError."""
        message = await _request([Text(text)], options, model=model, version=version, task=EMBEDDING)
        return read.embedded(*await self._predict(message, timeout_s))

    async def entities(
        self,
        text: str,
        *,
        model: str = "",
        version: str = "",
        timeout_s: float | None = None,
        **options: Unpack[TextOptions],
    ) -> Recognised:
        """The entities of one text. `model` may be empty when only one does this. Raises InferenceError."""
        message = await _request([Text(text)], options, model=model, version=version, task=ENTITIES)
        return read.recognised(*await self._predict(message, timeout_s))

    async def predict(
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
        message = await _request(
            inputs, options or {}, model=model, partial_results=partial_results, routing_key=routing_key
        )
        return read.prediction(*await self._predict(message, timeout_s))

    def classify_many(
        self,
        given: Iterable[Image | Text | File],
        *,
        top_k: int | None = None,
        model: str = "",
        in_flight: int = calls.IN_FLIGHT,
        timeout_s: float | None = None,
        **options: Unpack[TextOptions],
    ) -> AsyncIterator[Outcome[Classified]]:
        """Every image's, file's or text's outcome, in the order in which they finish, over one stream.

        At most `in_flight` of them are read and on their way at a time. One's failure is its outcome's `error`;
        InferenceError is raised when the stream itself breaks. Leaving the loop early drops the rest.
        """
        many = Many({"top_k": top_k, **options}, model, in_flight, self._limit_s(timeout_s), read.classified)
        return outcomes_async(self._stub.PredictStream, given, many)

    def detect_many(
        self,
        images: Iterable[Image],
        *,
        model: str = "",
        in_flight: int = calls.IN_FLIGHT,
        timeout_s: float | None = None,
        **options: Unpack[DetectOptions],
    ) -> AsyncIterator[Outcome[Detected]]:
        """As `classify_many`, with boxes."""
        many = Many(options, model, in_flight, self._limit_s(timeout_s), read.detected, task=DETECTION)
        return outcomes_async(self._stub.PredictStream, images, many)

    def embed_many(
        self,
        texts: Iterable[str],
        *,
        model: str = "",
        in_flight: int = calls.IN_FLIGHT,
        timeout_s: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> AsyncIterator[Outcome[Embedded]]:
        """As `classify_many`, texts as vectors."""
        many = Many(options, model, in_flight, self._limit_s(timeout_s), read.embedded, Text, EMBEDDING)
        return outcomes_async(self._stub.PredictStream, texts, many)

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        version: str = "",
        routing_key: str = "",
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGrowingText:
        """A text while it grows: iterate with `async for`, or `await` its `whole()`, which raise InferenceError.

        `prompt` is continued, or answered where it is a conversation. `timeout_s` is for the whole text.
        """
        message = wire_generate(prompt, options, model=model, version=version, routing_key=routing_key)

        def begin(limit_s: float) -> Any:  # noqa: ANN401 - gRPC's call
            return self._stub.Generate(message, timeout=limit_s)

        return AsyncGrowingText(begin, self._limit_s(timeout_s), self._max_attempts)

    def _limit_s(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else timeout_s

    async def _predict(self, message: pb.PredictRequest, timeout_s: float | None) -> tuple[pb.PredictResponse, str]:
        """The answer and its server timing, with retries."""
        end_s = time.monotonic() + self._limit_s(timeout_s)
        attempt = 1
        while True:
            call = self._stub.Predict(message, timeout=end_s - time.monotonic())
            try:
                response = await call
                return response, errors.trailers_of(await call.trailing_metadata()).get("server-timing", "")
            except grpc.aio.AioRpcError as rpc_error:
                error = _error(rpc_error)
                wait_s = calls.retry_wait_s(error, attempt, self._max_attempts, end_s - time.monotonic())
                if wait_s is None:
                    raise error from rpc_error
            await asyncio.sleep(wait_s)
            attempt += 1


def _error(error: grpc.aio.AioRpcError) -> InferenceError:
    return errors.from_call(error.code(), error.details(), error.trailing_metadata())


async def _request(inputs: Iterable[Input], options: Mapping[str, Any], **fields: Any) -> pb.PredictRequest:  # noqa: ANN401 - protobuf checks each field
    """Build the message beside the loop: it reads files."""
    return await asyncio.to_thread(calls.wire_request, inputs, options, **fields)
