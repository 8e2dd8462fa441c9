"""PredictRequest on the wire, without the copy of each large image that protobuf would make.

A request that waits holds the received bytes in any case (gRPC keeps them until the call ends), so everything else that
is as long would be held twice. Images stay views of these bytes; the rest, a few dozen bytes, goes to protobuf.
"""

from typing import NamedTuple

from gateway.api.wire import LENGTH, field_end, malformed, number
from protos.headrace.v1 import inference_pb2 as pb

LARGE_BYTES = 4096
"""Below this a copy is cheaper than the walk."""
MAX_FIELDS = 4096
"""Top-level fields that are looked at; a message with more goes to protobuf as it is."""

_INPUTS_TAG = pb.PredictRequest.INPUTS_FIELD_NUMBER << 3 | LENGTH
_IMAGE_TAG = pb.Input.IMAGE_FIELD_NUMBER << 3 | LENGTH
_EMPTY_IMAGE = bytes([_INPUTS_TAG, 2, _IMAGE_TAG, 0])


class Received(NamedTuple):
    """A parsed request."""

    message: pb.PredictRequest
    """Its large images are empty."""
    images: dict[int, memoryview]
    """These, by the index of their input: views of the received bytes."""


def parse(serialized: bytes) -> Received:
    """A received PredictRequest. Raises InvalidInput, and protobuf's DecodeError for what is wrong inside a field."""
    if len(serialized) < LARGE_BYTES:
        return Received(pb.PredictRequest.FromString(serialized), {})
    view, size = memoryview(serialized), len(serialized)
    images: dict[int, memoryview] = {}
    rest: list[memoryview | bytes] = []
    place = kept = inputs = fields = 0  # `kept`: where the present run of fields for protobuf began
    while place < size:
        fields += 1
        if fields > MAX_FIELDS:
            return Received(pb.PredictRequest.FromString(serialized), {})
        start = place
        tag, place = number(serialized, place, 5)
        end = field_end(serialized, tag, place)
        if tag == _INPUTS_TAG:
            image = _image(serialized, place, end)
            if image is not None:
                images[inputs] = view[image:end]
                rest += (view[kept:start], _EMPTY_IMAGE)
                kept = end
            inputs += 1
        place = end
    if not images:
        return Received(pb.PredictRequest.FromString(serialized), images)
    rest.append(view[kept:size])
    return Received(pb.PredictRequest.FromString(b"".join(rest)), images)


def _image(serialized: bytes, place: int, end: int) -> int | None:
    """Where the bytes of an input's large image begin, when the input is one image and nothing else."""
    if end - place < LARGE_BYTES:
        return None
    _, place = number(serialized, place, 5)
    tag, place = number(serialized, place, 5)
    if tag != _IMAGE_TAG:
        return None
    length, place = number(serialized, place, 5)
    if place + length > end:
        raise malformed()
    return place if place + length == end else None
