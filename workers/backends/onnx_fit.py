"""Whether an ONNX file and a pipeline belong together: names, datatypes, shapes. Worker only.

Where the pipeline hands tensors through as they are, its declaration must name the file's own inputs and outputs.
Where it has a `normalise` or `head` of its own, the network's arguments and results go by position, arguments also by
the names that exporters usually give them, and what `normalise` makes of an example must fit the file.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared.onnx_check import OnnxFile, OnnxTensor
from shared.pipeline import Pipeline
from shared.tensors import TensorSpec
from workers.backends import examples
from workers.backends.base import LoadFailed

DTYPES = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "UINT16": torch.uint16,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
"""What both sides have. Floats may differ between pipeline and file, and are converted; nothing else is."""


class Fit(NamedTuple):
    """How the two work together."""

    inputs: tuple[OnnxTensor, ...]
    """In the order of the arguments that `normalise` makes."""
    outputs: tuple[OnnxTensor, ...]
    """In the order that `head` wants."""


def fit(file: OnnxFile, pipeline: Pipeline[Any], max_rows: int, told: str) -> Fit:
    """Compare them; `told` is how messages call the file. Raises LoadFailed with one sentence."""
    spec, kind = pipeline.spec, type(pipeline)
    inputs, outputs = file.inputs, file.outputs
    if kind.normalise is Pipeline.normalise:
        inputs = _by_name(spec.inputs, inputs, f"{told}: input", exactly=True)
    else:
        inputs = _by_usual_name(pipeline.argument_names(), inputs)
    if kind.head is Pipeline.head and kind.reduce is Pipeline.reduce:
        outputs = _by_name(spec.outputs, outputs, f"{told}: output", exactly=False)
    for tensor in (*inputs, *outputs):
        if tensor.datatype not in DTYPES:
            raise LoadFailed(
                f"{told}: {tensor.name} is {tensor.datatype or 'no tensor'}: backend onnxruntime serves tensors of "
                "numbers only"
            )
    _check_rows(inputs, max_rows, told)
    _check_arguments(inputs, _arguments(pipeline), told)
    return Fit(inputs, outputs)


def _by_name(
    specs: Sequence[TensorSpec], tensors: Sequence[OnnxTensor], told: str, *, exactly: bool
) -> tuple[OnnxTensor, ...]:
    """The file's tensors in the order of the pipeline's; all of them if `exactly`."""
    there = {tensor.name: tensor for tensor in tensors}
    names = [spec.name for spec in specs]
    if not there.keys() >= set(names) or (exactly and len(there) != len(names)):
        raise LoadFailed(f"{told}s are {', '.join(there)}; the pipeline declares {', '.join(names)}")
    for spec in specs:
        tensor = there[spec.name]
        if tensor.datatype != spec.datatype and not (_is_float(tensor.datatype) and _is_float(spec.datatype)):
            raise LoadFailed(f"{told} {spec.name} is {tensor.datatype}; the pipeline declares {spec.datatype}")
        if tensor.shape is not None and not _same_shape(spec.shape, tensor.shape, free_fits=not exactly):
            declared = _shape((-1, *spec.shape))
            raise LoadFailed(f"{told} {spec.name} has shape {_shape(tensor.shape)}; the pipeline declares {declared}")
    return tuple(there[name] for name in names)


def _by_usual_name(wanted: Sequence[frozenset[str]], tensors: tuple[OnnxTensor, ...]) -> tuple[OnnxTensor, ...]:
    """In the order of the arguments, where the file has just one tensor of each one's usual names; else as they are."""
    found = [[tensor for tensor in tensors if tensor.name in names] for names in wanted]
    if len(found) != len(tensors) or any(len(each) != 1 for each in found):
        return tensors
    return tuple(each[0] for each in found)


def _same_shape(declared: Sequence[int], shape: Sequence[int], *, free_fits: bool) -> bool:
    """Without the row dimension. A free input can't enter a fixed one; what leaves is checked in every pass."""
    if len(shape) != len(declared) + 1:
        return False
    return all(have in (want, -1) or (free_fits and want == -1) for want, have in zip(declared, shape[1:], strict=True))


def _check_rows(inputs: Sequence[OnnxTensor], max_rows: int, told: str) -> None:
    for tensor in inputs:
        rows = tensor.shape[0] if tensor.shape else -1
        if rows not in (-1, max_rows) or (rows == max_rows and max_rows > 1):
            raise LoadFailed(
                f"{told}: input {tensor.name} has a fixed number of {rows} row(s): export it with a dynamic first "
                "dimension" + (", or set batching.max_rows to 1 in model.yaml" if rows == 1 else "")
            )


def _arguments(pipeline: Pipeline[Any]) -> tuple[Tensor, ...]:
    """What `normalise` makes of one example row."""
    specs = pipeline.spec.inputs
    if any(spec.datatype not in DTYPES for spec in specs):
        wrong = next(spec for spec in specs if spec.datatype not in DTYPES)
        raise LoadFailed(f"input {wrong.name} is {wrong.datatype}: backend onnxruntime takes tensors of numbers only")
    rows = examples.of(pipeline, 1)
    with torch.inference_mode():
        return pipeline.normalise({s.name: torch.from_numpy(row) for s, row in zip(specs, rows, strict=True)})


def _check_arguments(inputs: Sequence[OnnxTensor], arguments: Sequence[Tensor], told: str) -> None:
    if len(arguments) != len(inputs):
        names = ", ".join(tensor.name for tensor in inputs)
        raise LoadFailed(f"{told}: has {len(inputs)} inputs ({names}), the pipeline makes {len(arguments)}")
    for tensor, argument in zip(inputs, arguments, strict=True):
        wanted = DTYPES[tensor.datatype]
        if argument.dtype != wanted and not (argument.is_floating_point() and wanted.is_floating_point):
            raise LoadFailed(f"{told}: input {tensor.name} is {tensor.datatype}, the pipeline makes {argument.dtype}")
        made = tuple(argument.shape)
        if tensor.shape is not None and not _same_shape(made[1:], tensor.shape, free_fits=False):
            raise LoadFailed(
                f"{told}: input {tensor.name} has shape {_shape(tensor.shape)}, the pipeline makes "
                f"{_shape((-1, *made[1:]))}"
            )


def _is_float(datatype: str) -> bool:
    return datatype in DTYPES and DTYPES[datatype].is_floating_point


def _shape(shape: Sequence[int]) -> str:
    """As in model files: rows first, -1 for what is free."""
    return f"[{', '.join('-1' if size < 0 else str(size) for size in shape)}]"
