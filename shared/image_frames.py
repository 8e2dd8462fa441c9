"""Cuts an animation down to its first frame, as encoded bytes, without decoding. Used by pool processes.

Decoders differ in what they show of an animation, and some look at later frames to decide about the first one; a file
that only holds the first frame leaves them no choice.
"""

import itertools
import struct
from collections.abc import Iterator

_EXTENSION, _IMAGE, _TRAILER = 0x21, 0x2C, b"\x3b"
_GRAPHIC_CONTROL = 0xF9

# Bounds of the loops below, each far beyond real files: a stranger's file decides how often they turn.
_MAX_CHUNKS = 1 << 17
_MAX_BLOCKS = 1 << 19  # 128 MB of full blocks
_MAX_EXTENSIONS = 64
_MAX_EXTENSION_BLOCKS = 1 << 12


def png_chunks(view: memoryview) -> Iterator[tuple[bytes, int, int]]:
    """(type, start, end) of each chunk, from its length to behind its checksum; stops where the file is cut."""
    position = 8
    while position + 12 <= len(view):
        (length,) = struct.unpack_from(">I", view, position)
        end = position + 12 + length
        if end > len(view):
            return
        yield bytes(view[position + 4 : position + 8]), position, end
        position = end


def first_frame_of_png(view: memoryview) -> bytes:
    """The default image of an animated PNG, as a plain PNG. Raises ValueError when the file is cut."""
    chunks = list(itertools.islice(png_chunks(view), _MAX_CHUNKS))
    if not chunks or chunks[-1][0] != b"IEND":
        raise ValueError("no end")
    kept = (view[start:end] for kind, start, end in chunks if kind not in {b"acTL", b"fcTL", b"fdAT"})
    return b"".join((view[:8], *kept))


def first_frame_of_gif(view: memoryview) -> bytes:
    """The first frame of a GIF with its transparency. Raises ValueError or IndexError when the file is cut."""
    position = 13 + _table_bytes(view[10])
    head = bytearray(view[:position])
    if position > 13 and head[11] >= _table_bytes(view[10]) // 3:
        head[11] = 0  # a background colour outside the palette
    control = view[:0]
    for _ in range(_MAX_EXTENSIONS):
        start = position
        if view[start] == _EXTENSION:
            position = _skip_blocks(view, start + 2, _MAX_EXTENSION_BLOCKS)
            if view[start + 1] == _GRAPHIC_CONTROL:
                control = view[start:position]
        elif view[start] == _IMAGE:
            position = _skip_blocks(view, start + 10 + _table_bytes(view[start + 9]) + 1, _MAX_BLOCKS)
            return b"".join((head, control, view[start:position], _TRAILER))
        else:
            break
    raise ValueError("no image")


def _table_bytes(flags: int) -> int:
    """Size of the colour table that the flags announce."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _skip_blocks(view: memoryview, position: int, limit: int) -> int:
    for _ in range(limit):
        length = view[position]
        position += 1 + length
        if length == 0:
            return position
    raise ValueError("too many blocks")
