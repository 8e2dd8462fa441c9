"""JSON lists ⇄ tensor bytes in the protocol's raw form. Runs on the gateway's event loop; holds no state.

JSON has no NaN, no infinity, no half precision and no bytes: what it can't carry is refused with a sentence that says
to use the binary tensor extension. Types and syntax are checked by msgspec while it decodes, ranges by `datatypes`.
"""

import functools
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from gateway.api import elements
from gateway.api.open_inference import datatypes
from gateway.api.open_inference.model import InferOutput
from gateway.api.parse import sentence, shown
from shared.errors import InvalidInput, NonfiniteOutput
from shared.tensors import DTYPES

_HALF = ("FP16", "BF16")
_ASK_BINARY = "which JSON can't carry: ask for it as binary data (parameter binary_data of the requested output)"


def to_raw(data: msgspec.Raw, name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    """The list of one input (flat, or nested as its shape) as bytes. Raises InvalidInput naming the tensor."""
    where = f"input {shown(name)}"
    datatypes.check_datatype(where, datatype)
    if datatype in _HALF:
        raise InvalidInput(
            f"{where} is {datatype}, which JSON data can't carry: send it as binary data (binary_data_size)"
        )
    expected = datatypes.count(where, shape)
    nested = len(shape) > 1 and bytes(memoryview(data)[:64])[1:].lstrip()[:1] == b"["
    try:
        values: list[Any] = _decoder(_element(datatype), len(shape) if nested else 1).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"{where} has data that can't be read: {sentence(error)}") from None
    if nested:
        values = _flattened(values, where, shape)
    if len(values) != expected:
        raise InvalidInput(f"{where} has {len(values)} values; shape {datatypes.shape_text(shape)} needs {expected}")
    return datatypes.pack(where, datatype, values)


def _element(datatype: str) -> type:
    """The JSON type of one element."""
    if datatype == datatypes.BYTES:
        return str
    if datatype == "BOOL":
        return bool
    return float if datatype.startswith("FP") else int


@functools.cache  # four element types, at most MAX_RANK ranks
def _decoder(element: type, rank: int) -> msgspec.json.Decoder[Any]:
    kind: Any = element
    for _ in range(rank):
        kind = list[kind]
    return msgspec.json.Decoder(kind)


def _flattened(values: list[Any], where: str, shape: tuple[int, ...]) -> list[Any]:
    """Row-major order; every list has to be as long as its dimension says."""
    level = [values]
    for depth, dim in enumerate(shape):
        for one in level:
            if len(one) != dim:
                raise InvalidInput(
                    f"{where} has a list of {len(one)} entries at depth {depth} of its data; "
                    f"shape {datatypes.shape_text(shape)} needs {dim}"
                )
        if depth < len(shape) - 1:
            level = list(chain.from_iterable(level))
    return list(chain.from_iterable(level))


def from_raw(output: InferOutput) -> list[Any]:
    """An output's values as a flat JSON list. Raises InvalidInput or NonfiniteOutput for what JSON can't carry."""
    where = f"output {shown(output.name)}"
    if output.datatype == datatypes.BYTES:
        return _texts(output, where)
    if output.datatype in _HALF:
        raise InvalidInput(f"{where} is {output.datatype}, {_ASK_BINARY}")
    array = np.frombuffer(output.data, DTYPES[output.datatype])
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise NonfiniteOutput(f"{where} has NaN or infinity, {_ASK_BINARY}")
    values: list[Any] = array.tolist()
    return values


def _texts(output: InferOutput, where: str) -> list[str]:
    texts: list[str] = []
    for element in elements.views(where, output.data, datatypes.count(where, output.shape)):
        try:
            texts.append(str(element, "utf-8"))
        except UnicodeDecodeError:
            raise InvalidInput(f"{where} has an element ({len(texts)}) that is not UTF-8, {_ASK_BINARY}") from None
    return texts
