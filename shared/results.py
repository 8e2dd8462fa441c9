"""What a pipeline answers: one result per row, typed by task. The gateway's edge turns them into protobuf and JSON."""

from typing import Annotated, TypeAlias

import msgspec

from shared.tensors import Tensor


class Label(msgspec.Struct, array_like=True):
    """One class with its score."""

    index: Annotated[int, msgspec.Meta(ge=0)]
    name: str
    score: float
    """Probability in 0..1."""


class Classification(msgspec.Struct, tag="classification", array_like=True):
    """Classes of one input, best first."""

    labels: list[Label]


class Detection(msgspec.Struct, array_like=True):
    """One box, in pixels of the original (EXIF-upright) image; x to the right, y down."""

    label: Label
    left: float
    top: float
    right: float
    bottom: float


class Detections(msgspec.Struct, tag="detections", array_like=True):
    """Boxes of one image, best first."""

    boxes: list[Detection]
    width: int
    height: int


class Embedding(msgspec.Struct, tag="embedding", array_like=True):
    """A vector for one input."""

    values: list[float]


class Tensors(msgspec.Struct, tag="tensors", array_like=True):
    """Raw named tensors of one item."""

    tensors: list[Tensor]


class Text(msgspec.Struct, tag="text", array_like=True):
    """Generated or transcribed text for one input."""

    text: str


Result: TypeAlias = Classification | Detections | Embedding | Tensors | Text
