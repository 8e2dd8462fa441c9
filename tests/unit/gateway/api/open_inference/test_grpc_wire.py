"""The walker against protobuf's own parser: on right requests, on damaged ones, and on bytes of any kind."""

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.open_inference import grpc_wire
from protos.inference import grpc_service_pb2 as pb
from shared.errors import InvalidInput

TEXT = st.text(max_size=8)
PARAMETER = st.one_of(
    st.builds(lambda value: pb.InferParameter(bool_param=value), st.booleans()),
    st.builds(lambda value: pb.InferParameter(int64_param=value), st.integers(-(2**63), 2**63 - 1)),
    st.builds(lambda value: pb.InferParameter(string_param=value), TEXT),
    st.builds(lambda value: pb.InferParameter(double_param=value), st.floats(allow_nan=False)),
)
INPUT = st.builds(
    lambda name, shape, parameters: pb.ModelInferRequest.InferInputTensor(
        name=name, datatype="FP32", shape=shape, parameters=parameters
    ),
    TEXT,
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    st.dictionaries(TEXT, PARAMETER, max_size=2),
)
REQUEST = st.builds(
    lambda model, request_id, parameters, inputs, raw: pb.ModelInferRequest(
        model_name=model, id=request_id, parameters=parameters, inputs=inputs, raw_input_contents=raw
    ),
    TEXT,
    TEXT,
    st.dictionaries(TEXT, PARAMETER, max_size=2),
    st.lists(INPUT, max_size=3),
    st.lists(st.binary(max_size=300), max_size=4),
)


def protobufs(serialized: bytes) -> pb.ModelInferRequest | None:
    """What protobuf makes of the bytes; None when it refuses them."""
    try:
        return pb.ModelInferRequest.FromString(serialized)
    except DecodeError:
        return None


def ours(serialized: bytes) -> pb.ModelInferRequest | None:
    """What we make of them, put together again."""
    try:
        message, raw = grpc_wire.parse(serialized)
    except (DecodeError, InvalidInput):
        return None
    assert not message.raw_input_contents
    whole = pb.ModelInferRequest()
    whole.CopyFrom(message)
    whole.raw_input_contents.extend(bytes(entry) for entry in raw)
    return whole


def has_group(message: Any) -> bool:  # noqa: ANN401 - a message
    return any(field.wire_type == 3 for field in UnknownFieldSet(message))


def assert_same(serialized: bytes) -> None:
    want, got = protobufs(serialized), ours(serialized)
    if want is not None and has_group(want):
        assert got is None  # the one thing that we refuse and protobuf skips
        return
    assert (got is None) == (want is None)
    if got is not None and want is not None:
        assert got.SerializeToString(deterministic=True) == want.SerializeToString(deterministic=True)


@given(REQUEST)
def test_a_request_is_split_as_protobuf_does(request: pb.ModelInferRequest) -> None:
    assert_same(request.SerializeToString())


@given(REQUEST, st.data())
def test_a_damaged_request_is_read_or_refused_as_protobuf_does(
    request: pb.ModelInferRequest, data: st.DataObject
) -> None:
    raw = bytearray(request.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    assert_same(bytes(raw[:cut]))
    assert_same(bytes(raw))


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused_as_protobuf_does(serialized: bytes) -> None:
    assert_same(serialized)


def varint(number: int, padding: int) -> bytes:
    """With `padding` bytes more than it needs."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    if padding:
        out[-1] |= 0x80
        out += b"\x80" * (padding - 1) + b"\x00"
    return bytes(out)


FIELD = st.one_of(
    st.builds(
        lambda data, a, b: varint(58, a) + varint(len(data), b) + data, st.binary(max_size=5), *[st.integers(0, 4)] * 2
    ),
    st.builds(
        lambda number, kind, a: varint(number << 3 | kind, a), st.integers(0, 40), st.integers(0, 7), st.integers(0, 4)
    ),
    st.builds(
        lambda number, a, value, b: varint(number << 3, a) + varint(value, b),
        st.integers(0, 2**29),
        st.integers(0, 3),
        st.integers(0, 2**64 - 1),
        st.integers(0, 4),
    ),
    st.binary(min_size=1, max_size=9),
)


@given(st.lists(FIELD, max_size=6))
def test_numbers_in_more_bytes_than_they_need_and_unknown_fields(parts: list[bytes]) -> None:
    assert_same(b"".join(parts))


@pytest.mark.parametrize(
    "serialized",
    [
        b"\x3a\xff\xff\xff\xff\x07",  # a length of 2 GB
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # of 2^64 - 1
        b"\x3a\x80\x80\x80\x80\x80\x00",  # 0 in six bytes
        b"\x3a",
        b"\x3a\x05abcd",
        b"\x3d\1\2\3",
        b"\x39\1\2\3\4\5\6\7",
        b"\x38" + b"\xff" * 10 + b"\x01",
        b"\x02\x00",
    ],
)
def test_known_tricks(serialized: bytes) -> None:
    assert protobufs(serialized) is None
    assert ours(serialized) is None


def test_raw_entries_are_views_of_the_message() -> None:
    serialized = pb.ModelInferRequest(model_name="m", raw_input_contents=[b"one", b"", b"two"]).SerializeToString()

    received = grpc_wire.parse(serialized)

    assert [bytes(entry) for entry in received.raw] == [b"one", b"", b"two"]
    assert all(entry.obj is serialized for entry in received.raw)


@pytest.mark.parametrize("field", [b"\x3a\x00", b"\x2a\x00", b"\xa0\x06\x01"], ids=["raw", "inputs", "unknown"])
def test_too_many_fields_are_refused_at_once(field: bytes) -> None:
    with pytest.raises(InvalidInput, match=str(grpc_wire.MAX_FIELDS)):
        grpc_wire.parse(field * 1_000_000)


RAW_OUT = st.lists(st.binary(max_size=300), max_size=4)


@given(TEXT, RAW_OUT)
def test_an_answer_is_what_protobuf_would_write(request_id: str, raw: list[bytes]) -> None:
    header = pb.ModelInferResponse(model_name="m", id=request_id)
    whole = pb.ModelInferResponse(model_name="m", id=request_id, raw_output_contents=raw)
    streamed = pb.ModelStreamInferResponse(infer_response=whole)

    views: list[bytes | memoryview] = [memoryview(entry) for entry in raw]
    assert grpc_wire.serialize(header, views) == whole.SerializeToString()
    assert grpc_wire.serialize_stream(header, views) == streamed.SerializeToString()


@pytest.mark.parametrize("size", [0, 127, 128, 16_383, 16_384, 2_097_152])
def test_lengths_around_the_borders_of_a_varint(size: int) -> None:
    written = grpc_wire.serialize(pb.ModelInferResponse(), [bytes(size)])

    assert pb.ModelInferResponse.FromString(written).raw_output_contents == [bytes(size)]
