"""inference.GRPCInferenceService on a real gRPC server over a fake flow: what every client of the protocol sees."""

import asyncio
import collections
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from gateway.api.open_inference.grpc_wire import MAX_FIELDS
from protos.inference import grpc_service_pb2 as pb
from protos.inference import grpc_service_pb2_grpc as pb_grpc
from shared.errors import Overloaded
from shared.tensors import pack_bytes
from tests.support.fake_flow import VERSION, settings
from tests.support.open_inference_parts import Stack

Input = pb.ModelInferRequest.InferInputTensor
Output = pb.ModelInferRequest.InferRequestedOutputTensor
Contents = pb.InferTensorContents
SIXTEEN = np.arange(16, dtype="<f4")


@asynccontextmanager
async def calling(stack: Stack | None = None) -> AsyncIterator[tuple[Stack, "pb_grpc.GRPCInferenceServiceAsyncStub"]]:
    stack = stack or Stack()
    async with stack.serving() as running:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(running.address, options=options) as channel:
            yield stack, pb_grpc.GRPCInferenceServiceStub(channel)


def request(model: str = "identity", data: bytes | None = None, **fields: Any) -> pb.ModelInferRequest:  # noqa: ANN401 - any field
    """A right request to `identity`, changed by what is given; `data` None is its right data."""
    one = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 16]} | fields.pop("input", {})
    return pb.ModelInferRequest(
        model_name=model,
        inputs=[Input(**one)],
        raw_input_contents=[SIXTEEN.tobytes() if data is None else data],
        **fields,
    )


async def refused(call: Any) -> tuple[str, str]:  # noqa: ANN401 - any call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, caught.value.details() or ""


# ---------------------------------------------------------------- right requests


async def test_raw_data_comes_back_raw_with_id_version_and_timing() -> None:
    async with calling() as (_, stub):
        call = stub.ModelInfer(request(id="é any id", parameters={"custom": pb.InferParameter(string_param="x")}))
        answer = await call
        trailers = dict(await call.trailing_metadata())

    (output,) = answer.outputs
    assert (answer.model_name, answer.model_version, answer.id) == ("identity", VERSION, "é any id")
    assert (output.name, output.datatype, list(output.shape)) == ("OUTPUT0", "FP32", [1, 16])
    assert list(answer.raw_output_contents) == [SIXTEEN.tobytes()]
    assert "run;dur=2.000" in trailers["server-timing"]
    assert trailers["request-id"].isascii()


async def test_an_empty_id_stays_empty_and_a_short_one_is_the_request_id() -> None:
    async with calling() as (_, stub):
        assert (await stub.ModelInfer(request())).id == ""
        call = stub.ModelInfer(request(id="mine"))
        assert (await call).id == "mine"
        assert dict(await call.trailing_metadata())["request-id"] == "mine"


async def test_typed_contents_are_answered_raw() -> None:
    async with calling() as (_, stub):
        floats = pb.ModelInferRequest(
            model_name="identity",
            inputs=[Input(name="INPUT0", datatype="FP32", shape=[1, 16], contents=Contents(fp32_contents=SIXTEEN))],
        )
        texts = pb.ModelInferRequest(
            model_name="bytes",
            inputs=[
                Input(name="INPUT0", datatype="BYTES", shape=[2, 1], contents=Contents(bytes_contents=[b"a", b""]))
            ],
        )
        assert list((await stub.ModelInfer(floats)).raw_output_contents) == [SIXTEEN.tobytes()]
        assert list((await stub.ModelInfer(texts)).raw_output_contents) == [pack_bytes([b"a", b""])]


async def test_many_rows_and_inputs_in_any_order() -> None:
    a, b = (np.arange(12, dtype="<i4").reshape(3, 4) + base for base in (0, 100))
    inputs = [Input(name=name, datatype="INT32", shape=[3, 4]) for name in ("INPUT1", "INPUT0")]
    async with calling() as (stack, stub):
        answer = await stub.ModelInfer(
            pb.ModelInferRequest(model_name="pair", inputs=inputs, raw_input_contents=[b.tobytes(), a.tobytes()])
        )
        only = await stub.ModelInfer(
            pb.ModelInferRequest(
                model_name="pair",
                inputs=inputs,
                outputs=[Output(name="OUTPUT1"), Output(name="OUTPUT1")],
                raw_input_contents=[b.tobytes(), a.tobytes()],
            )
        )

    assert [output.name for output in answer.outputs] == ["OUTPUT0", "OUTPUT1"]
    assert list(answer.raw_output_contents) == [a.tobytes(), b.tobytes()]
    assert [output.name for output in only.outputs] == ["OUTPUT1"]
    assert list(only.raw_output_contents) == [b.tobytes()]
    assert stack.flow.requests[0].inputs[0].rows == 3


