"""Walks over a protobuf message without copying or building it: field numbers, and views of what they hold.

An ONNX file may be larger than memory, and comes from anywhere. So its few facts that matter are read from the mapped
file with code that is bounded in fields and in depth, rather than with a library that parses all of it. No weight is
read. Used by `shared.onnx_check` alone.

What readers could take for different things is refused, or a file would show one thing here and another one to the
runtime: protobuf's own reader drops all but 32 bits of a field's number, this one would not know the field. So every
number must be written the one way that writers write it: in as few bytes as it takes, field numbers within 29 bits.
"""

from collections.abc import Iterator
from typing import NamedTuple

MAX_FIELDS = 5_000_000
"""Of one file; a walk over that many takes some five seconds. A network of 10,000 layers has about 300,000."""
MAX_DEPTH = 64
"""Messages inside messages. Protobuf itself stops at 100; a graph inside a graph takes three."""

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_FIXED = {FIXED64: 8, FIXED32: 4}
_MAX_VARINT_BYTES = 10
"""64 bits, 7 in each byte."""
_FIRST_KEY, _KEYS_END = 1 << 3, 1 << 32
"""A key is a field number of 1 to 2^29 - 1 above three bits of wire type."""


class Malformed(Exception):
    """Not a protobuf message, or one beyond the limits; the text says why."""


class Field(NamedTuple):
    """One field of a message."""

    number: int
    kind: int
    """Its wire type."""
    value: int
    """Of a varint; 0 else."""
    data: memoryview
    """What a length-delimited field holds; empty else."""


class Walk:
    """Counts the fields of one file."""

    def __init__(self) -> None:
        self._left = MAX_FIELDS

    def fields(self, message: memoryview, depth: int) -> Iterator[Field]:
        """The fields of a message in the order of the file. Raises Malformed."""
        if depth > MAX_DEPTH:
            raise Malformed(f"it is nested more than {MAX_DEPTH} deep")
        place = 0
        while place < len(message):
            self._left -= 1
            if self._left < 0:
                raise Malformed(f"it has more than {MAX_FIELDS} fields")
            key, place = _varint(message, place)
            if not _FIRST_KEY <= key < _KEYS_END:
                raise Malformed("it has a field whose number no protobuf message may have")
            kind = key & 7
            value, data = 0, message[:0]
            if kind == VARINT:
                value, place = _varint(message, place)
            else:
                size = _FIXED.get(kind)
                if kind == BYTES:
                    size, place = _varint(message, place)
                if size is None:
                    raise Malformed(f"it has a field of wire type {kind}")
                if size > len(message) - place:
                    raise Malformed("it ends too early")
                if kind == BYTES:
                    data = message[place : place + size]
                place += size
            yield Field(key >> 3, kind, value, data)


def text(data: memoryview, limit: int = 1000) -> str:
    """A string of the file, cut to `limit` bytes; what is no UTF-8 becomes a question mark."""
    return bytes(data[:limit]).decode("utf-8", "replace")


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """A number in as few bytes as it takes, and the place behind it."""
    value = shift = 0
    for byte in message[place : place + _MAX_VARINT_BYTES]:
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if not byte and shift:
                raise Malformed("it writes a number in more bytes than it takes")
            if value >= 1 << 64:
                break
            return value, place
        shift += 7
    raise Malformed("it ends too early, or holds a number of more than 64 bits")
