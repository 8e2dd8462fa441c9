"""The real gRPC server over a fake flow: what a caller sees."""

import asyncio
import collections
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from grpc_status import rpc_status

from gateway.api.server import RunningGrpc, start_grpc
from protos.headrace.v1 import inference_pb2 as pb
from protos.headrace.v1 import inference_pb2_grpc as pb_grpc
from shared.errors import ExitCode, Overloaded, StartupError
from tests.support.fake_flow import Flow, State, serving, settings

ONE = pb.PredictRequest(inputs=[pb.Input(image=b"jpeg")])


def channel(running: RunningGrpc, *options: tuple[str, Any]) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(running.address, options=[("grpc.use_local_subchannel_pool", 1), *options])


def stub_of(open_channel: grpc.aio.Channel) -> "pb_grpc.InferenceAsyncStub":
    return pb_grpc.InferenceStub(open_channel)


async def failure(call: Any) -> grpc.aio.AioRpcError:  # noqa: ANN401 - any kind of call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_answers_with_request_id_and_server_timing() -> None:
    async with serving(Flow(), State()) as running, channel(running) as opened:
        call = stub_of(opened).Predict(ONE, timeout=5)
        answer = await call
        trailers = dict(await call.trailing_metadata())

    assert answer.results[0].classification.labels[0].name == "label 0"
    assert trailers["request-id"] == answer.request_id
    assert "run;dur=2.000" in trailers["server-timing"]


async def test_a_refusal_has_the_rich_status_that_grpcs_own_tools_read() -> None:
    flow = Flow()
    flow.fail = Overloaded("admission.max_requests (2048) requests are in flight", retry_after_ms=40)
    async with serving(flow, State()) as running, channel(running) as opened:
        error = await failure(stub_of(opened).Predict(ONE, timeout=5))

    rich = rpc_status.from_call(error)
    info, retry = ErrorInfo(), RetryInfo()
    assert rich.details[0].Unpack(info)
    assert rich.details[1].Unpack(retry)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (info.reason, info.domain) == ("overloaded", "headrace")
    assert retry.retry_delay.ToMilliseconds() == 40
    assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "40"


@pytest.mark.parametrize("over", [1, 1024 * 1024], ids=["a little", "far"])
async def test_a_message_over_the_limit_is_resource_exhausted_and_the_next_one_works(over: int) -> None:
    limit = 1024 * 1024
    async with (
        serving(Flow(), State(), settings(gateway={"max_message_bytes": limit})) as running,
        channel(running) as opened,
    ):
        raw = opened.unary_unary("/headrace.v1.Inference/Predict")
        error = await failure(raw(bytes(limit + over)))
        fine = await stub_of(opened).Predict(ONE)

    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("gateway.max_message_bytes" in (error.details() or "")) == (over == 1)
    assert fine.results


@pytest.mark.parametrize(
    "raw", [b"\xff" * 10, b"\x22\xff\xff\xff\xff\x0f", b"\x22\x01" * 1000, b"\x22\x00" * 1_000_000, b"\x0b" * 100_000]
)
async def test_bytes_that_are_no_request_are_invalid_argument_or_too_large(raw: bytes) -> None:
    async with serving(Flow(), State()) as running, channel(running) as opened:
        error = await failure(opened.unary_unary("/headrace.v1.Inference/Predict")(raw))

    assert error.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert dict(error.trailing_metadata())["error-reason"] in {"invalid_input", "too_large"}


@pytest.mark.parametrize("field", ["model", "version", "request_id"])
@pytest.mark.parametrize("size", [200, 100_000])
async def test_a_long_field_is_refused_with_its_own_reason_and_not_for_the_length_of_the_error(
    field: str, size: int
) -> None:
    request = pb.PredictRequest(inputs=ONE.inputs, **{field: "é" * size})  # type: ignore[arg-type]  # one of three
    async with serving(Flow(), State()) as running, channel(running) as opened:
        error = await failure(stub_of(opened).Predict(request))

    assert error.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    assert (error.details() or "").startswith(f"{field} is ")