@pytest.mark.parametrize("shape", [[2], [2, 1]])
async def test_encoded_images_are_answered_as_tensors(shape: list[int]) -> None:
    images = [b"\x01 one", b"\x02 two"]
    async with calling() as (_, stub):
        answer = await stub.ModelInfer(
            request(
                "classifier",
                pack_bytes(images),
                input={"name": "image", "datatype": "BYTES", "shape": shape},
                parameters={"top_k": pb.InferParameter(int64_param=2)},
            )
        )

    raw = dict(zip((output.name for output in answer.outputs), answer.raw_output_contents, strict=True))
    assert [list(output.shape) for output in answer.outputs] == [[2, 2]] * 3
    assert np.frombuffer(raw["scores"], "<f4").tolist() == [0.5, 0.25, 0.5, 0.25]
    assert np.frombuffer(raw["classes"], "<i4").tolist() == [1, 2, 2, 3]
    assert raw["labels"] == pack_bytes([b"label 1", b"label 2", b"label 2", b"label 3"])


async def test_classification_of_tensors_and_of_an_image() -> None:
    values = np.array([[3, 9, 9, -1], [0, 1, 2, 3]], "<i4")
    k = {"classification": pb.InferParameter(int64_param=2)}
    async with calling() as (_, stub):
        pair = await stub.ModelInfer(
            pb.ModelInferRequest(
                model_name="pair",
                inputs=[Input(name=name, datatype="INT32", shape=[2, 4]) for name in ("INPUT0", "INPUT1")],
                outputs=[Output(name="OUTPUT0", parameters=k)],
                raw_input_contents=[values.tobytes(), values.tobytes()],
            )
        )
        image = await stub.ModelInfer(
            request(
                "classifier",
                pack_bytes([b"\x01"]),
                input={"name": "image", "datatype": "BYTES", "shape": [1, 1]},
                outputs=[Output(name="scores", parameters=k)],
            )
        )

    assert (pair.outputs[0].datatype, list(pair.outputs[0].shape)) == ("BYTES", [2, 2])
    assert pair.raw_output_contents[0] == pack_bytes([b"9:1:b", b"9:2:c", b"3:3:d", b"2:2:c"])
    assert image.raw_output_contents[0] == pack_bytes([b"0.500000:1:label 1", b"0.250000:2:label 2"])


# ---------------------------------------------------------------- wrong requests

