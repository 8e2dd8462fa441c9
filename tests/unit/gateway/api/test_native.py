import asyncio
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from gateway.api.interceptors import Edge
from gateway.api.native import Inference
from gateway.api.outcomes import Outcomes
from protos.headrace.v1 import inference_pb2 as pb
from shared.clock import now_s
from shared.errors import Cancelled, Code, HeadraceError, InvalidInput, Overloaded
from shared.settings import Settings
from tests.support.fake_context import Context
from tests.support.fake_flow import Flow, settings

ONE = pb.PredictRequest(model="fake", inputs=[pb.Input(image=b"abc")])


class Server:
    """The method as gRPC would call it."""

    def __init__(self, chosen: Settings | None = None) -> None:
        chosen = chosen or settings()
        self.flow = Flow()
        self.outcomes = Outcomes()
        self.inference = Inference(Edge(chosen.gateway, self.outcomes), self.flow, chosen)
        handler: Any = self.inference.handlers()["Predict"]
        self.handle = handler.unary_unary

    async def call(self, message: pb.PredictRequest | bytes, context: Context) -> pb.PredictResponse:
        raw = message if isinstance(message, bytes) else message.SerializeToString()
        return pb.PredictResponse.FromString(await self.handle(raw, context))

    async def refused(self, message: pb.PredictRequest | bytes, context: Context) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AbortError):
            await self.call(message, context)
        assert context.code is not None
        return context.code, context.details


async def test_a_request_reaches_the_flow_whole_and_its_answer_the_caller() -> None:
    server, context = Server(), Context()
    message = pb.PredictRequest(
        model="fake",
        version="0123456789abcdef",
        request_id="mine",
        inputs=[pb.Input(image=b"abc"), pb.Input(image=b"de")],
        options=pb.Options(top_k=2),
        partial_results=True,
    )

    answer = await server.call(message, context)

    (request,) = server.flow.requests
    assert (request.model, request.version, request.request_id) == ("fake", "0123456789abcdef", "mine")
    assert (request.options, request.partial_results, request.nbytes) == ({"top_k": 2}, True, 5)
    assert [one.data for one in request.inputs] == [b"abc", b"de"]
    assert (answer.model, answer.request_id, len(answer.results)) == ("fake", "mine", 2)
    assert context.trailers["request-id"] == "mine"
    assert "run;dur=2.000" in context.trailers["server-timing"]
    assert server.outcomes.counts == {("Predict", "ok"): 1}


async def test_calls_without_an_id_get_different_ones() -> None:
    server = Server()

    ids = {(await server.call(ONE, Context())).request_id for _ in range(3)}

    assert len(ids) == 3
    assert all(len(one) == 16 for one in ids)


@pytest.mark.parametrize(
    ("remaining_s", "limit_s"), [(None, 2.0), (0.5, 0.5), (5.0, 3.0)], ids=["default", "the caller's", "capped"]
)
async def test_the_deadline_goes_with_the_request(remaining_s: float | None, limit_s: float) -> None:
    server = Server(settings(gateway={"default_deadline_ms": 2000, "max_deadline_ms": 3000}))
    before_s = now_s()

    await server.call(ONE, Context(remaining_s))

    (request,) = server.flow.requests
    assert before_s <= request.arrived_s <= now_s()
    assert request.deadline_s == pytest.approx(request.arrived_s + limit_s)


async def test_a_spent_deadline_never_reaches_the_flow() -> None:
    server = Server()
    dropped: list[Code] = []
    server.outcomes.refused_unread = dropped.append

    code, text = await server.refused(ONE, Context(0.0))

    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert text == "the call's deadline had passed when it arrived"
    assert server.flow.requests == []
    assert server.outcomes.counts == {("Predict", "deadline_exceeded"): 1}
    assert dropped == [Code.DEADLINE_EXCEEDED]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\xff\xff\xff", "not a valid protobuf message"),
        (b"\x22\x7f\x0a", "not a valid protobuf message"),
        (b"\x0a\x02\xff\xfe", "or a string in it is not UTF-8"),
        (pb.PredictRequest(task="Object Detection").SerializeToString(), "task is 'Object Detection'"),
        (pb.PredictRequest(task="x" * 129).SerializeToString(), "it has 0..128 characters of a-z 0-9 _"),
        (b"\x22\x02" * 200, "not a valid protobuf message"),
        (b"", "inputs is empty"),
    ],
)
async def test_a_malformed_message_is_the_callers_fault(raw: bytes, text: str) -> None:
    server, context = Server(), Context()

    code, details = await server.refused(raw, context)

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text in details
    assert context.trailers["request-id"]
    assert context.trailers["error-reason"] == "invalid_input"


async def test_a_too_large_message_names_limit_and_setting() -> None:
    server = Server(settings(gateway={"max_message_bytes": 100}))

    code, details = await server.refused(pb.PredictRequest(inputs=[pb.Input(image=b"x" * 200)]), Context())

    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "the limit is 100 (gateway.max_message_bytes)" in details


@pytest.mark.parametrize("error", [Overloaded("no room", retry_after_ms=5), InvalidInput("bad")])
async def test_a_flows_error_goes_through_the_table(error: HeadraceError) -> None:
    server, context = Server(), Context()
    server.flow.fail = error

    code, details = await server.refused(ONE, context)

    assert (code is grpc.StatusCode.RESOURCE_EXHAUSTED) == isinstance(error, Overloaded)
    assert details == error.text
    assert context.trailers["error-reason"] == error.code.value
    assert "server-timing" in context.trailers
    assert server.outcomes.counts == {("Predict", error.code.value): 1}
    assert server.outcomes.in_flight == 0


async def test_an_unforeseen_exception_shows_the_caller_nothing_and_the_log_everything() -> None:
    server, context = Server(), Context()
    server.flow.fail = FileNotFoundError("/srv/secret/model.bin")

    with capture_logs() as logs:
        code, details = await server.refused(ONE, context)

    assert code is grpc.StatusCode.INTERNAL
    assert details == "internal error; the request id finds it in the server's log"
    assert not any("secret" in str(value) for value in context.trailers.values())
    assert [line["request_id"] for line in logs] == [context.trailers["request-id"]]
    assert logs[0]["exc_info"] is server.flow.fail


@pytest.mark.parametrize(("remaining_s", "reason"), [(5.0, "cancelled"), (0.001, "deadline_exceeded")])
async def test_a_cancelled_call_is_dropped_and_counted_by_why(remaining_s: float, reason: str) -> None:
    server = Server()
    server.flow.gate = asyncio.Event()
    call = asyncio.create_task(server.call(ONE, Context(remaining_s)))
    await server.flow.until(lambda flow: flow.running == 1, "the request to reach the flow")

    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    assert server.flow.cancelled == 1
    assert server.outcomes.counts == {("Predict", reason): 1}
    assert server.outcomes.in_flight == 0


async def test_a_failed_input_is_a_result_when_partial_results_are_asked_for() -> None:
    server = Server()
    server.flow.results = [InvalidInput("bad image"), Cancelled("gone")]

    answer = await server.call(ONE, Context())

    assert [one.error.reason for one in answer.results] == ["invalid_input", "cancelled"]
