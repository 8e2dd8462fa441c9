"""ONNX files for tests: one small good network, and the same one with its weights in places where they must not be."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH = 4
WEIGHT = np.arange(WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH) / 8
CANARY = b"CANARY-7f3a" * 8
"""What a file outside holds; it must never come out of anywhere."""

ONNX_YAML = "pipeline: toy:Toy\nbackend: onnxruntime\n"


def model(
    nodes: Sequence[onnx.NodeProto] = (),
    *,
    inputs: Sequence[onnx.ValueInfoProto] = (),
    outputs: Sequence[onnx.ValueInfoProto] = (),
    weights: Sequence[onnx.TensorProto] = (),
    **parts: Any,  # noqa: ANN401 - further fields of a graph
) -> onnx.ModelProto:
    """By default `y = x @ w`, float32 [rows, 4] both."""
    graph = helper.make_graph(
        list(nodes) or [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        list(inputs) or [value("x")],
        list(outputs) or [value("y")],
        list(weights) or ([] if nodes else [numpy_helper.from_array(WEIGHT, "w")]),
        **parts,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def value(name: str, kind: int = TensorProto.FLOAT, shape: Sequence[str | int] | None = ("rows", WIDTH)) -> Any:  # noqa: ANN401 - onnx leaves it untyped
    """An input or output."""
    return helper.make_tensor_value_info(name, kind, shape)


def outside(location: str | None, name: str = "w", shape: Sequence[int] = (WIDTH, WIDTH)) -> onnx.TensorProto:
    """A float32 weight that lies in another file; None: it does not say in which."""
    tensor = TensorProto()
    tensor.name = name
    tensor.data_type = TensorProto.FLOAT
    tensor.dims.extend(shape)
    tensor.data_location = TensorProto.EXTERNAL
    if location is not None:
        entry = tensor.external_data.add()
        entry.key, entry.value = "location", location
    return tensor


def _initialiser(location: str | None) -> onnx.ModelProto:
    return model(weights=[outside(location)])


def _sparse_values(location: str | None) -> onnx.ModelProto:
    indices = numpy_helper.from_array(np.arange(4, dtype=np.int64), "i")
    sparse = helper.make_sparse_tensor(outside(location, shape=[4]), indices, [WIDTH, WIDTH])
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    return model([node], sparse_initializer=[sparse])


def _sparse_indices(location: str | None) -> onnx.ModelProto:
    values = numpy_helper.from_array(np.ones(4, np.float32), "w")
    sparse = helper.make_sparse_tensor(values, outside(location, "i", [4]), [WIDTH, WIDTH])
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    return model([node], sparse_initializer=[sparse])


def _attribute(location: str | None) -> onnx.ModelProto:
    constant = helper.make_node("Constant", [], ["w"], value=outside(location))
    return model([constant, helper.make_node("MatMul", ["x", "w"], ["y"])])


def _attribute_list(location: str | None) -> onnx.ModelProto:
    node = helper.make_node("Identity", ["x"], ["y"])
    node.attribute.append(helper.make_attribute("many", [outside(location)]))
    return model([node])


def _sparse_attribute(location: str | None) -> onnx.ModelProto:
    indices = numpy_helper.from_array(np.arange(4, dtype=np.int64), "i")
    sparse = helper.make_sparse_tensor(outside(location, shape=[4]), indices, [WIDTH, WIDTH])
    constant = helper.make_node("Constant", [], ["w"], sparse_value=sparse)
    return model([constant, helper.make_node("MatMul", ["x", "w"], ["y"])])


def _nested_graph(location: str | None) -> onnx.ModelProto:
    inner = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["z"])], "inner", [], [value("z")], [outside(location)]
    )
    condition = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array(True), "c"))
    return model([condition, helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)])


def _function(location: str | None) -> onnx.ModelProto:
    constant = helper.make_node("Constant", [], ["w"], value=outside(location))
    body = [constant, helper.make_node("MatMul", ["a", "w"], ["b"])]
    function = helper.make_function("own", "F", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    found = model([helper.make_node("F", ["x"], ["y"], domain="own")])
    found.opset_import.append(helper.make_opsetid("own", 1))
    found.functions.append(function)
    return found


def _training(location: str | None) -> onnx.ModelProto:
    found = model()
    part = found.training_info.add()
    part.initialization.CopyFrom(helper.make_graph([], "t", [], [], [outside(location)]))
    return found


PLACES: dict[str, Callable[[str | None], onnx.ModelProto]] = {
    "initialiser": _initialiser,
    "values of a sparse one": _sparse_values,
    "indices of a sparse one": _sparse_indices,
    "attribute of a node": _attribute,
    "list in an attribute": _attribute_list,
    "sparse attribute": _sparse_attribute,
    "graph inside a node": _nested_graph,
    "function": _function,
    "training graph": _training,
}
"""Every place of an ONNX file in which a weight can stand → a model whose weight there lies in another file."""


def varint(value: int) -> bytes:
    """As protobuf writes it: in as few bytes as it takes."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def overlong(key: int) -> bytes:
    """The key of a field with bits that protobuf's C++ reader drops: a field like any other to a runtime."""
    return varint(key | 1 << 32)


def padded(key: int) -> bytes:
    """The key of a field in one byte more than it takes."""
    plain = varint(key)
    return bytes([*plain[:-1], plain[-1] | 0x80, 0])


def respelt(content: bytes, kind: Any, fields: set[str], spell: Callable[[int], bytes]) -> bytes:  # noqa: ANN401 - a descriptor
    """A message of this kind with the keys of `fields` (`TensorProto.external_data`) spelt otherwise, at any depth."""
    out, place = b"", 0
    while place < len(content):
        key, begin = _number(content, place)
        part = kind.fields_by_number[key >> 3]
        value, place = _number(content, begin) if key & 7 in (0, 2) else (0, begin + {1: 8, 5: 4}[key & 7])
        body = content[begin:place]
        if key & 7 == 2:
            body = content[place : place + value]
            place += value
            inner = part.message_type
            body = body if inner is None else respelt(body, inner, fields, spell)
            body = varint(len(body)) + body
        out += (spell if f"{kind.name}.{part.name}" in fields else varint)(key) + body
    return out


def _number(content: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[place]
        value, shift, place = value | (byte & 0x7F) << shift, shift + 7, place + 1
        if byte < 0x80:
            return value, place


def written(folder: Path, found: onnx.ModelProto, name: str = "m.onnx") -> Path:
    """The file, in a folder that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(found.SerializeToString())
    return path
