"""What a safetensors file says of itself: its tensors, and where in the file each of them lies.

Eight bytes of length, so many bytes of JSON, then the tensors one after another. Only the JSON is read, so that a file
of gigabytes takes milliseconds.
"""

import math
import os
import struct
from typing import Any, BinaryIO, TypeVar

import msgspec

SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 100_000_000
"""As safetensors itself allows."""
_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "I8", "U8", "BOOL"), 1),
}
"""Of one number; the size of what is not listed is not checked."""


T = TypeVar("T", bound="TensorHeader")


class BadHeader(Exception):
    """A safetensors file that can't be read, why: the end of a sentence that begins with the file's name."""


class TensorHeader(msgspec.Struct, frozen=True):
    """What the file says of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class _Placed(TensorHeader, frozen=True):
    data_offsets: tuple[int, int]
    """First byte and the one after the last, counted from the end of the header."""

    def nbytes(self) -> int:
        """What its shape and datatype need; of an unknown datatype what the file gives it."""
        size = _BYTES.get(self.dtype)
        begin, end = self.data_offsets
        return max(0, end - begin) if size is None else math.prod(self.shape) * size


def read(file: BinaryIO) -> dict[str, TensorHeader]:
    """Name → dtype and shape of every tensor. Raises BadHeader, OSError."""
    return _read(file, TensorHeader)[0]


def check(file: BinaryIO) -> None:
    """Whether the file holds every byte that its header tells of, and no others. Raises BadHeader, OSError."""
    tensors, start = _read(file, _Placed)
    held = os.fstat(file.fileno()).st_size - start
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, after = tensor.data_offsets
        if begin != end or after - begin != tensor.nbytes():
            raise BadHeader(f"its header is wrong about where tensor {name[:100]!r} lies")
        end = after
    if held < end:
        raise BadHeader(
            f"is cut off: its tensors have {end} bytes, of which {held} are there; was it saved to the end?"
        )
    if held > end:
        raise BadHeader(f"has {held - end} bytes behind its last tensor, which no safetensors file has")


def _read(file: BinaryIO, kind: type[T]) -> tuple[dict[str, T], int]:
    """The tensors, and where in the file the first one begins."""
    file.seek(0)
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise BadHeader("is no safetensors file")
    raw = file.read(length)
    if len(raw) < length:
        raise BadHeader(
            f"is no safetensors file, or cut off: its header has {length} bytes, of which {len(raw)} are there"
        )
    try:
        found = msgspec.json.decode(raw, type=dict[str, Any])
        found.pop("__metadata__", None)
        tensors: dict[str, T] = msgspec.convert(found, dict[str, kind])  # type: ignore[valid-type]
    except (ValueError, msgspec.MsgspecError, RecursionError):
        raise BadHeader("its header is no safetensors header") from None
    return tensors, 8 + length