LONG = "x" * 200_000
WRONG: dict[str, tuple[pb.ModelInferRequest, str, Sequence[str]]] = {
    "unknown model": (request("nothing"), "NOT_FOUND", ["'nothing'"]),
    "no model": (request(""), "NOT_FOUND", ["names no model"]),
    "path as model": (request("../identity"), "NOT_FOUND", ["'../identity'"]),
    "long model": (request(LONG), "NOT_FOUND", ["xxx…"]),
    "unknown version": (request(model_version="99"), "NOT_FOUND", ["'99'"]),
    "other hash": (request(model_version="f" * 16), "NOT_FOUND", ["f" * 16]),
    "version with junk": (request(model_version="1junk"), "INVALID_ARGUMENT", ["'1junk'"]),
    "negative version": (request(model_version="-1"), "INVALID_ARGUMENT", ["'-1'"]),
    "huge version": (request(model_version="9" * 40), "INVALID_ARGUMENT", ["999"]),
    "long version": (request(model_version=LONG), "INVALID_ARGUMENT", ["xxx…"]),
    "long id": (request("nothing", id=LONG), "NOT_FOUND", ["'nothing'"]),
    "no input": (pb.ModelInferRequest(model_name="identity"), "INVALID_ARGUMENT", ["1 input(s)", "has 0"]),
    "unknown input": (request(input={"name": "nope"}), "INVALID_ARGUMENT", ["'nope'", "INPUT0"]),
    "too many inputs": (
        pb.ModelInferRequest(
            model_name="identity", inputs=[Input(name=f"i{n}") for n in range(5)], raw_input_contents=[b""] * 5
        ),
        "INVALID_ARGUMENT",
        ["takes 1", "has 5"],
    ),
    "ten thousand inputs": (
        pb.ModelInferRequest(model_name="identity", inputs=[Input(name=f"i{n}") for n in range(10_000)]),
        "INVALID_ARGUMENT",
        [str(MAX_FIELDS)],
    ),
    "same input twice": (
        pb.ModelInferRequest(
            model_name="pair",
            inputs=[Input(name="INPUT0", datatype="INT32", shape=[1, 4])] * 2,
            raw_input_contents=[bytes(16)] * 2,
        ),
        "INVALID_ARGUMENT",
        ["'INPUT0' is given twice"],
    ),
    "one input missing": (
        pb.ModelInferRequest(
            model_name="pair",
            inputs=[Input(name="INPUT0", datatype="INT32", shape=[1, 4])],
            raw_input_contents=[bytes(16)],
        ),
        "INVALID_ARGUMENT",
        ["takes 2", "has 1"],
    ),
    "other datatype": (request(input={"datatype": "INT32"}), "INVALID_ARGUMENT", ["INT32", "FP32"]),
    "lower case datatype": (request(input={"datatype": "fp32"}), "INVALID_ARGUMENT", ["'fp32'", "known"]),
    "no datatype": (request(input={"datatype": ""}), "INVALID_ARGUMENT", ["datatype ''"]),
    "rank": (request(input={"shape": [16]}), "INVALID_ARGUMENT", ["[16]", "[-1, 16]"]),
    "dimension": (request(input={"shape": [1, 17]}), "INVALID_ARGUMENT", ["[1, 17]", "[-1, 16]"]),
    "minus one": (request(input={"shape": [-1, 16]}), "INVALID_ARGUMENT", ["[-1, 16]"]),
    "no rows": (request(data=b"", input={"shape": [0, 16]}), "INVALID_ARGUMENT", ["[0, 16]"]),
    "2^38 rows": (request(input={"shape": [1 << 38, 16]}), "INVALID_ARGUMENT", [str(1 << 38), "4096"]),
    "2^62 rows": (request(input={"shape": [1 << 62, 16]}), "INVALID_ARGUMENT", [str(1 << 62), "4096"]),
    "1 + 2^61 rows": (request(input={"shape": [1 + (1 << 61), 16]}), "INVALID_ARGUMENT", ["4096"]),
    "product wraps": (
        request("free", bytes(8), input={"shape": [1, 1 << 62, 2]}),
        "INVALID_ARGUMENT",
        [str((1 << 62) * 8), "8 bytes"],
    ),
    "hundred thousand dimensions": (request(input={"shape": [1] * 100_000}), "INVALID_ARGUMENT", ["…]", "[-1, 16]"]),
    "one byte short": (request(data=bytes(63)), "INVALID_ARGUMENT", ["'INPUT0'", "63", "64"]),
    "one byte more": (request(data=bytes(65)), "INVALID_ARGUMENT", ["'INPUT0'", "65", "64"]),
    "no data": (
        pb.ModelInferRequest(model_name="identity", inputs=[Input(name="INPUT0", datatype="FP32", shape=[1, 16])]),
        "INVALID_ARGUMENT",
        ["'INPUT0' has no data"],
    ),
    "surplus raw entry": (
        pb.ModelInferRequest(
            model_name="identity",
            inputs=[Input(name="INPUT0", datatype="FP32", shape=[1, 16])],
            raw_input_contents=[bytes(64), bytes(64)],
        ),
        "INVALID_ARGUMENT",
        ["2 raw_input_contents for 1"],
    ),
    "raw and empty contents": (request(input={"contents": Contents()}), "INVALID_ARGUMENT", ["'INPUT0'", "raw_"]),
    "typed in the wrong field": (
        pb.ModelInferRequest(
            model_name="identity",
            inputs=[Input(name="INPUT0", datatype="FP32", shape=[1, 16], contents=Contents(int_contents=range(16)))],
        ),
        "INVALID_ARGUMENT",
        ["int_contents", "fp32_contents"],
    ),
    "typed too few": (
        pb.ModelInferRequest(
            model_name="identity",
            inputs=[Input(name="INPUT0", datatype="FP32", shape=[1, 16], contents=Contents(fp32_contents=[1]))],
        ),
        "INVALID_ARGUMENT",
        ["4 bytes", "64"],
    ),
    "typed half": (
        pb.ModelInferRequest(
            model_name="identity",
            inputs=[Input(name="INPUT0", datatype="FP16", shape=[1, 16], contents=Contents(fp32_contents=[1]))],
        ),
        "INVALID_ARGUMENT",
        ["FP16", "raw_input_contents"],
    ),
    "cut BYTES": (
        request("bytes", pack_bytes([b"abc"])[:-1], input={"datatype": "BYTES", "shape": [1, 1]}),
        "INVALID_ARGUMENT",
        ["length 3", "2 bytes"],
    ),
    "unknown output": (request(outputs=[Output(name="nope")]), "INVALID_ARGUMENT", ["'nope'", "OUTPUT0"]),
    "ten thousand long outputs": (
        request(outputs=[Output(name=LONG[:100] + str(n)) for n in range(200)]),
        "INVALID_ARGUMENT",
        ["xxx…"],
    ),
    "timeout as text": (
        request(parameters={"timeout": pb.InferParameter(string_param="soon")}),
        "INVALID_ARGUMENT",
        ["'timeout'", "'soon'"],
    ),
    "priority below 0": (
        request(parameters={"priority": pb.InferParameter(int64_param=-1)}),
        "INVALID_ARGUMENT",
        ["'priority'", "-1"],
    ),
    "reserved parameter": (
        request(parameters={"triton_x": pb.InferParameter(bool_param=True)}),
        "INVALID_ARGUMENT",
        ["'triton_x'"],
    ),
    "parameter without a value": (
        request(parameters={"custom": pb.InferParameter()}),
        "INVALID_ARGUMENT",
        ["'custom' has no value"],
    ),
    "option out of range": (
        request(
            "classifier",
            pack_bytes([b"x"]),
            input={"name": "image", "datatype": "BYTES", "shape": [1]},
            parameters={"classification": pb.InferParameter(int64_param=1)},
            outputs=[Output(name="labels", parameters={"classification": pb.InferParameter(int64_param=1)})],
        ),
        "INVALID_ARGUMENT",
        ["'labels' is BYTES"],
    ),
    "shared memory while off": (
        pb.ModelInferRequest(
            model_name="identity",
            inputs=[
                Input(
                    name="INPUT0",
                    datatype="FP32",
                    shape=[1, 16],
                    parameters={
                        "shared_memory_region": pb.InferParameter(string_param="r"),
                        "shared_memory_byte_size": pb.InferParameter(int64_param=64),
                    },
                )
            ],
        ),
        "NOT_FOUND",
        ["'r'", "gateway.system_shared_memory_prefix"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_request_gets_its_status_and_sentence_and_the_next_one_works(case: str) -> None:
    wrong, code, parts = WRONG[case]
    async with calling() as (stack, stub):
        got, text = await refused(stub.ModelInfer(wrong))
        fine = await stub.ModelInfer(request())

    assert got == code, text
    assert len(text) < 1000
    for part in parts:
        assert part in text
    assert fine.outputs
    assert len(stack.flow.requests) == 1  # the wrong one never reached the flow


@pytest.mark.parametrize("case", ["one byte short", "surplus raw entry", "unknown output"])
async def test_a_refused_request_is_counted_as_failed(case: str) -> None:
    async with calling() as (_, stub):
        await refused(stub.ModelInfer(WRONG[case][0]))
        await refused(stub.ModelInfer(WRONG["unknown model"][0]))
        stats = (await stub.ModelStatistics(pb.ModelStatisticsRequest(name="identity"))).model_stats[0]
        everyone = (await stub.ModelStatistics(pb.ModelStatisticsRequest())).model_stats

    assert stats.inference_stats.fail.count == 1
    assert stats.inference_stats.success.count == 0
    assert "nothing" not in {one.name for one in everyone}


@pytest.mark.parametrize(
    "raw", [b"\xff" * 10, b"\x3a\xff\xff\xff\xff\x07", b"\x3a\x05abc", b"\x3b", b"\x0b", b"\x2a\x01"]
)
async def test_bytes_that_are_no_request_are_invalid_argument(raw: bytes) -> None:
    async with Stack().serving() as running, grpc.aio.insecure_channel(running.address) as channel:
        code, _ = await refused(channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(raw))

    assert code == "INVALID_ARGUMENT"


async def test_overload_is_resource_exhausted_and_a_message_over_the_limit_too() -> None:
    stack = Stack(settings(gateway={"max_message_bytes": 100_000}))
    async with calling(stack) as (_, stub):
        large = await refused(stub.ModelInfer(request(data=bytes(100_001))))
        stack.flow.fail = Overloaded("no room (admission.max_requests)", retry_after_ms=10)
        full = await refused(stub.ModelInfer(request()))

    assert large[0] == full[0] == "RESOURCE_EXHAUSTED"
    assert "gateway.max_message_bytes" in large[1]


# ---------------------------------------------------------------- time


async def test_the_timeout_parameter_and_the_grpc_deadline_become_the_flows_deadline() -> None:
    us = {"timeout": pb.InferParameter(int64_param=250_000)}
    async with calling() as (stack, stub):
        await stub.ModelInfer(request())
        await stub.ModelInfer(request(parameters=us))
        await stub.ModelInfer(request(), timeout=3)
        await stub.ModelInfer(request(parameters=us), timeout=3)
        await stub.ModelInfer(request(parameters={"timeout": pb.InferParameter(int64_param=20_000_000)}))

    limits = [one.deadline_s - one.arrived_s for one in stack.flow.requests]
    assert limits == pytest.approx([10, 0.25, 3, 0.25, 20], abs=0.1)


async def test_cancelling_and_a_passed_deadline_drop_the_work() -> None:
    async with calling() as (stack, stub):
        stack.flow.gate = asyncio.Event()
        call = stub.ModelInfer(request())
        await stack.flow.until(lambda flow: flow.running == 1, "the request to reach the flow")
        call.cancel()
        await stack.flow.until(lambda flow: flow.cancelled == 1, "the cancellation to reach the flow")
        assert (await refused(stub.ModelInfer(request(), timeout=0.05)))[0] == "DEADLINE_EXCEEDED"
        await stack.flow.until(lambda flow: flow.cancelled == 2, "the late work to be cancelled")


async def test_many_distinct_requests_at_once_get_their_own_answers() -> None:
    async with calling() as (stack, stub):
        stack.flow.delay_s = lambda _: 0.001 * (len(stack.flow.requests) % 7)

        async def one(number: int) -> bool:
            data = np.full(16, number, "<f4").tobytes()
            answer = await stub.ModelInfer(request(data=data, id=str(number)))
            return answer.id == str(number) and answer.raw_output_contents[0] == data

        assert all(await asyncio.gather(*(one(number) for number in range(500))))


# ---------------------------------------------------------------- stream


def _numbered(number: int, **fields: Any) -> pb.ModelInferRequest:  # noqa: ANN401 - any field
    return request(data=np.full(16, number, "<f4").tobytes(), id=str(number), **fields)


async def test_a_stream_answers_in_order_whatever_finishes_first_and_ends_ok() -> None:
    async with calling() as (stack, stub):
        stack.flow.delay_s = lambda one: (
            0.02 if float(np.frombuffer(one.inputs[0].tensors[0].data, "<f4")[0]) % 2 == 0 else 0
        )

        async def ask() -> AsyncIterator[pb.ModelInferRequest]:
            for number in range(100):
                yield _numbered(number)

        call = stub.ModelStreamInfer(ask())
        answers = [answer async for answer in call]
        code = await call.code()

    assert code is grpc.StatusCode.OK
    assert [answer.infer_response.id for answer in answers] == [str(number) for number in range(100)]
    assert all(
        np.frombuffer(answer.infer_response.raw_output_contents[0], "<f4")[0] == number
        for number, answer in enumerate(answers)
    )
    assert all(answer.infer_response.parameters["triton_final_response"].bool_param for answer in answers)
    assert not any(answer.error_message for answer in answers)


async def test_a_failed_request_of_a_stream_is_an_answer_with_its_id_and_the_stream_goes_on() -> None:
    final = {"triton_enable_empty_final_response": pb.InferParameter(bool_param=True)}
    async with Stack().serving() as running, grpc.aio.insecure_channel(running.address) as channel:
        raw = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )

        async def ask() -> AsyncIterator[bytes]:
            yield _numbered(0, parameters=final).SerializeToString()
            yield _numbered(1, model="nothing").SerializeToString()
            yield b"\xff\xff"
            yield _numbered(3, input={"shape": [2, 16]}).SerializeToString()
            yield _numbered(4).SerializeToString()

        call = raw(ask())
        answers = [answer async for answer in call]

        assert await call.code() is grpc.StatusCode.OK
        assert running.outcomes.counts[("ModelStreamInfer.answer", "invalid_input")] == 2
    assert [answer.infer_response.id for answer in answers] == ["0", "1", "", "3", "4"]
    assert [bool(answer.error_message) for answer in answers] == [False, True, True, True, False]
    assert "'nothing'" in answers[1].error_message
    assert "64" in answers[3].error_message


async def test_leaving_a_stream_cancels_its_work() -> None:
    async with calling() as (stack, stub):
        stack.flow.gate = asyncio.Event()
        call = stub.ModelStreamInfer()
        for number in range(5):
            await call.write(_numbered(number))
        await stack.flow.until(lambda flow: flow.running == 5, "five requests to reach the flow")
        call.cancel()
        await stack.flow.until(lambda flow: flow.cancelled == 5, "five cancellations to reach the flow")


async def test_a_stop_answers_what_a_stream_has_sent_and_ends_it_unavailable() -> None:
    stack = Stack()
    async with stack.serving() as running, grpc.aio.insecure_channel(running.address) as channel:
        stack.flow.gate = asyncio.Event()
        stub = pb_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer()
        await call.write(_numbered(7))
        await stack.flow.until(lambda flow: flow.running == 1, "the request to reach the flow")
        stopping = asyncio.create_task(running.stop(10))
        assert (await refused(stub.ModelInfer(request())))[0] == "UNAVAILABLE"
        stack.flow.gate.set()
        answers = [answer.infer_response.id async for answer in _until_error(call)]
        await stopping

    assert answers == ["7"]
    assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def _until_error(call: Any) -> AsyncIterator[Any]:  # noqa: ANN401 - a stream call
    try:
        async for answer in call:
            yield answer
    except grpc.aio.AioRpcError:
        return


# ---------------------------------------------------------------- facts


async def test_metadata_and_config_describe_the_same_model() -> None:
    async with calling() as (_, stub):
        described = await stub.ModelMetadata(pb.ModelMetadataRequest(name="free"))
        config = (await stub.ModelConfig(pb.ModelConfigRequest(name="free", version=VERSION))).config
        image = await stub.ModelMetadata(pb.ModelMetadataRequest(name="classifier"))
        text = (await stub.ModelConfig(pb.ModelConfigRequest(name="bytes"))).config
        unknown = await refused(stub.ModelMetadata(pb.ModelMetadataRequest(name="nothing")))

    assert list(described.versions) == [VERSION]
    assert [(one.name, one.datatype, list(one.shape)) for one in described.inputs] == [("INPUT0", "FP32", [-1, -1, 2])]
    assert [(one.name, one.data_type, list(one.dims)) for one in config.input] == [("INPUT0", pb.TYPE_FP32, [-1, 2])]
    assert (config.name, config.max_batch_size) == ("free", 8)
    assert config.WhichOneof("scheduling_choice") == "dynamic_batching"
    assert config.dynamic_batching.max_queue_delay_microseconds == 2000
    assert config.platform == described.platform != "ensemble"
    assert [(one.name, one.datatype, list(one.shape)) for one in image.inputs] == [("image", "BYTES", [-1, 1])]
    assert {one.name: one.datatype for one in image.outputs} == {
        "scores": "FP32",
        "classes": "INT32",
        "labels": "BYTES",
    }
    assert text.input[0].data_type == pb.TYPE_STRING
    assert unknown[0] == "NOT_FOUND"


async def test_server_metadata_names_only_what_works() -> None:
    on = Stack(settings(gateway={"system_shared_memory_prefix": "headrace-test"}))
    async with calling() as (_, stub), calling(on) as (_, other):
        plain = await stub.ServerMetadata(pb.ServerMetadataRequest())
        more = await other.ServerMetadata(pb.ServerMetadataRequest())

    assert plain.name == "headrace"
    assert {"statistics", "model_configuration"} <= set(plain.extensions)
    assert not {"system_shared_memory", "model_repository", "cuda_shared_memory", "trace", "logging"} & set(
        plain.extensions
    )
    assert set(more.extensions) - set(plain.extensions) == {"system_shared_memory"}


async def test_readiness_of_server_and_models() -> None:
    async with calling() as (stack, stub):
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert (await stub.ModelReady(pb.ModelReadyRequest(name="identity"))).ready
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="nothing"))).ready
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="identity", version="1"))).ready
        stack.state.set_reason("a worker is loading it")
        assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="identity"))).ready
        index = (await stub.RepositoryIndex(pb.RepositoryIndexRequest())).models
        ready = (await stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))).models

    assert {(one.name, one.state) for one in index} == {(one.name, "LOADING") for one in stack.state.known}
    assert not ready


