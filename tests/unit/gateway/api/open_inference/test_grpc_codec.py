"""What only the gRPC form can get wrong, and typed contents of every datatype against numpy."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.open_inference import grpc_codec
from gateway.api.open_inference.grpc_wire import Received
from gateway.api.open_inference.model import InferOutput, InferRequest, InferResponse
from protos.inference import grpc_service_pb2 as pb
from shared.errors import InvalidInput
from shared.tensors import DTYPES, MAX_BYTES_ELEMENTS, pack_bytes

Input = pb.ModelInferRequest.InferInputTensor
Output = pb.ModelInferRequest.InferRequestedOutputTensor
Contents = pb.InferTensorContents
REGION = {"shared_memory_region": pb.InferParameter(string_param="r")}


def decoded(*inputs: Input, raw: tuple[bytes, ...] = (), **fields: Any) -> InferRequest:  # noqa: ANN401 - any field
    message = pb.ModelInferRequest(model_name="m", inputs=inputs, **fields)
    return grpc_codec.request(Received(message, [memoryview(entry) for entry in raw]), 1.0, 2.0)


def test_a_whole_request() -> None:
    request = decoded(
        Input(name="a", datatype="FP32", shape=[1, 2], parameters={"p": pb.InferParameter(double_param=0.5)}),
        Input(name="b", datatype="BYTES", shape=[1], parameters=REGION),
        raw=(b"12345678",),
        model_version="v",
        id="id",
        outputs=[Output(name="y", parameters={"classification": pb.InferParameter(int64_param=3)})],
        parameters={
            "i": pb.InferParameter(int64_param=-5),
            "u": pb.InferParameter(uint64_param=2**64 - 1),
            "s": pb.InferParameter(string_param="text"),
            "b": pb.InferParameter(bool_param=False),
        },
    )

    assert (request.model, request.version, request.id) == ("m", "v", "id")
    assert (request.arrived_s, request.deadline_s) == (1.0, 2.0)
    assert request.parameters == {"i": -5, "u": 2**64 - 1, "s": "text", "b": False}
    assert [(one.name, one.datatype, one.shape, bytes(one.data)) for one in request.inputs] == [
        ("a", "FP32", (1, 2), b"12345678"),
        ("b", "BYTES", (1,), b""),
    ]
    assert request.inputs[0].parameters == {"p": 0.5}
    assert request.outputs[0].parameters == {"classification": 3}


@pytest.mark.parametrize("datatype", sorted(set(DTYPES) - {"FP16", "BF16", "BYTES"}))
@given(st.data())
def test_typed_contents_become_the_bytes_that_numpy_has(datatype: str, data: st.DataObject) -> None:
    dtype = DTYPES[datatype]
    array = np.frombuffer(data.draw(st.binary(max_size=64).map(lambda raw: raw[: len(raw) // 8 * 8])), "u1")
    array = (array % 2).astype("?") if datatype == "BOOL" else array.view(dtype)
    array = np.where(np.isnan(array), 0, array).astype(dtype) if dtype.kind == "f" else array
    contents = Contents(**{grpc_codec._FIELDS[datatype]: array.tolist()})

    request = decoded(Input(name="x", datatype=datatype, shape=[len(array)], contents=contents))

    assert request.inputs[0].data == array.tobytes()


@given(st.lists(st.binary(max_size=9), max_size=5))
def test_typed_bytes_get_their_lengths(elements: list[bytes]) -> None:
    contents = Contents(bytes_contents=elements)
    request = decoded(Input(name="x", datatype="BYTES", shape=[len(elements)], contents=contents))

    assert request.inputs[0].data == pack_bytes(elements)


def test_typed_bytes_of_all_inputs_together_have_a_limit() -> None:
    half = Input(name="x", datatype="BYTES", contents=Contents(bytes_contents=[b""] * (MAX_BYTES_ELEMENTS // 2 + 1)))
    assert decoded(half)
    with pytest.raises(InvalidInput, match=r"131073 BYTES elements after 131073 .*; a request may have at most 262144"):
        decoded(half, half)


@pytest.mark.parametrize(("datatype", "value"), [("UINT8", 256), ("INT8", -129), ("UINT16", 65536), ("INT16", 32768)])
def test_typed_values_out_of_range_are_refused_not_cut(datatype: str, value: int) -> None:
    contents = Contents(**{grpc_codec._FIELDS[datatype]: [value]})
    with pytest.raises(InvalidInput, match=f"'x' has the value {value}; {datatype} has"):
        decoded(Input(name="x", datatype=datatype, shape=[1], contents=contents))


FP32 = {"name": "x", "datatype": "FP32", "shape": [1]}
ONE = Contents(fp32_contents=[1.0])


@pytest.mark.parametrize(
    ("inputs", "raw", "part"),
    [
        ([Input(**FP32)], (), "'x' has no data"),
        ([Input(**FP32)], (b"", b""), "2 raw_input_contents for 1 inputs"),
        ([Input(**FP32), Input(**FP32)], (b"",), "1 raw_input_contents for 2 inputs"),
        ([Input(**FP32, parameters=REGION)], (b"",), "1 raw_input_contents for 0 inputs"),
        ([Input(**FP32, contents=ONE)], (b"1234",), "raw_input_contents"),
        ([Input(**FP32, contents=Contents())], (b"1234",), "raw_input_contents"),
        ([Input(**FP32, contents=ONE, parameters=REGION)], (), "shared memory"),
        ([Input(**FP32, contents=Contents(fp64_contents=[1]))], (), "fp64_contents; .* belong in fp32_contents"),
        ([Input(**FP32, contents=Contents(fp32_contents=[1], int_contents=[1]))], (), "int_contents"),
        ([Input(name="x", datatype="BF16", shape=[1], contents=ONE)], (), "BF16"),
        ([Input(name="x", datatype="nope", shape=[1], contents=ONE)], (), "'nope'"),
        ([Input(**FP32)] * 257, (), "257 inputs; at most 256"),
    ],
)
def test_data_in_the_wrong_place_is_refused(inputs: list[Input], raw: tuple[bytes, ...], part: str) -> None:
    with pytest.raises(InvalidInput, match=part):
        decoded(*inputs, raw=raw)


def test_a_parameter_needs_a_value_and_there_are_not_thousands() -> None:
    with pytest.raises(InvalidInput, match="the request: parameter 'p' has no value"):
        decoded(parameters={"p": pb.InferParameter()})
    with pytest.raises(InvalidInput, match="257 parameters; at most 256"):
        decoded(parameters={str(number): pb.InferParameter(bool_param=True) for number in range(257)})
    with pytest.raises(InvalidInput, match="input 'x': parameter 'p'"):
        decoded(Input(**FP32, parameters={"p": pb.InferParameter()}))


def test_an_answer_is_raw_with_one_entry_per_output() -> None:
    outputs = [
        InferOutput("a", "FP32", (1, 1), memoryview(b"1234"), {}),
        InferOutput("b", "BYTES", (0,), b"", {}),
    ]
    answer = InferResponse("m", "v", "id", outputs)

    message = pb.ModelInferResponse.FromString(grpc_codec.response(answer))
    stream = pb.ModelStreamInferResponse.FromString(grpc_codec.stream_response(answer))

    assert (message.model_name, message.model_version, message.id) == ("m", "v", "id")
    assert [(one.name, one.datatype, list(one.shape)) for one in message.outputs] == [
        ("a", "FP32", [1, 1]),
        ("b", "BYTES", [0]),
    ]
    assert list(message.raw_output_contents) == [b"1234", b""]
    assert not message.outputs[0].HasField("contents")
    assert stream.infer_response.parameters.pop("triton_final_response").bool_param
    assert stream.infer_response == message
    assert not stream.error_message


def test_a_failed_request_of_a_stream_has_text_and_id() -> None:
    message = pb.ModelStreamInferResponse.FromString(grpc_codec.stream_error("mine", "no"))

    assert (message.error_message, message.infer_response.id) == ("no", "mine")
