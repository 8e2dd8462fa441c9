"""ModelInferRequest and ModelInferResponse on the wire, without a copy of the tensors that protobuf would make.

protobuf copies every `raw_input_contents` entry out of the message, and all outputs into the answer and out of it
again. Here the top-level fields are walked in Python (a handful per request), raw entries stay views of the received
bytes, and only the rest, a few hundred bytes, goes to protobuf; an answer is one join. So we copy a
request's tensor once, into the arena (gRPC for Python has copied it twice by then: its chunks, and their join).
"""

from typing import NamedTuple

from gateway.api.wire import LENGTH, field_end, malformed, number
from protos.inference import grpc_service_pb2 as pb
from shared.errors import InvalidInput

MAX_FIELDS = 4096
"""Top-level fields of a request: inputs, outputs, parameters and raw entries together. Each costs a Python step, and
far more than any model has."""

_RAW_INPUT = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_RAW_TAG = _RAW_INPUT << 3 | LENGTH
_RAW_OUTPUT_TAG = bytes([pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | LENGTH])
_STREAM_RESPONSE_TAG = bytes([pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER << 3 | LENGTH])


class Received(NamedTuple):
    """A parsed request."""

    message: pb.ModelInferRequest
    """Everything but `raw_input_contents`, which is empty in it."""
    raw: list[memoryview]
    """The entries of `raw_input_contents`, views of the received bytes."""


def parse(serialized: bytes) -> Received:
    """A received ModelInferRequest. Raises InvalidInput, and protobuf's DecodeError for what is wrong inside a field.

    Accepts what protobuf accepts, and splits it as protobuf does, except for groups (a form that no version of this
    protocol has ever had) and more than `MAX_FIELDS` fields.
    """
    view, size = memoryview(serialized), len(serialized)
    raw: list[memoryview] = []
    rest: list[memoryview] = []
    place = kept = fields = 0  # `kept`: where the present run of fields for protobuf began
    while place < size:
        fields += 1
        if fields > MAX_FIELDS:
            raise InvalidInput(
                f"the request has more than {MAX_FIELDS} inputs, outputs, parameters and raw entries in all"
            )
        start = place
        tag, place = number(serialized, place, 5)
        if tag == _RAW_TAG:
            length, place = number(serialized, place, 5)
            end = place + length
            if end > size:
                raise malformed()
            raw.append(view[place:end])
            if start > kept:
                rest.append(view[kept:start])
            place = kept = end
        else:
            place = field_end(serialized, tag, place)
    if not raw:
        return Received(pb.ModelInferRequest.FromString(serialized), raw)
    if size > kept:
        rest.append(view[kept:size])
    return Received(pb.ModelInferRequest.FromString(b"".join(rest)), raw)


def _as_varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _parts(header: pb.ModelInferResponse, raw: list[bytes | memoryview]) -> list[bytes | memoryview]:
    parts: list[bytes | memoryview] = [header.SerializeToString()]
    for data in raw:
        parts.append(_RAW_OUTPUT_TAG + _as_varint(len(data)))
        parts.append(data)
    return parts


def serialize(header: pb.ModelInferResponse, raw: list[bytes | memoryview]) -> bytes:
    """The answer: `header` without raw entries, and these in front of nothing but each other. One copy of the data."""
    return b"".join(_parts(header, raw))


def serialize_stream(header: pb.ModelInferResponse, raw: list[bytes | memoryview]) -> bytes:
    """The same as the `infer_response` of a ModelStreamInferResponse."""
    parts = _parts(header, raw)
    length = sum(len(part) for part in parts)
    return b"".join([_STREAM_RESPONSE_TAG + _as_varint(length), *parts])
