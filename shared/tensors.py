"""Tensors between processes: what a model declares, and where the bytes of one tensor are.

Every tensor on the wire has the row count as its first dimension: an image is `UINT8 [1, 224, 224, 3]`, a request of
50 rows of 16 floats `FP32 [50, 16]`. Bytes are little endian and row-major without padding. Above
`arena.inline_bytes` they lie in an arena slot, below they travel inside the message.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]

DTYPES: dict[str, np.dtype[np.generic]] = {
    name: np.dtype(numpy_name)
    for name, numpy_name in {
        "BOOL": "?",
        "UINT8": "u1",
        "UINT16": "<u2",
        "UINT32": "<u4",
        "UINT64": "<u8",
        "INT8": "i1",
        "INT16": "<i2",
        "INT32": "<i4",
        "INT64": "<i8",
        "FP16": "<f2",
        "FP32": "<f4",
        "FP64": "<f8",
        "BF16": "<u2",
        "BYTES": "O",
    }.items()
}
"""Datatype names of the Open Inference Protocol → numpy. BF16 is carried as its 16 bits; BYTES as Python bytes."""

_NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "BF16"}
_LENGTH = struct.Struct("<I")
"""Before each BYTES element on the wire."""
_NO_LENGTH = 0xFFFFFFFF
"""A length that some clients write for "none"; never one, since no message is that long."""
_MANY = 32
"""Elements from which on a look at all lengths at once is cheaper than a walk."""
MAX_BYTES_ELEMENTS = 1 << 18
"""Elements of a BYTES tensor. To find those of different lengths is a loop: about 20 ms for this many."""


def datatype_of(array: Array) -> str:
    """The wire name of a numpy array's dtype. Raises KeyError for one that has none."""
    return _NAMES[array.dtype]


