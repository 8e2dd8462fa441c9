"""Health, reflection, stopping and HTTP of the real servers over a fake flow."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from prometheus_client import CollectorRegistry

from gateway.api.http import start_http
from protos.headrace.v1 import inference_pb2 as pb
from protos.headrace.v1 import inference_pb2_grpc as pb_grpc
from tests.support.fake_flow import Flow, State, serving, settings

ONE = pb.PredictRequest(inputs=[pb.Input(image=b"jpeg")])
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Reflection:
    """A client that knows nothing but the reflection service's name."""

    def __init__(self, channel: grpc.aio.Channel, version: str) -> None:
        self._method = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )

    async def ask(self, **question: str) -> reflection_pb2.ServerReflectionResponse:
        call = self._method(iter([reflection_pb2.ServerReflectionRequest(**question)]))
        async for answer in call:
            return answer
        raise AssertionError("reflection did not answer")

    async def pool(self, symbol: str) -> descriptor_pool.DescriptorPool:
        """Everything that the server says about the symbol."""
        answer = await self.ask(file_containing_symbol=symbol)
        pool = descriptor_pool.DescriptorPool()
        for raw in reversed(answer.file_descriptor_response.file_descriptor_proto):
            pool.Add(descriptor_pb2.FileDescriptorProto.FromString(raw))
        return pool


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_a_client_without_a_proto_file_lists_describes_and_calls(version: str) -> None:
    async with serving(Flow(), State()) as running, grpc.aio.insecure_channel(running.address) as channel:
        reflection = Reflection(channel, version)
        listed = {one.name for one in (await reflection.ask(list_services="")).list_services_response.service}
        pool = await reflection.pool("headrace.v1.Inference")
        method = pool.FindServiceByName("headrace.v1.Inference").FindMethodByName("Predict")
        request = message_factory.GetMessageClass(method.input_type)()
        json_format.ParseDict({"inputs": [{"image": "anBlZw=="}], "options": {"topK": 2}}, request)
        answer_type = message_factory.GetMessageClass(method.output_type)
        call = channel.unary_unary("/headrace.v1.Inference/Predict")
        answer = json_format.MessageToDict(answer_type.FromString(await call(request.SerializeToString())))
        own = await reflection.pool("grpc.reflection.v1.ServerReflection")

    assert listed == {
        "headrace.v1.Inference",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert [one["name"] for one in answer["results"][0]["classification"]["labels"]] == ["label 0", "label 1"]
    assert own.FindMessageTypeByName("grpc.reflection.v1.ServerReflectionRequest")


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_survives_bad_questions(version: str) -> None:
    async with serving(Flow(), State()) as running, grpc.aio.insecure_channel(running.address) as channel:
        reflection = Reflection(channel, version)
        unknown = await reflection.ask(file_containing_symbol="no.such.Thing")
        raw = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")(
            iter([b"\xff\xff"])
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(raw))

    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_switched_off_is_unimplemented(version: str) -> None:
    chosen = settings(gateway={"reflection": False})
    async with serving(Flow(), State(), chosen) as running, grpc.aio.insecure_channel(running.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Reflection(channel, version).ask(list_services="")

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_follows_the_state() -> None:
    state = State("a")
    state.set_reason("no worker has said hello")
    async with serving(Flow(), state) as running, grpc.aio.insecure_channel(running.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = aiter(health.Watch(health_pb2.HealthCheckRequest(service="a")))
        told = [(await anext(watch)).status]
        state.set_reason(None)
        told.append((await anext(watch)).status)
        whole = (await health.Check(health_pb2.HealthCheckRequest())).status
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="b"))

    assert told == [NOT_SERVING, SERVING]
    assert whole == SERVING
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_stop_says_not_serving_then_lets_running_calls_finish_and_takes_no_new_ones() -> None:
    flow = Flow()
    flow.gate = asyncio.Event()
    async with serving(flow, State()) as running, grpc.aio.insecure_channel(running.address) as channel:
        stub = pb_grpc.InferenceStub(channel)
        watch = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        assert (await anext(watch)).status == SERVING
        call = asyncio.ensure_future(stub.Predict(ONE, timeout=10))
        await flow.until(lambda one: one.running == 1, "the request to reach the flow")

        stopping = asyncio.create_task(running.stop(grace_s=10.0))
        assert (await anext(watch)).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Predict(ONE, timeout=10)
        assert not stopping.done()
        flow.gate.set()

        assert (await call).results
        assert await anext(watch, None) is None
        async with asyncio.timeout(5):
            await stopping
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == "500"
    assert running.outcomes.counts == {("Predict", "ok"): 1, ("Predict", "draining"): 1}


async def test_stop_cuts_what_outlives_the_grace() -> None:
    flow = Flow()
    flow.gate = asyncio.Event()
    async with serving(flow, State()) as running, grpc.aio.insecure_channel(running.address) as channel:
        call = asyncio.ensure_future(pb_grpc.InferenceStub(channel).Predict(ONE, timeout=10))
        await flow.until(lambda one: one.running == 1, "the request to reach the flow")
        async with asyncio.timeout(5):
            await running.stop(grace_s=0.05)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call

    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert flow.cancelled == 1


async def test_a_lame_duck_still_answers() -> None:
    async with serving(Flow(), State()) as running, grpc.aio.insecure_channel(running.address) as channel:
        running.stop_serving()
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        answer = await pb_grpc.InferenceStub(channel).Predict(ONE, timeout=5)

    assert health.status == NOT_SERVING
    assert answer.results


async def test_idle_streams_do_not_hold_up_a_stop() -> None:
    async with serving(Flow(), State()) as running, grpc.aio.insecure_channel(running.address) as channel:
        predictions = pb_grpc.InferenceStub(channel).PredictStream()
        await predictions.write(pb.PredictStreamRequest(id=1, request=ONE))
        assert (await anext(aiter(predictions))).id == 1
        watch = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        assert (await anext(watch)).status == SERVING
        never = asyncio.Event()

        async def silent() -> AsyncIterator[bytes]:
            yield reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
            await never.wait()

        reflecting = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")(silent())
        assert await anext(aiter(reflecting))

        async with asyncio.timeout(5):
            await running.stop(grace_s=60.0)

        assert await predictions.code() is grpc.StatusCode.UNAVAILABLE
        assert [told.status async for told in watch] == [NOT_SERVING]


async def test_http_serves_beside_grpc_on_the_same_loop_and_stops() -> None:
    state, registry = State(), CollectorRegistry()
    async with serving(Flow(), state) as running:
        registry.register(running.outcomes)
        http = await start_http(settings(), state, registry)
        async with (
            grpc.aio.insecure_channel(running.address) as channel,
            httpx.AsyncClient(base_url=f"http://{http.address}", trust_env=False) as web,
        ):
            await pb_grpc.InferenceStub(channel).Predict(ONE, timeout=5)
            metrics = (await web.get("/metrics")).text
            state.set_reason("the server is stopping")
            ready = await web.get("/readyz")
        async with asyncio.timeout(5):
            await http.stop()
        with pytest.raises(OSError, match=r".*"):
            await asyncio.open_connection("127.0.0.1", http.port)

    assert 'headrace_calls_total{method="Predict",reason="ok"} 1.0' in metrics
    assert (ready.status_code, ready.text) == (503, "the server is stopping\n")
