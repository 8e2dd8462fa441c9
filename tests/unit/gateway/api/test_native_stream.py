import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from gateway.api.interceptors import Edge
from gateway.api.native import Inference
from gateway.api.outcomes import Outcomes
from protos.headrace.v1 import inference_pb2 as pb
from shared.errors import Overloaded
from shared.settings import Settings
from tests.support.fake_context import Context
from tests.support.fake_flow import Flow, settings


def asked(number: int, *, timeout_ms: int = 0, image: bytes = b"x") -> pb.PredictStreamRequest:
    request = pb.PredictRequest(request_id=str(number), inputs=[pb.Input(image=image)])
    return pb.PredictStreamRequest(id=number, request=request, timeout_ms=timeout_ms)


class OpenStream:
    """One PredictStream as gRPC would run it."""

    def __init__(self, chosen: Settings, remaining_s: float | None) -> None:
        self.flow = Flow()
        self.outcomes = Outcomes()
        self.context = Context(remaining_s)
        self.inference = Inference(Edge(chosen.gateway, self.outcomes), self.flow, chosen)
        handler: Any = self.inference.handlers()["PredictStream"]
        self.task = asyncio.create_task(handler.stream_stream(None, self.context))

    def answers(self) -> list[pb.PredictStreamResponse]:
        return [pb.PredictStreamResponse.FromString(raw) for raw in self.context.written]

    async def end(self, limit_s: float = 5.0) -> None:
        """Wait for the call's end."""
        done, _ = await asyncio.wait([self.task], timeout=limit_s)
        assert done, f"waited {limit_s} s for the stream to end: {self.outcomes}"
        with contextlib.suppress(grpc.aio.AbortError):
            self.task.result()


@contextlib.asynccontextmanager
async def stream(chosen: Settings | None = None, remaining_s: float | None = None) -> AsyncIterator[OpenStream]:
    opened = OpenStream(chosen or settings(), remaining_s)
    yield opened
    opened.task.cancel()
    await asyncio.wait([opened.task])
    assert opened.outcomes.in_flight == 0
    assert opened.flow.running == 0


async def test_half_close_answers_everything_and_then_ok() -> None:
    async with stream() as open_stream:
        open_stream.context.send(*(asked(number) for number in range(5)))
        open_stream.context.half_close()
        await open_stream.end()

        assert sorted(one.id for one in open_stream.answers()) == [0, 1, 2, 3, 4]
        assert all(one.response.request_id == str(one.id) for one in open_stream.answers())
        assert all("run;dur=2.000" in one.server_timing for one in open_stream.answers())
        assert open_stream.context.code is None
        assert open_stream.outcomes.counts == {("PredictStream.answer", "ok"): 5, ("PredictStream", "ok"): 1}


async def test_a_stream_without_requests_is_ok() -> None:
    async with stream() as open_stream:
        open_stream.context.half_close()
        await open_stream.end()

        assert open_stream.context.code is None
        assert open_stream.context.trailers["request-id"]


async def test_answers_come_as_they_finish() -> None:
    async with stream() as open_stream:
        gate = asyncio.Event()

        async def answer(request: Any) -> Any:  # noqa: ANN401 - stands for the flow's own
            if request.request_id == "0":
                await gate.wait()
            else:
                asyncio.get_running_loop().call_soon(gate.set)
            return await Flow().answer(request)

        open_stream.flow.answer = answer  # type: ignore[method-assign]  # the first request waits for the second
        open_stream.context.send(asked(0), asked(1))
        open_stream.context.half_close()
        await open_stream.end()

        assert [one.id for one in open_stream.answers()] == [1, 0]


async def test_a_failure_is_an_answer_and_the_stream_goes_on() -> None:
    async with stream() as open_stream:
        open_stream.context.send(asked(1, image=b""), pb.PredictStreamRequest(id=2), asked(3))
        open_stream.context.half_close()
        await open_stream.end()

        found = {one.id: one for one in open_stream.answers()}
        assert found[1].error.reason == found[2].error.reason == "invalid_input"
        assert found[1].error.code == 3
        assert found[3].WhichOneof("outcome") == "response"
        assert open_stream.context.code is None


async def test_a_refusal_inside_the_stream_carries_the_retry_hint() -> None:
    async with stream() as open_stream:
        open_stream.flow.fail = Overloaded("no room", retry_after_ms=7)
        open_stream.context.send(asked(1))
        open_stream.context.half_close()
        await open_stream.end()

        (answer,) = open_stream.answers()
        assert (answer.error.code, answer.error.reason, answer.error.retry_after_ms) == (8, "overloaded", 7)


async def test_an_unforeseen_exception_is_an_answer_with_fixed_text() -> None:
    async with stream() as open_stream:
        open_stream.flow.fail = ValueError("/srv/secret")
        with capture_logs() as logs:
            open_stream.context.send(asked(1))
            open_stream.context.half_close()
            await open_stream.end()

        (answer,) = open_stream.answers()
        assert answer.error.message == "internal error; the request id finds it in the server's log"
        assert [line["request_id"] for line in logs] == ["1"]


