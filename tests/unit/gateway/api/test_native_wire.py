"""What is walked past protobuf comes out as protobuf would have read it."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.native_wire import LARGE_BYTES, parse
from protos.headrace.v1 import inference_pb2 as pb
from shared.errors import InvalidInput

SIZES = st.sampled_from([0, 1, LARGE_BYTES - 5, LARGE_BYTES, LARGE_BYTES + 1, 3 * LARGE_BYTES])
INPUTS = st.one_of(
    SIZES.map(lambda size: pb.Input(image=b"\x0a" * size)),
    SIZES.map(lambda size: pb.Input(text="a" * size)),
    SIZES.map(lambda size: pb.Input(tensors=pb.TensorList(tensors=[pb.Tensor(name="x", data=bytes(size))]))),
    st.just(pb.Input()),
)
REQUESTS = st.builds(
    pb.PredictRequest,
    model=st.sampled_from(["", "sim"]),
    inputs=st.lists(INPUTS, max_size=4),
    options=st.sampled_from([None, pb.Options(top_k=3)]),
    partial_results=st.booleans(),
)


def whole(serialized: bytes) -> pb.PredictRequest:
    """The request with its images back in their places."""
    received = parse(serialized)
    for index, image in received.images.items():
        assert received.message.inputs[index].image == b""
        received.message.inputs[index].image = bytes(image)
    return received.message


@given(REQUESTS)
def test_it_agrees_with_protobuf(request: pb.PredictRequest) -> None:
    assert whole(request.SerializeToString()) == request


@given(REQUESTS, st.integers(0, 1 << 16), st.binary(min_size=1, max_size=3))
def test_what_protobuf_refuses_is_refused_and_the_rest_read_alike(
    request: pb.PredictRequest, place: int, damage: bytes
) -> None:
    serialized = bytearray(request.SerializeToString())
    place %= len(serialized) + 1
    serialized[place : place + len(damage)] = damage
    try:
        expected = pb.PredictRequest.FromString(bytes(serialized))
    except DecodeError:
        with pytest.raises((DecodeError, InvalidInput)):
            parse(bytes(serialized))
        return
    try:
        assert whole(bytes(serialized)) == expected
    except InvalidInput:  # groups and such, which no version of this message has had
        assert expected != request


def test_large_images_are_views_of_what_was_received() -> None:
    image = bytes(range(256)) * 64
    request = pb.PredictRequest(inputs=[pb.Input(text="a"), pb.Input(image=image), pb.Input(image=b"small")])
    serialized = request.SerializeToString()
    received = parse(serialized)
    assert {index: bytes(view) for index, view in received.images.items()} == {1: image}
    assert received.images[1].obj is serialized
    assert received.message.ByteSize() < 32
    assert received.message.inputs[2].image == b"small"


def test_an_image_that_ends_behind_its_input_is_refused() -> None:
    serialized = pb.PredictRequest(inputs=[pb.Input(image=bytes(LARGE_BYTES))]).SerializeToString()
    assert serialized[3:6] == b"\x0a\x80\x20"
    with pytest.raises((InvalidInput, DecodeError)):
        parse(serialized[:4] + b"\x90\x20" + serialized[6:])


def test_an_input_whose_image_is_not_all_of_it_goes_to_protobuf() -> None:
    image = pb.Input(image=bytes(LARGE_BYTES)).SerializeToString()
    inside = image + pb.Input(text="the last one counts").SerializeToString()
    serialized = b"\x22" + bytes([len(inside) & 0x7F | 0x80, len(inside) >> 7]) + inside
    received = parse(serialized)
    assert received.images == {}
    assert received.message.inputs[0].text == "the last one counts"