async def test_too_much_metadata_is_refused_and_the_server_lives() -> None:
    async with serving(Flow(), State()) as running, channel(running) as opened:
        error = await failure(stub_of(opened).Predict(ONE, metadata=[("x", "y" * 20_000)]))
        fine = await stub_of(opened).Predict(ONE)

    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert fine.results


async def test_an_unknown_method_is_unimplemented() -> None:
    async with serving(Flow(), State()) as running, channel(running) as opened:
        error = await failure(opened.unary_unary("/headrace.v1.Inference/Nothing")(b""))

    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_cancelled_call_reaches_the_flow_as_a_cancellation() -> None:
    flow = Flow()
    flow.gate = asyncio.Event()
    async with serving(flow, State()) as running, channel(running) as opened:
        call = stub_of(opened).Predict(ONE)
        await flow.until(lambda one: one.running == 1, "the request to reach the flow")
        call.cancel()
        await flow.until(lambda one: one.cancelled == 1, "the cancellation to reach the flow")
        assert await running.outcomes.wait_idle(5)

        assert running.outcomes.counts == {("Predict", "cancelled"): 1}


async def test_a_deadline_that_passes_cancels_the_work_and_counts_as_late() -> None:
    flow = Flow()
    flow.gate = asyncio.Event()
    async with serving(flow, State()) as running, channel(running) as opened:
        error = await failure(stub_of(opened).Predict(ONE, timeout=0.05))
        await flow.until(lambda one: one.cancelled == 1, "the late work to be cancelled")
        assert await running.outcomes.wait_idle(5)

        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert running.outcomes.counts == {("Predict", "deadline_exceeded"): 1}


async def test_a_dropped_connection_cancels_all_its_calls() -> None:
    flow = Flow()
    flow.gate = asyncio.Event()
    async with serving(flow, State()) as running:
        opened = channel(running)
        calls = [asyncio.ensure_future(stub_of(opened).Predict(ONE)) for _ in range(10)]
        await flow.until(lambda one: one.running == 10, "ten requests to reach the flow")
        await opened.close()
        await flow.until(lambda one: one.cancelled == 10, "ten cancellations to reach the flow")
        await asyncio.gather(*calls, return_exceptions=True)


async def test_a_burst_ends_in_nothing_but_answers_and_refusals_and_both_sides_count_the_same() -> None:
    burst, room, streams = 4000, 300, 2000  # more calls than streams: the rest waits in the client, and none is lost

    class Small(Flow):
        async def answer(self, request: Any) -> Any:  # noqa: ANN401 - the flow's own types
            if self.running >= room:
                raise Overloaded("no room", retry_after_ms=10)
            return await super().answer(request)

    flow = Small()
    flow.delay_s = lambda _: 0.001
    chosen = settings(admission={"max_requests": streams // 2, "max_rows": streams})
    seen: collections.Counter[str] = collections.Counter()
    async with serving(flow, State(), chosen) as running, channel(running) as opened:
        stub = stub_of(opened)

        async def one() -> None:
            try:
                await stub.Predict(ONE, timeout=60)
                seen["OK"] += 1
            except grpc.aio.AioRpcError as error:
                seen[error.code().name] += 1

        await asyncio.gather(*(one() for _ in range(burst)))
        counts = dict(running.outcomes.counts)

    assert set(seen) <= {"OK", "RESOURCE_EXHAUSTED"}
    assert sum(seen.values()) == burst
    assert counts[("Predict", "ok")] == seen["OK"] > 0
    assert counts.get(("Predict", "overloaded"), 0) == seen["RESOURCE_EXHAUSTED"]
    assert sum(counts.values()) == burst


async def test_a_second_server_on_the_port_is_in_use() -> None:
    async with serving(Flow(), State()) as running:
        with pytest.raises(StartupError, match=rf"gateway\.grpc_address {running.address}") as caught:
            await start_grpc(settings(gateway={"grpc_address": running.address}), Flow(), State())

    assert caught.value.exit_code is ExitCode.IN_USE
