"""The protocol's datatypes: sizes, typed values → raw form. Pure; used by both codecs.

Nothing here trusts a number: a dimension is looked at before it is multiplied, products are Python integers that
can't wrap, and typed values out of their datatype's range are refused instead of cut. Every refusal is an
InvalidInput that names the tensor and both numbers. `where` begins the sentence, e.g. "input 'x'".
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gateway.api import elements
from gateway.api.parse import shown
from shared.errors import InvalidInput
from shared.tensors import pack_bytes

BYTES = "BYTES"
_SIZES = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
}
"""Bytes of one element; BYTES has none."""
NAMES = (*_SIZES, BYTES)

_TYPED: dict[str, np.dtype[np.generic]] = {
    name: np.dtype(numpy_name)
    for name, numpy_name in {
        "UINT8": "u1",
        "UINT16": "<u2",
        "UINT32": "<u4",
        "UINT64": "<u8",
        "INT8": "i1",
        "INT16": "<i2",
        "INT32": "<i4",
        "INT64": "<i8",
        "FP32": "<f4",
        "FP64": "<f8",
    }.items()
}
_INTEGERS = {f"UINT{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)} | {
    f"INT{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)
}
"""Smallest and largest value."""

MAX_RANK = 16
"""Dimensions of a tensor; bounds the product's length before it is computed."""


def check_datatype(where: str, datatype: str) -> None:
    """Raises InvalidInput when there is no such datatype (names are upper case)."""
    if datatype not in _SIZES and datatype != BYTES:
        raise InvalidInput(f"{where} has datatype {shown(datatype)}; known: {', '.join(NAMES)}")


def shape_text(shape: Sequence[int]) -> str:
    """A shape for a sentence, cut to 100 characters; a caller may send a hundred thousand dimensions."""
    text = str(list(shape[:MAX_RANK]))[:-1]
    return f"{text[:99]}…]" if len(shape) > MAX_RANK or len(text) > 99 else f"{text}]"


def count(where: str, shape: Sequence[int]) -> int:
    """Elements of a tensor as sent: every dimension is concrete. Raises InvalidInput."""
    if len(shape) > MAX_RANK:
        raise InvalidInput(f"{where} has {len(shape)} dimensions; at most {MAX_RANK} are allowed")
    if any(dim < 0 for dim in shape):
        raise InvalidInput(f"{where} has shape {shape_text(shape)}; a request's dimensions are 0 or more")
    return math.prod(shape)


def nbytes(datatype: str, shape: Sequence[int]) -> int:
    """Bytes of the raw form, of a datatype other than BYTES and a shape that was checked."""
    return math.prod(shape) * _SIZES[datatype]


def check_data(where: str, datatype: str, shape: Sequence[int], data: bytes | memoryview) -> None:
    """The raw form has exactly the bytes that datatype and shape need. Raises InvalidInput."""
    if datatype == BYTES:
        elements.check(where, data, count(where, shape))
        return
    need = count(where, shape) * _SIZES[datatype]
    if len(data) != need:
        raise InvalidInput(f"{where} has {len(data)} bytes of data; {datatype} {shape_text(shape)} needs {need}")


def pack(where: str, datatype: str, values: Sequence[Any]) -> bytes:
    """Typed values (protobuf's typed contents, a flat JSON list) in raw form.

    Raises InvalidInput for a value of the wrong type or out of range, and for FP16 and BF16, which have no typed form.
    """
    if datatype == BYTES:
        return pack_bytes(_as_bytes(where, value) for value in values)
    if datatype == "BOOL":
        _check_kind(where, datatype, values, (bool,))
        return bytes(values)
    if datatype in _INTEGERS:
        return _pack_integers(where, datatype, values)
    if datatype in _TYPED:
        _check_kind(where, datatype, values, (float, int))
        return _pack_floats(where, datatype, values)
    raise InvalidInput(f"{where} has datatype {shown(datatype)}, which has no typed form: send its data in raw form")


def _pack_integers(where: str, datatype: str, values: Sequence[Any]) -> bytes:
    _check_kind(where, datatype, values, (int,))
    least, most = _INTEGERS[datatype]
    if len(values):
        for extreme in (min(values), max(values)):
            if not least <= extreme <= most:
                raise InvalidInput(f"{where} has the value {str(extreme)[:30]}; {datatype} has {least} to {most}")
    return np.array(values, _TYPED[datatype]).tobytes()


def _pack_floats(where: str, datatype: str, values: Sequence[Any]) -> bytes:
    try:
        with np.errstate(over="ignore"):
            wide = np.array(values, np.float64)
            packed = wide.astype(_TYPED[datatype])
    except OverflowError:  # an integer beyond a double's range
        raise InvalidInput(f"{where} has an integer that is too large for {datatype}") from None
    beyond = np.isinf(packed) & np.isfinite(wide)
    if beyond.any():
        raise InvalidInput(f"{where} has the value {wide[beyond][0]}, which is too large for {datatype}")
    return packed.tobytes()


def _as_bytes(where: str, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"{where} has a text that is not valid Unicode") from None
    raise InvalidInput(f"{where} has a value of type {type(value).__name__}; BYTES elements are texts")


def _check_kind(where: str, datatype: str, values: Sequence[Any], kinds: tuple[type, ...]) -> None:
    wrong = {type(value) for value in values}.difference(kinds)
    if wrong:
        names = ", ".join(sorted(kind.__name__ for kind in wrong))
        raise InvalidInput(f"{where} has values of type {names}; {datatype} takes {kinds[0].__name__}")
