"""As much of HTTP/2 (RFC 9113) and HPACK (RFC 7541) as a gRPC client needs that sends the same few requests. Pure."""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME = 16_384
REFUSED_STREAM, CANCEL = 7, 8
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_HEADER = struct.Struct(">BHBBI")
_SETTING = struct.Struct(">HI")


class Kind(IntEnum):
    """Frame types."""

    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Setting(IntEnum):
    """Those that concern us."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5


class Frame(NamedTuple):
    """One frame as received."""

    kind: int
    flags: int
    stream: int
    payload: bytes


class ProtocolError(Exception):
    """The server sent what this client can't read."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame as sent."""
    return frame_header(len(payload), kind, flags, stream) + payload


def frame_header(length: int, kind: int, flags: int, stream: int) -> bytes:
    """The nine bytes before a frame's payload."""
    return _HEADER.pack(length >> 16, length & 0xFFFF, kind, flags, stream)


def settings(values: dict[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(Kind.SETTINGS, 0, 0, b"".join(_SETTING.pack(key, value) for key, value in values.items()))


def read_settings(payload: bytes) -> dict[int, int]:
    """Of a SETTINGS frame."""
    return dict(_SETTING.iter_unpack(payload))


def number(payload: bytes) -> int:
    """The 31 bits of a WINDOW_UPDATE, or the code of a RST_STREAM."""
    return int.from_bytes(payload[:4], "big") & MAX_WINDOW


def greeting() -> bytes:
    """What a client sends first: no dynamic header table, so that header blocks need no memory; endless windows."""
    wanted = {Setting.HEADER_TABLE_SIZE: 0, Setting.ENABLE_PUSH: 0, Setting.INITIAL_WINDOW_SIZE: MAX_WINDOW}
    more = (MAX_WINDOW - DEFAULT_WINDOW).to_bytes(4, "big")
    return (
        PREFACE + settings({int(key): value for key, value in wanted.items()}) + frame(Kind.WINDOW_UPDATE, 0, 0, more)
    )


def frames(received: bytearray) -> Iterator[Frame]:
    """Take the whole frames out of what was received; the rest stays."""
    at, size = 0, len(received)
    while size - at >= 9:
        high, low, kind, flags, stream = _HEADER.unpack_from(received, at)
        end = at + 9 + (high << 16 | low)
        if end > size:
            break
        yield Frame(kind, flags, stream & MAX_WINDOW, bytes(received[at + 9 : end]))
        at = end
    del received[:at]


def header_block(headers: dict[str, str]) -> bytes:
    """Headers as literals without index: the same bytes each time, whatever was sent before."""
    return b"".join(b"\x00" + _string(name.encode()) + _string(value.encode()) for name, value in headers.items())


def _string(value: bytes) -> bytes:
    return _integer(len(value), 7) + value


def _integer(value: int, bits: int) -> bytes:
    most = (1 << bits) - 1
    if value < most:
        return bytes((value,))
    found, value = [most], value - most
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes((*found, value))


def literals(block: bytes) -> dict[bytes, bytes]:
    """The headers of a block whose names are spelled out; those from the static table, and Huffman codes, are left out.

    Raises ProtocolError for the dynamic table, which `greeting` has switched off.
    """
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(block):
        first = block[at]
        if first & 0x80:
            index, at = _read_integer(block, at, 7)
            _check_static(index)
        elif first & 0xE0 == 0x20:
            size, at = _read_integer(block, at, 5)
            if size:
                raise ProtocolError("the server uses a dynamic header table that it was told not to")
        else:
            index, at = _read_integer(block, at, 6 if first & 0x40 else 4)
            _check_static(index)
            name = b""
            if not index:
                name, at = _read_string(block, at)
            value, at = _read_string(block, at)
            found[name] = value
    found.pop(b"", None)
    return found


def _check_static(index: int) -> None:
    if index > 61:
        raise ProtocolError("the server refers to a dynamic header table that it was told not to use")


def _read_integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    value, at = block[at] & most, at + 1
    if value < most:
        return value, at
    shift = 0
    while True:
        byte, at = block[at], at + 1
        value += (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _read_string(block: bytes, at: int) -> tuple[bytes, int]:
    """Empty for a Huffman code: none of the headers that are read here is one."""
    huffman = block[at] & 0x80
    length, at = _read_integer(block, at, 7)
    return (b"" if huffman else block[at : at + length]), at + length


class Stream:
    """A call under way."""

    __slots__ = ("at", "deadline_s", "id", "index", "request", "window")

    def __init__(self, index: int, request: bytes, deadline_s: float) -> None:
        self.index = index
        self.request = request
        self.deadline_s = deadline_s
        self.id = 0
        """0: waits for the server to allow one more stream; -1: has ended."""
        self.at = 0
        """Bytes sent, with the five of gRPC's prefix."""
        self.window = 0