class SlotRef(msgspec.Struct, frozen=True, array_like=True):
    """A place in the arena. `offset` and `nbytes` count bytes from the arena's start."""

    offset: int
    nbytes: int


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One input or output of a model, as its pipeline declares it."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    """Per row, without the row dimension; -1 is free."""
    maximum: int | None = None
    """Integers only: values are below this (class ids, token ids)."""
    fill: int = 0
    """Inputs only: what stands in a batch where an item is shorter than others in a free dimension."""

    @property
    def row_nbytes(self) -> int | None:
        """Bytes of one row; None when a dimension is free or the elements have no fixed size."""
        if self.datatype == "BYTES" or any(dim < 0 for dim in self.shape):
            return None
        return math.prod(self.shape) * DTYPES[self.datatype].itemsize


class Tensor(msgspec.Struct, array_like=True):
    """One tensor of one item: `data` is inline bytes, or where they lie in the arena."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    """First dimension: rows."""
    data: bytes | SlotRef


class RawTensor(NamedTuple):
    """One named tensor as a caller sent it, or as it goes back: bytes in wire form, no numpy yet."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    """First dimension: rows."""
    data: bytes | memoryview
    """Little endian, row-major; BYTES elements each behind a 4-byte length. May be a view of a received message."""

    def cut(self, most: int) -> list["RawTensor"]:
        """Parts of at most `most` rows, in order: views without a copy, found in one walk."""
        view, rows = memoryview(self.data), self.shape[0]
        firsts = [*range(0, rows, most), rows]
        if self.datatype == "BYTES":
            per_row = math.prod(self.shape[1:])
            places = element_places(view, rows * per_row)
            borders = [places[first * per_row] for first in firsts]
        else:
            borders = [first * (len(view) // rows) for first in firsts]
        return [
            self._replace(shape=(last - first, *self.shape[1:]), data=view[start:end])
            for (first, last), (start, end) in zip(pairwise(firsts), pairwise(borders), strict=True)
        ]


def element_places(data: bytes | memoryview, count: int) -> Sequence[int]:
    """Where each of exactly `count` BYTES elements begins with its length, and, last, where the data ends.

    The one reader of this form: it trusts nothing and copies nothing. Raises ValueError; its text follows "… has".
    """
    if count > MAX_BYTES_ELEMENTS:
        raise ValueError(f"{count} BYTES elements; at most {MAX_BYTES_ELEMENTS} are allowed")
    size = len(data)
    if count >= _MANY and size >= count * _LENGTH.size and size % count == 0:
        stride = size // count
        lengths = np.frombuffer(data, np.uint8).reshape(count, stride)[:, : _LENGTH.size]
        if (lengths == np.frombuffer(_LENGTH.pack(stride - _LENGTH.size), np.uint8)).all():  # all are equally long
            return range(0, size + 1, stride)
    read, size_of_length, end, places = _LENGTH.unpack_from, _LENGTH.size, 0, [0]
    try:  # errors are looked for afterwards: this way the loop is three times as fast
        for _ in range(count):
            (length,) = read(data, end)
            end += size_of_length + length
            places.append(end)
    except struct.error:
        end = -1
    if end != size:
        raise ValueError(_broken(data, count))
    return places


def _broken(data: bytes | memoryview, count: int) -> str:
    """What is wrong with elements that do not end where their data does."""
    size, place = len(data), 0
    for number in range(count):
        first = place + _LENGTH.size
        if first > size:
            return f"{size} bytes of data, which end before the length of element {number} of {count}"
        length = _LENGTH.unpack_from(data, place)[0]
        if length == _NO_LENGTH:
            return f"length 0xFFFFFFFF for element {number}; an empty element has length 0"
        place = first + length
        if place > size:
            return f"length {length} for element {number}, but only {size - first} bytes of data follow"
    return f"{size} bytes of data, but its {count} BYTES elements end at byte {place}"


def element_views(data: bytes | memoryview, count: int) -> list[memoryview]:
    """Exactly `count` BYTES elements without a copy. Raises ValueError as `element_places`."""
    view = memoryview(data)
    return [view[first + _LENGTH.size : end] for first, end in pairwise(element_places(data, count))]


def unpack_bytes(data: bytes | memoryview, count: int) -> list[bytes]:
    """Exactly `count` BYTES elements, copied. Raises ValueError as `element_places`."""
    return [bytes(element) for element in element_views(data, count)]


def pack_bytes(elements: Iterable[bytes | memoryview]) -> bytes:
    """BYTES elements in wire form."""
    parts: list[bytes | memoryview] = []
    for element in elements:
        parts.append(_LENGTH.pack(len(element)))
        parts.append(element)
    return b"".join(parts)


def wire_bytes(array: Array) -> bytes:
    """An array's bytes in wire form (one copy)."""
    return pack_bytes(array.ravel().tolist()) if array.dtype == object else array.tobytes()


def nbytes_of(datatype: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor; Python ints, so no product can wrap."""
    return math.prod(shape) * DTYPES[datatype].itemsize


def as_array(tensor: Tensor, arena: memoryview | None) -> Array:
    """A numpy view (no copy) of a tensor's bytes; of arena memory when `data` is a slot reference.

    The caller must not keep the view longer than it holds the slot. Raises ValueError when size and shape disagree.
    """
    buffer: bytes | memoryview
    if isinstance(tensor.data, SlotRef):
        if arena is None:
            raise ValueError("tensor lies in an arena that is not attached")
        buffer = arena[tensor.data.offset : tensor.data.offset + tensor.data.nbytes]
    else:
        buffer = tensor.data
    if tensor.datatype == "BYTES":
        elements = np.empty(math.prod(tensor.shape), object)
        elements[:] = unpack_bytes(buffer, math.prod(tensor.shape))
        return elements.reshape(tensor.shape)
    expected = nbytes_of(tensor.datatype, tensor.shape)
    if len(buffer) < expected:
        raise ValueError(f"tensor {tensor.name} needs {expected} bytes, has {len(buffer)}")
    return np.frombuffer(buffer, DTYPES[tensor.datatype], math.prod(tensor.shape)).reshape(tensor.shape)
