"""Any request that a client can build, through walker, codec and checks: an answer, or a foreseen refusal."""

import asyncio
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.open_inference import grpc_codec, grpc_wire
from gateway.api.open_inference.datatypes import NAMES
from gateway.api.open_inference.infer import log_id
from gateway.request import StageTimes
from protos.inference import grpc_service_pb2 as pb
from shared.clock import now_s
from shared.errors import Code, HeadraceError
from shared.tensors import DTYPES, pack_bytes
from tests.support.open_inference_parts import Stack

STACK = Stack()
FORESEEN = {
    Code.INVALID_INPUT,
    Code.INVALID_OPTION,
    Code.TOO_LARGE,
    Code.UNKNOWN_MODEL,
    Code.UNKNOWN_VERSION,
    Code.UNKNOWN_REGION,
    Code.DEADLINE_EXCEEDED,
}


def answered(serialized: bytes) -> pb.ModelInferResponse | HeadraceError:
    """What the service does with a received message, without a network."""
    try:
        received = grpc_wire.parse(serialized)
        arrived_s = now_s()
        request = grpc_codec.request(received, arrived_s, arrived_s + 10)
        answer = asyncio.run(STACK.infer.infer(request, "id", StageTimes()))
    except HeadraceError as error:
        return error
    return pb.ModelInferResponse.FromString(grpc_codec.response(answer))


NAME = st.sampled_from(["INPUT0", "INPUT1", "OUTPUT0", "image", "scores", "", "x" * 300])
DIM = st.sampled_from([0, 1, 2, 4, 16, -1, 2**31, 2**61, 2**62, -(2**63), 2**63 - 1])
VALUE = st.one_of(
    st.builds(lambda value: pb.InferParameter(bool_param=value), st.booleans()),
    st.builds(lambda value: pb.InferParameter(int64_param=value), st.sampled_from([0, 1, 3, -1, 2**62, -(2**63)])),
    st.builds(lambda value: pb.InferParameter(string_param=value), st.text(max_size=3)),
    st.builds(lambda value: pb.InferParameter(double_param=value), st.floats()),
    st.builds(lambda value: pb.InferParameter(uint64_param=value), st.sampled_from([0, 2**64 - 1])),
    st.builds(pb.InferParameter),
)
KEY = st.sampled_from(
    [
        "timeout",
        "priority",
        "top_k",
        "classification",
        "shared_memory_region",
        "shared_memory_byte_size",
        "triton_x",
        "x",
    ]
)
PARAMETERS = st.dictionaries(KEY, VALUE, max_size=2)
CONTENTS = st.one_of(
    st.builds(lambda values: pb.InferTensorContents(fp32_contents=values), st.lists(st.floats(width=32), max_size=16)),
    st.builds(lambda values: pb.InferTensorContents(int_contents=values), st.lists(st.integers(-3, 3), max_size=4)),
    st.builds(
        lambda values: pb.InferTensorContents(bytes_contents=values), st.lists(st.binary(max_size=3), max_size=3)
    ),
)
INPUT = st.builds(
    lambda name, datatype, shape, parameters, contents: pb.ModelInferRequest.InferInputTensor(
        name=name, datatype=datatype, shape=shape, parameters=parameters, contents=contents
    ),
    NAME,
    st.sampled_from([*NAMES, "", "fp32"]),
    st.lists(DIM, max_size=3),
    PARAMETERS,
    st.none() | CONTENTS,
)
OUTPUT = st.builds(
    lambda name, parameters: pb.ModelInferRequest.InferRequestedOutputTensor(name=name, parameters=parameters),
    NAME,
    PARAMETERS,
)
REQUEST = st.builds(
    lambda model, version, parameters, inputs, outputs, raw: pb.ModelInferRequest(
        model_name=model,
        model_version=version,
        parameters=parameters,
        inputs=inputs,
        outputs=outputs,
        raw_input_contents=raw,
    ),
    st.sampled_from(["identity", "bytes", "free", "pair", "classifier", ""]),
    st.sampled_from(["", "", "", "1", "1x"]),
    PARAMETERS,
    st.lists(INPUT, max_size=2),
    st.lists(OUTPUT, max_size=2),
    st.lists(st.binary(max_size=8) | st.just(bytes(64)) | st.just(pack_bytes([b"x"])), max_size=2),
)


def assert_foreseen(outcome: pb.ModelInferResponse | HeadraceError) -> None:
    if isinstance(outcome, HeadraceError):
        assert outcome.code in FORESEEN, outcome.text
        assert 10 < len(outcome.text) < 1200
    else:
        assert len(outcome.outputs) == len(outcome.raw_output_contents) > 0


@given(REQUEST)
def test_requests_that_are_nearly_right(request: pb.ModelInferRequest) -> None:
    assert_foreseen(answered(request.SerializeToString()))


@given(st.data())
def test_right_requests_with_a_few_bytes_changed(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from(["identity", "bytes", "classifier"]))
    raw = bytearray(RIGHT[model].SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        outcome = answered(bytes(raw))
    except DecodeError:
        return  # the edge's business: INVALID_ARGUMENT
    assert_foreseen(outcome)


def _right(model: str, name: str, datatype: str, shape: list[int], raw: bytes, **fields: Any) -> pb.ModelInferRequest:  # noqa: ANN401 - any field
    one = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
    return pb.ModelInferRequest(model_name=model, inputs=[one], raw_input_contents=[raw], **fields)


RIGHT = {
    "identity": _right("identity", "INPUT0", "FP32", [1, 16], bytes(64), id="x"),
    "bytes": _right("bytes", "INPUT0", "BYTES", [2, 1], pack_bytes([b"abc", b""])),
    "classifier": _right(
        "classifier",
        "image",
        "BYTES",
        [1, 1],
        pack_bytes([b"image"]),
        parameters={"top_k": pb.InferParameter(int64_param=2)},
        outputs=[
            pb.ModelInferRequest.InferRequestedOutputTensor(
                name="scores", parameters={"classification": pb.InferParameter(int64_param=1)}
            )
        ],
    ),
}


@pytest.mark.parametrize("model", RIGHT)
def test_the_right_ones_are_right(model: str) -> None:
    assert isinstance(answered(RIGHT[model].SerializeToString()), pb.ModelInferResponse)


@given(st.lists(st.lists(st.floats(width=32), min_size=16, max_size=16), min_size=1, max_size=20))
def test_what_goes_through_identity_comes_back_bit_by_bit(rows: list[list[float]]) -> None:
    raw = np.array(rows, DTYPES["FP32"]).tobytes()
    answer = answered(_right("identity", "INPUT0", "FP32", [len(rows), 16], raw).SerializeToString())

    assert isinstance(answer, pb.ModelInferResponse)
    assert list(answer.raw_output_contents) == [raw]
    assert list(answer.outputs[0].shape) == [len(rows), 16]


def test_an_id_stands_in_the_log_only_when_it_can() -> None:
    assert log_id("mine-1", "made") == "mine-1"
    for other in ("", "é", "x" * 129, "two\nlines"):
        assert log_id(other, "made") == "made"
