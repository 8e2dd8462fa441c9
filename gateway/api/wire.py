"""Walks the fields of a protobuf message in its wire form, for those who leave its large ones where they are."""

from shared.errors import InvalidInput

LENGTH = 2
"""The wire type of bytes, texts and messages: a length, and so many bytes."""
_VARINT, _FIXED64, _FIXED32 = 0, 1, 5


def malformed() -> InvalidInput:
    """For what is no protobuf message at all; also for the other services' wire code."""
    return InvalidInput(
        "the request message is not a valid protobuf message of this method's type, or a string in it is not UTF-8"
    )


def field_end(serialized: bytes, tag: int, place: int) -> int:
    """Where the field ends whose value begins at `place`. Raises InvalidInput when it ends behind the message."""
    kind = tag & 7
    if not 0 < tag >> 3 < 1 << 29:
        raise malformed()
    if kind == LENGTH:
        length, place = number(serialized, place, 5)
        place += length
    elif kind == _VARINT:
        _, place = number(serialized, place, 10)
    elif kind == _FIXED64:
        place += 8
    elif kind == _FIXED32:
        place += 4
    else:
        raise malformed()
    if place > len(serialized):
        raise malformed()
    return place


def number(serialized: bytes, place: int, most: int) -> tuple[int, int]:
    """A varint of at most `most` bytes, and where it ends."""
    value = shift = 0
    for byte in serialized[place : place + most]:
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise malformed()
