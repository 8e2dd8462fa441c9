"""What the client returns: frozen, typed by task, free of protobuf."""

import os
import re
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from headrace.client_errors import InferenceError
from headrace.client_tokens import Finished, Token

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Label:
    """One class with its score."""

    index: int
    name: str
    """Empty when the model has no names."""
    score: float
    """Probability, 0..1."""


@dataclass(frozen=True, slots=True)
class Classification:
    """Classes of one input, best first."""

    labels: tuple[Label, ...]

    @property
    def top(self) -> Label:
        """The best one."""
        return self.labels[0]


@dataclass(frozen=True, slots=True)
class Detection:
    """One box, in pixels of the upright image."""

    label: Label
    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True, slots=True)
class Detections:
    """Boxes of one image, best first."""

    detections: tuple[Detection, ...]
    width: int
    """Pixels of the upright image."""
    height: int


@dataclass(frozen=True, slots=True)
class Embedding:
    """A vector for one input."""

    values: tuple[float, ...]
    tokens: int = 0
    """Of the text that the vector is of, special ones counted."""
    truncated: bool = False
    """The text was longer than the model takes, and its end was left out."""


@dataclass(frozen=True, slots=True)
class Entity:
    """Part of a text that means something: a name, a place, a date."""

    label: Label
    """Its kind."""
    start: int
    """In characters of the text, as `end`: `text[start:end]`."""
    end: int
    text: str
    """These characters."""


@dataclass(frozen=True, slots=True)
class Entities:
    """Those of one text, in its order."""

    entities: tuple[Entity, ...]
    truncated: bool
    """The text was longer than the model takes, and its end was not looked at."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: little endian, row-major, without padding."""

    name: str
    datatype: str
    """`FP32`, `INT64`, …"""
    shape: tuple[int, ...]
    """First dimension: rows."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Tensors:
    """Named tensors, as input or as result."""

    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class File:
    """A file as it is, for a model of files; as input alone. A path by itself is sent as an image."""

    data: str | os.PathLike[str] | bytes | bytearray | memoryview
    """Its path, or its content."""


@dataclass(frozen=True, slots=True)
class Text:
    """Text, as input or as result."""

    text: str
    finished: Finished | None = None
    """Of a generated one."""
    tokens: tuple[Token, ...] = ()
    """Only where log probabilities were asked for."""


Result: TypeAlias = Classification | Detections | Embedding | Entities | Tensors | Text


@dataclass(frozen=True, slots=True)
class ServerTiming:
    """Milliseconds that the request spent in each stage of the server; of many inputs, the slowest one."""

    admit_ms: float = 0.0
    wait_ms: float = 0.0
    prepare_ms: float = 0.0
    batch_ms: float = 0.0
    copy_ms: float = 0.0
    run_ms: float = 0.0
    finish_ms: float = 0.0
    first_ms: float = 0.0
    """Of generated text: from the arrival to the first of it."""
    batch_rows: int = 0
    """Rows of the batch it ran in."""

    @classmethod
    def parse(cls, header: str) -> "ServerTiming":
        """From the form of HTTP's Server-Timing header; what is missing or unknown is left out."""
        times = {f"{name}_ms": float(value) for name, value in _DURATION.findall(header) if f"{name}_ms" in _FIELDS}
        rows = _ROWS.search(header)
        return cls(**times, batch_rows=int(rows[1]) if rows else 0)


_DURATION = re.compile(r"([a-z]+);dur=(\d+(?:\.\d+)?)")
_ROWS = re.compile(r'rows;desc="(\d+)"')
_FIELDS = frozenset(ServerTiming.__slots__) - {"batch_rows"}


@dataclass(frozen=True, slots=True)
class Prediction:
    """One answered request."""

    results: tuple[Result | InferenceError, ...]
    """One per input, in order; errors only when the request asked for `partial_results`."""
    model: str
    version: str
    """Content hash of the version that answered."""
    request_id: str
    server_timing: ServerTiming


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What is known of each answer to one input, whatever the task."""

    model: str
    version: str
    """Content hash of the version that answered."""
    request_id: str
    server_timing: ServerTiming


@dataclass(frozen=True, slots=True)
class Classified(Answered):
    """One classified image or text."""

    labels: tuple[Label, ...]
    """Best first."""

    @property
    def top(self) -> Label:
        """The best one."""
        return self.labels[0]


@dataclass(frozen=True, slots=True)
class Detected(Answered):
    """What was found in one image."""

    detections: tuple[Detection, ...]
    """Best first."""
    width: int
    """Pixels of the upright image, in which the boxes are told."""
    height: int


@dataclass(frozen=True, slots=True)
class Embedded(Answered):
    """One text as a vector."""

    values: tuple[float, ...]
    tokens: int
    """Of the text that the vector is of, special ones counted."""
    truncated: bool
    """The text was longer than the model takes, and its end was left out."""


@dataclass(frozen=True, slots=True)
class Recognised(Answered):
    """The entities of one text."""

    entities: tuple[Entity, ...]
    """In the order of the text."""
    truncated: bool
    """The text was longer than the model takes, and its end was not looked at."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """One of many: what became of one input. Exactly one of `result` and `error` is set."""

    index: int
    """Position in what was given, from 0."""
    given: object
    """The input itself."""
    result: T | None = None
    error: InferenceError | OSError | None = None
    """OSError when the file could not be read."""
