import asyncio
from typing import Any

import pytest

from gateway.api.bunch import SMALL_BYTES
from gateway.api.interceptors import Call, Edge
from gateway.api.native_stream import Drain
from gateway.api.open_inference.grpc_wire import Received
from gateway.api.open_inference.stream import InferStream
from gateway.api.outcomes import Outcomes
from protos.inference import grpc_service_pb2 as pb
from shared.clock import FOREVER_S, now_s
from tests.support.fake_context import Context
from tests.support.fake_flow import settings


class Service:
    """Answers each request with its id once `gate` is set."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gate = asyncio.Event()

    async def stream_answer(self, received: Received, _call: Call, _transport_s: float | None) -> bytes:
        self.begun.append(received.message.id)
        await self.gate.wait()
        return received.message.id.encode()


class OpenStream:
    """One ModelStreamInfer as gRPC would run it."""

    def __init__(self) -> None:
        chosen = settings().gateway
        self.service, self.context = Service(), Context()
        context: Any = self.context
        call = Call(context, now_s(), FOREVER_S)
        stream = InferStream(self.service, Edge(chosen, Outcomes()), call, chosen, Drain())
        self.task = asyncio.create_task(stream.run())

    def send(self, *names: str, nbytes: int = 1) -> None:
        contents = [bytes(nbytes)]
        self.context.send(*(pb.ModelInferRequest(id=name, raw_input_contents=contents) for name in names))

    async def read(self, count: int) -> None:
        """Wait until so many messages were read, and what they begin has begun."""
        for _ in range(100):
            await asyncio.sleep(0)
        assert self.context.reads == count


async def test_answers_keep_their_order_whatever_the_messages_sizes() -> None:
    stream = OpenStream()
    stream.service.gate.set()
    stream.send("0", "1", "2")
    stream.send("3", nbytes=SMALL_BYTES + 1)
    stream.send("4")
    stream.send("5", "6", nbytes=SMALL_BYTES + 1)
    stream.send("7")
    stream.context.half_close()
    await asyncio.wait_for(stream.task, 5.0)
    assert stream.context.written == [b"%d" % number for number in range(8)]


async def test_what_is_held_when_a_stream_ends_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.api.bunch.HOLD_S", 60.0)
    stream = OpenStream()
    stream.send("0", "1", "2")
    await stream.read(3)
    assert stream.service.begun == ["0"]
    stream.task.cancel()
    await asyncio.wait([stream.task])
    await stream.read(3)
    assert stream.service.begun == ["0"]
