"""Texts that grow, for both clients: what goes out, and what can be read while it comes.

for piece in client.generate("The river"):
    print(piece, end="", flush=True)

text = client.generate([{"role": "user", "content": "Hello!"}], max_tokens=50).whole()
print(text.text, text.finished.reason)
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias, TypedDict

import grpc

from headrace import client_calls as calls
from headrace import client_errors as errors
from headrace.client_errors import InferenceError
from headrace.client_results import ServerTiming
from headrace.client_tokens import Finished, Token, finished, token
from protos.headrace.v1 import inference_pb2 as pb

Prompt: TypeAlias = str | Sequence[Mapping[str, str]]
"""A text to be continued, or a conversation: messages with `role` (system, user, assistant) and `content`."""
Begin: TypeAlias = Callable[[float], Any]
"""Makes the call, given the seconds that it may take."""


class GenerateOptions(TypedDict, total=False):
    """What a request for a text may say; left out or None: the model's default."""

    max_tokens: int | None
    """Tokens to add, 1 or more."""
    temperature: float | None
    """0 always takes the likeliest token; higher is more varied."""
    top_k: int | None
    """Draw from so many of the likeliest tokens, 0: from all."""
    top_p: float | None
    """Draw from the likeliest tokens that together have this probability."""
    repetition_penalty: float | None
    """Above 1 makes tokens that have already occurred less likely."""
    seed: int | None
    """The same seed, prompt and options give the same text."""
    stop: Sequence[str] | None
    """The text ends before the first of these."""
    stop_token_ids: Sequence[int] | None
    """The text ends with the first of these tokens, too."""
    beams: int | None
    """Continuations that beam search keeps; 1 is none."""
    logprobs: int | None
    """With each token its log probability, and those of so many of the likeliest."""
    length_penalty: float | None
    """Beam search compares log probability / tokens ^ this: the higher, the more it favours longer texts."""


def wire_generate(prompt: Prompt, options: Mapping[str, Any], **fields: Any) -> pb.GenerateRequest:  # noqa: ANN401 - protobuf checks each field
    """A request as a message. Raises ValueError or TypeError for an option that the contract does not have."""
    message = pb.GenerateRequest(**fields)
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.chat.SetInParent()
        message.chat.messages.extend(pb.ChatMessage(**said) for said in prompt)
    given = {name: value for name, value in options.items() if value is not None}
    if given:
        message.options.CopyFrom(pb.Options(**given))
    return message


class TextSoFar:
    """What has come of a text until now."""

    def __init__(self) -> None:
        self.text = ""
        """All of it so far."""
        self.tokens: list[Token] = []
        """Only where log probabilities were asked for."""
        self.finished: Finished | None = None
        """Once it has come to its end."""
        self.model = self.version = self.request_id = ""
        """Once the first of it has come."""
        self.server_timing = ServerTiming()
        """Once it has come to its end."""

    def _take(self, message: pb.GenerateResponse) -> str:
        if message.model:
            self.model, self.version, self.request_id = message.model, message.version, message.request_id
        if message.HasField("finished"):
            self.finished = finished(message.finished)
        self.text += message.text
        self.tokens += map(token, message.tokens)
        return message.text

    @property
    def _has_begun(self) -> bool:
        """From here on a retry would say the same again."""
        return bool(self.model)


class GrowingText(TextSoFar, Iterator[str]):
    """Iterate for what is new, piece by piece; a retry happens only before the first. Raises InferenceError.

    Leaving it early (`with`, or `close`) ends the work on the server with the next token.
    """

    def __init__(self, begin: Begin, limit_s: float, max_attempts: int) -> None:
        super().__init__()
        self._begin = begin
        self._end_s = time.monotonic() + limit_s
        self._most = max_attempts
        self._attempt = 1
        self._call = begin(limit_s)

    def __next__(self) -> str:
        while True:
            try:
                piece = self._take(next(self._call))
            except StopIteration:
                timing = errors.trailers_of(self._call.trailing_metadata()).get("server-timing", "")
                self.server_timing = ServerTiming.parse(timing)
                raise
            except grpc.RpcError as error:
                self._try_again(errors.from_call(error.code(), error.details(), error.trailing_metadata()), error)
                continue
            if piece:
                return piece

    def whole(self) -> Self:
        """Wait for all of it. Raises InferenceError; what came before that is in `text`."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """No more of it is wanted. Idempotent."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _try_again(self, error: InferenceError, cause: grpc.RpcError) -> None:
        left_s = self._end_s - time.monotonic()
        wait_s = None if self._has_begun else calls.retry_wait_s(error, self._attempt, self._most, left_s)
        if wait_s is None:
            raise error from cause
        time.sleep(wait_s)
        self._attempt += 1
        self._call = self._begin(self._end_s - time.monotonic())


class AsyncGrowingText(TextSoFar, AsyncIterator[str]):
    """The same with `async for`, `await text.whole()` and `async with`."""

    def __init__(self, begin: Begin, limit_s: float, max_attempts: int) -> None:
        super().__init__()
        self._begin = begin
        self._end_s = time.monotonic() + limit_s
        self._most = max_attempts
        self._attempt = 1
        self._call = begin(limit_s)

    async def __anext__(self) -> str:
        while True:
            try:
                message = await self._call.read()
            except grpc.aio.AioRpcError as error:
                await self._try_again(errors.from_call(error.code(), error.details(), error.trailing_metadata()), error)
                continue
            if message is grpc.aio.EOF:
                timing = errors.trailers_of(await self._call.trailing_metadata()).get("server-timing", "")
                self.server_timing = ServerTiming.parse(timing)
                raise StopAsyncIteration
            if piece := self._take(message):
                return piece

    async def whole(self) -> Self:
        """Wait for all of it. Raises InferenceError; what came before that is in `text`."""
        async for _ in self:
            pass
        return self

    def close(self) -> None:
        """No more of it is wanted. Idempotent."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _try_again(self, error: InferenceError, cause: grpc.aio.AioRpcError) -> None:
        left_s = self._end_s - time.monotonic()
        wait_s = None if self._has_begun else calls.retry_wait_s(error, self._attempt, self._most, left_s)
        if wait_s is None:
            raise error from cause
        await asyncio.sleep(wait_s)
        self._attempt += 1
        self._call = self._begin(self._end_s - time.monotonic())
