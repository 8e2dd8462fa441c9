import asyncio
from typing import Any

import grpc
import pytest

from gateway.api.bunch import SMALL_BYTES
from gateway.api.interceptors import Call, Edge
from gateway.api.native_stream import Drain
from gateway.api.open_inference.grpc_wire import Received
from gateway.api.open_inference.stream import Growth, InferStream
from gateway.api.outcomes import Outcomes
from protos.inference import grpc_service_pb2 as pb
from shared.clock import FOREVER_S, now_s
from shared.errors import Cancelled, ProcessLost
from tests.support.fake_context import Context
from tests.support.fake_flow import settings


class Service:
    """Answers each request with its id once `gate` is set."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gate = asyncio.Event()
        self.steps: asyncio.Queue[None] = asyncio.Queue()

    async def stream_answer(
        self, received: Received, _call: Call, _transport_s: float | None, growth: Growth
    ) -> bytes | None:
        name = received.message.id
        self.begun.append(name)
        if name.startswith("text"):
            growth.begins()
            for number in range(3):
                await self.steps.get()
                if name == "text breaks" and number == 1:
                    raise ProcessLost("the worker was lost")
                await growth.write(f"{name} {number}".encode())
            return None
        await self.gate.wait()
        return name.encode()


class OpenStream:
    """One ModelStreamInfer as gRPC would run it."""

    def __init__(self, in_flight: int = 64) -> None:
        chosen = settings(gateway={"stream_in_flight": in_flight}).gateway
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


async def test_a_text_keeps_nobody_waiting_and_a_stream_ends_with_its_last_text() -> None:
    stream = OpenStream()
    stream.service.gate.set()
    stream.send("text", "after", nbytes=SMALL_BYTES + 1)
    stream.context.half_close()
    await stream.read(3)
    assert stream.context.written == [b"after"]
    for _ in range(3):
        stream.service.steps.put_nowait(None)
    await asyncio.wait_for(stream.task, 5.0)
    assert stream.context.written == [b"after", b"text 0", b"text 1", b"text 2"]


async def test_texts_of_one_stream_grow_side_by_side() -> None:
    stream = OpenStream()
    stream.send("text a", "text b", nbytes=SMALL_BYTES + 1)
    stream.context.half_close()
    for _ in range(6):
        await stream.read(3)
        stream.service.steps.put_nowait(None)
    await asyncio.wait_for(stream.task, 5.0)
    written = stream.context.written
    assert [one for one in written if one.startswith(b"text a")] == [b"text a 0", b"text a 1", b"text a 2"]
    assert [one for one in written if one.startswith(b"text b")] == [b"text b 0", b"text b 1", b"text b 2"]
    assert written != sorted(written)


async def test_a_text_that_breaks_ends_with_an_error_and_the_stream_goes_on() -> None:
    stream = OpenStream()
    stream.service.gate.set()
    for _ in range(2):
        stream.service.steps.put_nowait(None)
    stream.send("text breaks", "after")
    stream.context.half_close()
    await asyncio.wait_for(stream.task, 5.0)
    answers = stream.context.written
    assert {b"text breaks 0", b"after"} <= set(answers)
    (failed,) = [one for one in answers if one not in {b"text breaks 0", b"after"}]
    failure = pb.ModelStreamInferResponse.FromString(failed)
    assert (failure.infer_response.id, failure.error_message) == ("text breaks", "the worker was lost")


async def test_texts_take_places_until_their_end() -> None:
    stream = OpenStream(in_flight=2)
    stream.send("text a", "text b", "late")
    await stream.read(2)
    for _ in range(6):
        stream.service.steps.put_nowait(None)
    await stream.read(3)
    stream.service.gate.set()
    stream.context.half_close()
    await asyncio.wait_for(stream.task, 5.0)


async def test_a_caller_who_is_gone_when_a_part_is_written_ends_the_stream() -> None:
    stream = OpenStream()
    stream.context.write_error = grpc.aio.InternalError("the call has ended")
    stream.send("text")
    stream.service.steps.put_nowait(None)
    with pytest.raises(Cancelled):
        await asyncio.wait_for(stream.task, 5.0)
