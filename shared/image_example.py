"""A valid image made from nothing: for warm-up, probes and contract tests, in processes that have no image library."""

import struct
import zlib


def gradient_png(size: int) -> bytes:
    """A `size` × `size` RGB gradient as PNG: red grows to the right, green downwards, blue is even."""
    ramp = bytes(255 * index // max(size - 1, 1) for index in range(size))
    # Each line starts with its filter type, 0: none.
    lines = b"".join(b"\0" + b"".join(bytes((red, green, 128)) for red in ramp) for green in ramp)
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(lines, 1)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