async def test_reading_stops_at_the_limit_and_goes_on_when_answers_are_written() -> None:
    async with stream(settings(gateway={"stream_in_flight": 3})) as open_stream:
        open_stream.flow.gate = asyncio.Event()
        open_stream.context.writable.clear()
        open_stream.context.send(*(asked(number) for number in range(10)))
        open_stream.context.half_close()
        await open_stream.flow.until(lambda flow: flow.running == 3, "three requests in work")
        assert open_stream.context.reads == 3

        open_stream.flow.gate.set()
        await open_stream.flow.until(lambda flow: flow.running == 0, "the three to be done")
        for _ in range(5):
            await asyncio.sleep(0)
        assert open_stream.context.reads == 3  # done, but the caller does not read: still no more work

        open_stream.context.writable.set()
        await open_stream.end()
        assert len(open_stream.answers()) == 10
        assert open_stream.flow.peak == 3


async def test_cancel_drops_all_work() -> None:
    async with stream() as open_stream:
        open_stream.flow.gate = asyncio.Event()
        open_stream.context.send(*(asked(number) for number in range(5)))
        await open_stream.flow.until(lambda flow: flow.running == 5, "five requests in work")

        open_stream.task.cancel()
        await asyncio.wait([open_stream.task])

        assert open_stream.flow.cancelled == 5
        assert open_stream.outcomes.counts == {
            ("PredictStream.answer", "cancelled"): 5,
            ("PredictStream", "cancelled"): 1,
        }


async def test_what_is_held_when_a_stream_ends_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.api.bunch.HOLD_S", 60.0)
    async with stream() as open_stream:
        open_stream.flow.gate = asyncio.Event()
        open_stream.context.send(asked(1), asked(2), asked(3))
        for _ in range(100):
            await asyncio.sleep(0)
        assert (open_stream.context.reads, len(open_stream.flow.requests)) == (3, 1)

        open_stream.task.cancel()
        await asyncio.wait([open_stream.task])
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(open_stream.flow.requests) == 1


async def test_a_caller_that_is_gone_when_an_answer_is_written_is_no_fault_of_ours() -> None:
    async with stream() as open_stream:
        open_stream.context.write_error = grpc.aio.UsageError("RPC already finished.")
        with capture_logs() as logs:
            open_stream.context.send(asked(1), asked(2))
            await open_stream.end()

        assert open_stream.context.code is grpc.StatusCode.CANCELLED
        assert logs == []


async def test_a_message_that_is_not_protobuf_ends_the_stream() -> None:
    async with stream() as open_stream:
        open_stream.flow.gate = asyncio.Event()
        open_stream.context.send(asked(1), b"\xff\xff")
        await open_stream.end()

        assert open_stream.context.code is grpc.StatusCode.INVALID_ARGUMENT
        assert open_stream.flow.cancelled == 1


@pytest.mark.parametrize(
    ("timeout_ms", "remaining_s", "limit_s"),
    [(0, None, 2.0), (500, None, 0.5), (60_000, None, 3.0), (2_000, 1.0, 1.0)],
    ids=["default", "the request's", "capped", "the stream's"],
)
async def test_every_request_has_its_own_deadline(timeout_ms: int, remaining_s: float | None, limit_s: float) -> None:
    chosen = settings(gateway={"default_deadline_ms": 2000, "max_deadline_ms": 3000})
    async with stream(chosen, remaining_s) as open_stream:
        open_stream.context.send(asked(1, timeout_ms=timeout_ms))
        open_stream.context.half_close()
        await open_stream.end()

        (request,) = open_stream.flow.requests
        assert request.deadline_s - request.arrived_s == pytest.approx(limit_s, abs=0.1)


async def test_a_request_after_the_streams_deadline_is_late() -> None:
    async with stream(remaining_s=0.0) as open_stream:
        open_stream.context.send(asked(1))
        open_stream.context.half_close()
        await open_stream.end()

        assert [one.error.reason for one in open_stream.answers()] == ["deadline_exceeded"]
        assert open_stream.flow.requests == []


async def test_draining_answers_what_was_read_and_ends_the_stream_as_unavailable() -> None:
    async with stream() as open_stream:
        open_stream.flow.gate = asyncio.Event()
        open_stream.context.send(asked(1), asked(2))
        await open_stream.flow.until(lambda flow: flow.running == 2, "two requests in work")

        open_stream.inference.drain.start()
        open_stream.flow.gate.set()
        await open_stream.end()

        assert sorted(one.id for one in open_stream.answers()) == [1, 2]
        assert open_stream.context.code is grpc.StatusCode.UNAVAILABLE
        assert open_stream.context.trailers["grpc-retry-pushback-ms"] == "500"


async def test_a_stream_that_opens_while_draining_ends_at_once() -> None:
    async with stream() as open_stream:
        open_stream.inference.drain.start()
        await open_stream.end()

        assert open_stream.context.code is grpc.StatusCode.UNAVAILABLE
