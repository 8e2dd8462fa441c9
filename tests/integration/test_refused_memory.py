"""A refused call gives its memory back at once: nothing of it waits for the garbage collector."""

import asyncio
import gc
from collections.abc import Iterator
from types import CodeType, CoroutineType, FrameType
from typing import Any, NoReturn

import grpc
import httpx
import pytest

from gateway.request import Answer, Request
from protos.headrace.v1 import inference_pb2 as pb
from protos.inference import grpc_service_pb2 as v2
from shared.errors import DeadlineExceeded, HeadraceError, Overloaded
from tests.support.fake_flow import Flow, State, serving
from tests.support.fake_rest import serving_http
from tests.support.open_inference_parts import Stack

CALLS = 5
TENSOR = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": [0.0] * 16}


def no_room(request: Request) -> NoReturn:
    raise Overloaded(f"no room for {request.nbytes} bytes", retry_after_ms=1)


async def refuse(request: Request) -> Answer:
    """As the flow does: two failures, one inside the other, below a frame that holds the request."""
    try:
        no_room(request)
    except Overloaded as error:
        raise DeadlineExceeded("too late") from error


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def left_behind() -> list[str]:
    """What of the gateway's nobody holds any more, and only the collector would find."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = [one for one in map(_ours, gc.garbage) if one]
    gc.garbage.clear()
    return sorted(set(found))


def _ours(one: object) -> str:
    if type(one) is FrameType:
        return _named("frame", one.f_code)
    if type(one) is CoroutineType:
        return _named("coroutine", one.cr_code)
    if issubclass(type(one), HeadraceError) or type(one).__module__.startswith(("gateway.", "protos.")):
        return repr(type(one))
    return ""


def _named(kind: str, code: CodeType) -> str:
    return f"{kind} {code.co_qualname}" if "/gateway/" in code.co_filename else ""


async def ended_calls() -> int:
    """Ends of calls that somebody still remembers, once all is quiet."""
    for _ in range(100):
        await asyncio.sleep(0)
    return sum(type(one) is grpc.aio.AbortError for one in gc.get_objects())  # isinstance would ask every object


async def refused(call: Any) -> None:  # noqa: ANN401 - any kind of call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_over_grpc() -> None:
    flow = Flow()
    flow.answer = refuse  # type: ignore[method-assign]  # nothing is remembered
    async with serving(flow, State()) as running, grpc.aio.insecure_channel(running.address) as opened:
        predict: Any = opened.unary_unary("/headrace.v1.Inference/Predict")
        asked = pb.PredictRequest(inputs=[pb.Input(image=bytes(100_000))]).SerializeToString()
        await refused(predict(asked))
        gc.collect()  # of the start
        for _ in range(CALLS):
            await refused(predict(asked))
        assert await ended_calls() <= 1  # gRPC's own loop keeps its last one until the next
        assert left_behind() == []


async def test_over_the_open_inference_protocol() -> None:
    stack = Stack()
    stack.flow.answer = refuse  # type: ignore[method-assign]  # nothing is remembered
    async with stack.serving() as running, grpc.aio.insecure_channel(running.address) as opened:
        infer: Any = opened.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        one = v2.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 16])
        message = v2.ModelInferRequest(model_name="identity", inputs=[one], raw_input_contents=[bytes(64)])
        asked = message.SerializeToString()
        await refused(infer(asked))
        gc.collect()
        for _ in range(CALLS):
            await refused(infer(asked))
        assert left_behind() == []


async def test_over_http() -> None:
    async with serving_http() as site:
        site.flow.answer = refuse  # type: ignore[method-assign]  # nothing is remembered

        async def post() -> httpx.Response:
            return await site.client.post("/v2/models/identity/infer", json={"inputs": [TENSOR]})

        await post()
        gc.collect()
        for _ in range(CALLS):
            assert (await post()).status_code == 504
        assert left_behind() == []