async def test_statistics_have_equal_counts_of_the_compute_stages() -> None:
    async with calling() as (_, stub):
        for rows in (1, 1, 3):
            await stub.ModelInfer(request(data=bytes(64 * rows), input={"shape": [rows, 16]}))
        (stats,) = (await stub.ModelStatistics(pb.ModelStatisticsRequest(name="identity", version=VERSION))).model_stats
        unknown = await refused(stub.ModelStatistics(pb.ModelStatisticsRequest(name="nothing")))
        (newest,) = (await stub.ModelStatistics(pb.ModelStatisticsRequest(name="identity"))).model_stats
        (same,) = (
            await stub.ModelStatistics(pb.ModelStatisticsRequest(name="identity", version=newest.version))
        ).model_stats
        by_number = await stub.ModelInfer(request(model_version=newest.version))

    assert newest.version == same.version == str(int(VERSION[:15], 16))  # what a load generator can read as an integer
    assert by_number.model_version == VERSION
    inner = stats.inference_stats
    assert (stats.name, stats.version) == ("identity", VERSION)
    assert (stats.inference_count, stats.execution_count) == (5, 3)
    assert inner.success.count == inner.queue.count == 3
    assert inner.compute_input.count == inner.compute_infer.count == inner.compute_output.count == 3
    assert inner.HasField("cache_hit")
    assert inner.HasField("cache_miss")
    assert {one.batch_size: one.compute_infer.count for one in stats.batch_stats} == {1: 2, 3: 1}
    for one in stats.batch_stats:
        assert one.compute_input.count == one.compute_infer.count == one.compute_output.count
    assert stats.last_inference > 1_600_000_000_000
    assert unknown[0] == "INVALID_ARGUMENT"


async def test_what_is_switched_off_or_unknown_is_unimplemented() -> None:
    async with calling() as (_, stub):
        answers = [
            await refused(stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="identity"))),
            await refused(stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="identity"))),
            await refused(stub.RepositoryIndex(pb.RepositoryIndexRequest(repository_name="other"))),
            await refused(stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())),
            await refused(stub.SystemSharedMemoryRegister(pb.SystemSharedMemoryRegisterRequest(name="a", key="b"))),
            await refused(stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest())),
        ]

    assert collections.Counter(code for code, _ in answers) == {"UNIMPLEMENTED": 6}
    assert "gateway.repository_control" in answers[0][1]
    assert "gateway.system_shared_memory_prefix" in answers[3][1]


async def test_health_and_reflection_know_the_service() -> None:
    async with Stack().serving() as running, grpc.aio.insecure_channel(running.address) as channel:
        service = "inference.GRPCInferenceService"
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        info = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        questions = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=service),
        ]
        listed, described = [answer async for answer in info(iter(questions))]

    assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert service in {one.name for one in listed.list_services_response.service}
    assert described.file_descriptor_response.file_descriptor_proto
