"""Tensors between processes: what a model declares, and where the bytes of one tensor are.

Every tensor on the wire has the row count as its first dimension: an image is `UINT8 [1, 224, 224, 3]`, a request of
50 rows of 16 floats `FP32 [50, 16]`. Bytes are little endian and row-major without padding. Above
`arena.inline_bytes` they lie in an arena slot, below they travel inside the message.
"""

import math
from collections.abc import Sequence

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
    }.items()
}
"""Datatype names of the Open Inference Protocol that have a fixed numpy form."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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

    @property
    def row_nbytes(self) -> int | None:
        """Bytes of one row; None when a dimension is free."""
        if any(dim < 0 for dim in self.shape):
            return None
        return math.prod(self.shape) * DTYPES[self.datatype].itemsize


class Tensor(msgspec.Struct, array_like=True):
    """One tensor of one item: `data` is inline bytes, or where they lie in the arena."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    """First dimension: rows."""
    data: bytes | SlotRef


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
    expected = nbytes_of(tensor.datatype, tensor.shape)
    if len(buffer) < expected:
        raise ValueError(f"tensor {tensor.name} needs {expected} bytes, has {len(buffer)}")
    return np.frombuffer(buffer, DTYPES[tensor.datatype], math.prod(tensor.shape)).reshape(tensor.shape)
