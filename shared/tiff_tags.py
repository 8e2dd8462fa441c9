"""Integer tags of the first directory of a TIFF structure: a TIFF file, or the EXIF block of another format."""

import struct
from collections.abc import Set as AbstractSet

_SIZES = {1: 1, 3: 2, 4: 4}
_LETTERS = {1: "B", 3: "H", 4: "I"}
"""BYTE, SHORT, LONG: the types of the integer tags."""

_MAX_VALUES = 16
"""Values read of one tag; enough for one per channel."""


def read_tags(view: memoryview, wanted: AbstractSet[int]) -> dict[int, tuple[int, ...]]:
    """Values of the `wanted` tags that are there. Raises ValueError, struct.error or IndexError when broken."""
    order = {b"II": "<", b"MM": ">"}.get(bytes(view[:2]))
    if order is None:
        raise ValueError("no byte order")
    (offset,) = struct.unpack_from(order + "I", view, 4)
    (count,) = struct.unpack_from(order + "H", view, offset)
    found = {}
    for index in range(count):
        entry = offset + 2 + 12 * index
        tag, kind, values = struct.unpack_from(order + "HHI", view, entry)
        if tag in wanted and kind in _SIZES and values:
            found[tag] = _values(view, order, entry, kind, min(values, _MAX_VALUES))
    return found


def _values(view: memoryview, order: str, entry: int, kind: int, count: int) -> tuple[int, ...]:
    start = entry + 8
    if count * _SIZES[kind] > 4:  # too long for the entry itself
        (start,) = struct.unpack_from(order + "I", view, start)
    return struct.unpack_from(f"{order}{count}{_LETTERS[kind]}", view, start)
