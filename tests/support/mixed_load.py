"""Callers of every kind in an open loop, straight on the stubs, with the word in which each call ended for its caller.

The words are those of `bench.ledger`: what the server said, or the caller's own where it got no word of the server's.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple, TypeAlias

import grpc

from bench.ledger import LEFT, OK, word
from headrace.client_errors import trailers_of
from protos.headrace.v1 import inference_pb2 as pb
from protos.headrace.v1 import inference_pb2_grpc as pb_grpc

PREDICT = "/headrace.v1.Inference/Predict"
MALFORMED = b"\xff\xff\xff"


class Ask(NamedTuple):
    """One call."""

    at_s: float
    text: str = "good"
    model: str = ""
    timeout_s: float = 1.0
    leaves_s: float = 0.0
    """After so long its caller cancels it; 0: never."""
    malformed: bool = False


class StreamAsk(NamedTuple):
    """One stream of so many requests."""

    requests: int
    leaves_s: float = 0.0


Event: TypeAlias = tuple[float, Callable[[], None]]
"""When, and what; in a thread of its own."""


class MixedLoad:
    """Sends every call at its time, whatever became of the others."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.unary: Counter[str] = Counter()
        self.streamed: Counter[str] = Counter()
        self.malformed = 0

    def run(
        self, asks: list[Ask], limit_s: float, events: Iterable[Event] = (), streams: Iterable[StreamAsk] = ()
    ) -> None:
        """Until all calls have ended. `events` break the server meanwhile; streams begin at once."""
        asyncio.run(asyncio.wait_for(self._run(asks, events, streams), limit_s))

    async def _run(self, asks: list[Ask], events: Iterable[Event], streams: Iterable[StreamAsk]) -> None:
        loop = asyncio.get_running_loop()
        async with grpc.aio.insecure_channel(self._address) as channel:
            await channel.channel_ready()
            start_s, tasks = loop.time() + 0.05, list[asyncio.Task[None]]()

            def begin(work: Coroutine[Any, Any, None]) -> None:
                tasks.append(loop.create_task(work))

            for ask in asks:
                loop.call_at(start_s + ask.at_s, begin, self._call(channel, ask))
            for at_s, event in events:
                loop.call_at(start_s + at_s, begin, asyncio.to_thread(event))
            await asyncio.gather(*(self._stream(channel, stream) for stream in streams))
            ended = asyncio.Event()
            loop.call_at(start_s + max(ask.at_s for ask in asks) + 0.01, ended.set)
            await ended.wait()
            await asyncio.gather(*tasks)

    async def _call(self, channel: grpc.aio.Channel, ask: Ask) -> None:
        raw = MALFORMED if ask.malformed else _request(ask.text, ask.model).SerializeToString()
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(PREDICT)
        call = method(raw, timeout=ask.timeout_s)
        if ask.leaves_s:
            asyncio.get_running_loop().call_later(ask.leaves_s, call.cancel)
        code = await call.code()
        ended = word(code.name, trailers_of(await call.trailing_metadata()).get("error-reason", ""))
        self.unary[ended] += 1
        self.malformed += ask.malformed and ended == "invalid_input"

    async def _stream(self, channel: grpc.aio.Channel, ask: StreamAsk) -> None:
        """All its requests at once, one in three with little time; its caller may leave before it is answered."""
        stream = pb_grpc.InferenceStub(channel).PredictStream()
        for number in range(ask.requests):
            limit_ms = 30 if number % 3 == 0 else 2000
            await stream.write(pb.PredictStreamRequest(id=number, request=_request("good", ""), timeout_ms=limit_ms))
        await stream.done_writing()
        if ask.leaves_s:
            asyncio.get_running_loop().call_later(ask.leaves_s, stream.cancel)
        answered = 0
        try:
            async for answer in stream:
                answered += 1
                self.streamed[answer.error.reason if answer.WhichOneof("outcome") == "error" else OK] += 1
        except asyncio.CancelledError:
            self.streamed[LEFT] += ask.requests - answered


def _request(text: str, model: str) -> pb.PredictRequest:
    return pb.PredictRequest(model=model, inputs=[pb.Input(text=text)])
