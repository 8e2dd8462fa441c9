"""What a pipeline answers: one result per row, typed by task. The gateway's edge turns them into protobuf and JSON."""

import enum
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
    tokens: int = 0
    """Of the text that the vector is of."""
    truncated: bool = False
    """The text's end was left out."""


class Entity(msgspec.Struct, array_like=True):
    """Part of a text that means something."""

    label: Label
    start: int
    """In characters of the text, as `end`; the character at `end` is no part of it."""
    end: int
    text: str


class Entities(msgspec.Struct, tag="entities", array_like=True):
    """Those of one text, in its order."""

    entities: list[Entity]
    truncated: bool = False
    """The text's end was not looked at."""


class Tensors(msgspec.Struct, tag="tensors", array_like=True):
    """Raw named tensors of one item."""

    tensors: list[Tensor]


class Token(msgspec.Struct, array_like=True):
    """One token of a generated text."""

    id: int
    data: bytes
    """What it adds; part of a character is possible."""
    logprob: float
    """Natural logarithm of its probability, before temperature, penalty and cut-offs."""
    alternatives: "list[Token]" = []
    """The likeliest ones in its place, best first."""


class FinishReason(enum.StrEnum):
    """Why a text ended."""

    END_TOKEN = "end_token"  # noqa: S105 - no password
    STOP_STRING = "stop_string"
    LENGTH = "length"


class TextEnd(msgspec.Struct, array_like=True):
    """Where a generated text ended, and why."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int


class Text(msgspec.Struct, tag="text", array_like=True):
    """Generated or transcribed text for one input."""

    text: str
    end: TextEnd | None = None
    """Of generated text."""
    tokens: list[Token] = []
    """Only where log probabilities were asked for."""


Result: TypeAlias = Classification | Detections | Embedding | Entities | Tensors | Text
