import asyncio
from typing import Any

import grpc
import pytest

from gateway.api.interceptors import Edge
from gateway.api.native import Inference
from gateway.api.outcomes import Outcomes
from protos.headrace.v1 import inference_pb2 as pb
from shared.errors import HeadraceError, Overloaded, ProcessLost
from tests.support.fake_context import Context
from tests.support.fake_flow import VERSION, Flow, settings

ONE = pb.GenerateRequest(model="fake", text="abc")


class Server:
    """The method as gRPC would call it."""

    def __init__(self) -> None:
        chosen = settings()
        self.flow = Flow()
        self.outcomes = Outcomes()
        self.inference = Inference(Edge(chosen.gateway, self.outcomes), self.flow, chosen)
        handler: Any = self.inference.handlers()["Generate"]
        self.handle = handler.unary_stream

    async def call(self, message: pb.GenerateRequest | bytes, context: Context) -> list[pb.GenerateResponse]:
        raw = message if isinstance(message, bytes) else message.SerializeToString()
        await self.handle(raw, context)
        return [pb.GenerateResponse.FromString(one) for one in context.written]

    async def refused(self, message: pb.GenerateRequest | bytes, context: Context) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AbortError):
            await self.call(message, context)
        assert context.code is not None
        return context.code, context.details


async def test_a_text_comes_in_parts_and_the_first_and_the_last_say_more() -> None:
    server, context = Server(), Context()

    parts = await server.call(ONE, context)

    assert [part.text for part in parts] == ["A", "B", "C"]
    assert (parts[0].model, parts[0].version) == ("fake", VERSION)
    assert parts[0].request_id == context.trailers["request-id"]
    assert [part.model for part in parts[1:]] == ["", ""]
    assert [part.HasField("finished") for part in parts] == [False, False, True]
    assert parts[-1].finished == pb.Finished(reason=pb.Finished.LENGTH, prompt_tokens=3, completion_tokens=3)
    assert 'tokens;desc="3"' in context.trailers["server-timing"]
    assert server.outcomes.counts == {("Generate", "ok"): 1}


async def test_a_request_reaches_the_flow_whole() -> None:
    server = Server()
    message = pb.GenerateRequest(
        model="fake",
        version=VERSION,
        request_id="mine",
        text="abc",
        options=pb.Options(max_tokens=5, temperature=0.5, stop=["x", "y"], stop_token_ids=[7], logprobs=0),
        routing_key="someone",
    )

    parts = await server.call(message, Context(remaining_s=1.0))

    (request,) = server.flow.requests
    assert (request.model, request.version, request.request_id) == ("fake", VERSION, "mine")
    assert request.routing_key == "someone"
    assert request.options == {
        "max_tokens": 5,
        "temperature": 0.5,
        "stop": ["x", "y"],
        "stop_token_ids": [7],
        "logprobs": 0,
    }
    assert [(raw.kind, raw.data) for raw in request.inputs] == [("text", b"abc")]
    assert request.deadline_s - request.arrived_s == pytest.approx(1.0)
    (token,) = parts[0].tokens
    assert (token.id, token.bytes, token.logprob) == (65, b"A", -0.5)


