"""What a model file declares, and the model.yaml that follows from it. Used by `headrace.import_model`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from shared import onnx_check
from shared.errors import ExitCode, StartupError
from shared.onnx_check import OnnxTensor
from shared.repository import RepositoryError
from shared.tensors import DTYPES

LABELS = "labels.txt"
SUFFIXES = (".onnx", ".pt2", ".safetensors")
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
"""ImageNet's, in units of 0..255: what most image networks were trained with."""
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".joblib")

Triple = tuple[float, float, float]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What the user says of the model; None: what the file tells, or the default."""

    pipeline: Literal["image_classification", "tensor"] | None = None
    network: str | None = None
    """Of a .safetensors file: `module:factory`."""
    size: int | None = None
    """Height and width of the images."""
    mean: Triple | None = None
    std: Triple | None = None
    trust: Literal["data", "code"] = "data"
    """`code`: a torch.export archive may be opened."""

    @property
    def given(self) -> list[str]:
        """Names of the options that would go into model.yaml."""
        values = {name: getattr(self, name) for name in ("pipeline", "network", "size", "mean", "std")}
        return [f"--{name}" for name, value in values.items() if value is not None]


class Found(msgspec.Struct, frozen=True):
    """What a file declares."""

    file: str
    """Its name."""
    suffix: str
    inputs: tuple[OnnxTensor, ...] = ()
    outputs: tuple[OnnxTensor, ...] = ()
    external: tuple[str, ...] = ()
    """Names of the files beside it that belong to it."""


class Draft(msgspec.Struct, frozen=True):
    """A model.yaml that nobody has proved yet."""

    text: str
    unconfirmed: tuple[str, ...] = ()
    """Settings that are a guess: no file tells them."""


def look(path: Path) -> Found:
    """Read what the file declares; nothing of it is run. Raises StartupError with one sentence."""
    suffix, told = path.suffix.lower(), path.name
    if suffix in _PICKLES:
        raise _bad(
            f"{told}: a pickle runs code when it is opened and is never read: save the state_dict with "
            "safetensors.torch.save_file, or the network with torch.export.save or torch.onnx.export"
        )
    if suffix not in SUFFIXES:
        raise _bad(f"{told}: only {', '.join(SUFFIXES)} files can be imported")
    if not path.is_file():
        raise _bad(f"there is no file {path}")
    if suffix == ".onnx":
        found = onnx_check.check(path, [each.name for each in path.parent.iterdir()], told)
        return Found(told, suffix, found.inputs, found.outputs, found.external)
    if suffix == ".pt2":
        from workers.backends import archive  # noqa: PLC0415 - the other formats do without a worker's parts

        parts = archive.check(path, told)
        inputs, outputs = ([OnnxTensor(*each) for each in side] for side in parts)
        return Found(told, suffix, tuple(inputs), tuple(outputs))
    return Found(told, suffix)


def draft(found: Found, shape: Shape, labels: Sequence[str]) -> Draft:
    """The smallest model.yaml that serves the file.

    Raises StartupError naming the option that is missing or contradicts the file.
    """
    _check_options(found, shape, found.file)
    lines = [f"# Written by `headrace models import` from {found.file}: yours to edit."]
    pipeline = shape.pipeline or ("image_classification" if _looks_like_images(found) else "tensor")
    lines.append(f"pipeline: {pipeline}")
    if found.suffix == ".onnx":
        lines.append("backend: onnxruntime")
    else:
        lines.append("backend: torch")
        lines.append(f"network: {shape.network}" if shape.network else "trust: code  # the archive is opened by torch")
    if any(tensor.shape is not None and tensor.shape[:1] == (1,) for tensor in found.inputs):
        lines.append(
            "batching: {max_rows: 1}  # the file takes one row at a time; export it with a dynamic first dimension"
        )
    if pipeline == "tensor":
        return Draft("\n".join([*lines, *_tensor_lines(found, found.file)]) + "\n")
    return _images(found, shape, labels, lines)


def _check_options(found: Found, shape: Shape, told: str) -> None:
    if found.suffix == ".safetensors" and (shape.network is None or shape.pipeline == "tensor"):
        raise _bad(
            f"{told}: holds weights alone: name the network's factory with --network module:factory, and use "
            "--pipeline image_classification with --size, or write a model.yaml first"
        )
    if found.suffix != ".safetensors" and shape.network is not None:
        raise _bad(f"--network is given, but {told} is the network itself: leave it out")
    if found.suffix == ".pt2" and shape.trust != "code":
        raise _bad(
            f"{told}: a torch.export archive may run code as it is loaded: say --trust code if you trust whoever "
            "made it, or import a .safetensors or .onnx file"
        )


def _looks_like_images(found: Found) -> bool:
    """One float input [rows, 3, size, size] and one output [rows, classes]; weights alone tell nothing."""
    if found.suffix == ".safetensors":
        return True
    if len(found.inputs) != 1 or len(found.outputs) != 1:
        return False
    taken, given = found.inputs[0], found.outputs[0]
    if taken.shape is None or given.shape is None or taken.datatype not in ("FP16", "FP32"):
        return False
    return (
        len(taken.shape) == 4
        and taken.shape[1] == 3
        and taken.shape[2] == taken.shape[3] > 0
        and len(given.shape) == 2
        and given.shape[1] > 1
        and given.datatype in ("FP16", "FP32")
    )


def _images(found: Found, shape: Shape, labels: Sequence[str], lines: list[str]) -> Draft:
    size = shape.size
    classes = len(labels) or None
    if found.inputs:
        if not _looks_like_images(found):
            raise _bad(
                "--pipeline image_classification needs one float input [rows, 3, size, size] and one output "
                f"[rows, classes]; the file has {_told(found.inputs)} and {_told(found.outputs)}"
            )
        (taken,), (given,) = found.inputs, found.outputs
        own_size, own_classes = (taken.shape or ())[2], (given.shape or ())[1]
        if size not in (None, own_size):
            raise _bad(f"--size is {size}, but the file takes images of {own_size} × {own_size}")
        if classes not in (None, own_classes):
            raise _bad(f"--labels has {classes} lines, but the file gives {own_classes} numbers a row")
        size, classes = own_size, own_classes
    if size is None or classes is None:
        raise _bad("weights alone do not tell the size of the images and the classes: give --size and --labels")
    guessed = tuple(name for name in ("mean", "std") if getattr(shape, name) is None)
    lines += [f"labels: {LABELS}"] if labels else []
    lines += ["preprocessing:", f"  size: {size}"]
    if guessed:
        lines.append(
            f"  # {' and '.join(guessed)}: a guess (ImageNet's), no file tells: put in what it was trained with"
        )
    lines += [
        f"  mean: {list(shape.mean or MEAN)}  # red, green, blue, in units of 0..255",
        f"  std: {list(shape.std or STD)}",
    ]
    lines += [] if labels else [f"  classes: {classes}"]
    return Draft("\n".join(lines) + "\n", guessed)


def _tensor_lines(found: Found, told: str) -> list[str]:
    lines = ["preprocessing:  # shapes are per row; -1 is free"]
    for group, tensors in (("inputs", found.inputs), ("outputs", found.outputs)):
        lines.append(f"  {group}:")
        for tensor in tensors:
            if not tensor.name or not tensor.shape or tensor.datatype not in DTYPES:
                raise _bad(
                    f"{told}: {group[:-1]} {tensor.name[:100]!r} is no tensor of rows with a known type and shape "
                    f"({_told([tensor])}): it can't be served as it is; write a pipeline of your own (`headrace new`)"
                )
            shape = json.dumps(list(tensor.shape[1:]))
            lines.append(f"    - {{name: {json.dumps(tensor.name)}, datatype: {tensor.datatype}, shape: {shape}}}")
    return lines


def _told(tensors: Sequence[OnnxTensor]) -> str:
    return ", ".join(
        f"{tensor.name[:100]} {tensor.datatype or '?'} {list(tensor.shape) if tensor.shape is not None else '?'}"
        for tensor in tensors[:10]
    )


def _bad(text: str) -> StartupError:
    return RepositoryError(text, ExitCode.BAD_SETTINGS)