async def test_a_conversation() -> None:
    server = Server()
    said = [pb.ChatMessage(role="system", content="be kind"), pb.ChatMessage(role="user", content="hi")]

    await server.call(pb.GenerateRequest(chat=pb.Chat(messages=said)), Context())

    (raw,) = server.flow.requests[0].inputs
    assert (raw.kind, raw.data) == ("chat", b'[["system","be kind"],["user","hi"]]')


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (pb.GenerateRequest(), "the request has no prompt; set text or chat"),
        (pb.GenerateRequest(text=""), "text has 0 bytes; at least 1 is needed"),
        (pb.GenerateRequest(chat=pb.Chat()), "chat.messages has 0 entries"),
        (
            pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="god", content="x")])),
            "chat.messages[0].role is 'god'; known: system, user, assistant",
        ),
        (pb.GenerateRequest(model="../x", text="a"), "model is '../x'"),
        (pb.GenerateRequest(request_id="\n", text="a"), "request_id is"),
        (pb.GenerateRequest(routing_key="k" * 257, text="a"), "routing_key has 257 characters"),
        (b"\xff\xff", "not a valid protobuf message"),
        (b"\x22\x02\xff\xfe", "not a valid protobuf message"),  # text that is no UTF-8
    ],
    ids=["nothing", "empty", "no messages", "role", "model", "id", "key", "no protobuf", "no UTF-8"],
)
async def test_what_is_wrong_with_a_request_is_said_before_the_flow_sees_it(
    message: pb.GenerateRequest | bytes, said: str
) -> None:
    server = Server()

    code, details = await server.refused(message, Context())

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert said in details
    assert server.flow.requests == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("no room", retry_after_ms=40), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (ProcessLost("the worker was lost"), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_a_failure_is_the_calls_status_with_a_retry_hint(error: HeadraceError, code: grpc.StatusCode) -> None:
    server, context = Server(), Context()
    server.flow.fail = error

    assert (await server.refused(ONE, context))[0] is code
    assert "grpc-retry-pushback-ms" in context.trailers
    assert server.outcomes.counts == {("Generate", error.code.value): 1}


async def test_a_call_that_came_too_late() -> None:
    assert (await Server().refused(ONE, Context(remaining_s=-1.0)))[0] is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_closed_call_ends_the_work_at_once() -> None:
    server, context = Server(), Context()
    server.flow.steps = asyncio.Queue()
    call = asyncio.create_task(server.call(ONE, context))
    server.flow.steps.put_nowait(None)
    async with asyncio.timeout(5.0):
        await context.wrote.wait()

    call.cancel()
    await asyncio.wait([call])

    assert server.flow.cancelled == 1
    assert server.outcomes.counts == {("Generate", "cancelled"): 1}


async def test_a_caller_who_is_gone_when_a_part_is_written_has_left() -> None:
    server, context = Server(), Context()
    context.write_error = grpc.aio.InternalError("the call has ended")

    await server.refused(ONE, context)

    assert server.outcomes.counts == {("Generate", "cancelled"): 1}


async def test_a_reader_who_is_slow_holds_the_text_up_and_no_one_else() -> None:
    server, slow, other = Server(), Context(), Context()
    slow.writable.clear()
    call = asyncio.create_task(server.call(ONE, slow))
    await server.flow.until(lambda flow: flow.running == 1, "the slow one to begin")

    assert len(await server.call(ONE, other)) == 3
    assert not call.done()
    slow.writable.set()
    assert len(await call) == 3


async def test_a_stopping_server_takes_no_new_texts_and_finishes_what_it_has() -> None:
    server, context = Server(), Context()
    server.flow.steps = asyncio.Queue()
    call = asyncio.create_task(server.call(ONE, context))
    await server.flow.until(lambda flow: flow.running == 1, "the first one")

    server.inference.drain.start()
    code, _ = await server.refused(ONE, Context())

    assert code is grpc.StatusCode.UNAVAILABLE
    for _ in range(3):
        server.flow.steps.put_nowait(None)
    assert len(await call) == 3


async def test_a_text_that_a_stop_cannot_wait_for_ends_with_a_reason_after_what_has_grown() -> None:
    server, context = Server(), Context()
    server.flow.steps = asyncio.Queue()
    server.flow.steps.put_nowait(None)
    call = asyncio.create_task(server.refused(ONE, context))
    await server.flow.until(lambda flow: flow.running == 1 and flow.requests[0].times.tokens == 1, "a letter")

    server.inference.drain.start()
    server.inference.drain.end()

    code, said = await call
    assert (code, said) == (
        grpc.StatusCode.UNAVAILABLE,
        "the server is stopping and can't wait for the rest of this call",
    )
    assert [pb.GenerateResponse.FromString(one).text for one in context.written] == ["A"]
    assert server.outcomes.counts == {("Generate", "draining"): 1}
