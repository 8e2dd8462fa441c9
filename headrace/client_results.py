"""What the client returns: frozen, typed by task, free of protobuf."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypedDict, TypeVar

from headrace.client_errors import InferenceError, from_message
from headrace.client_tokens import Finished, Token, finished, token
from protos.headrace.v1 import inference_pb2 as pb

T = TypeVar("T")
K = TypeVar("K")


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
class Text:
    """Text, as input or as result."""

    text: str
    finished: Finished | None = None
    """Of a generated one."""
    tokens: tuple[Token, ...] = ()
    """Only where log probabilities were asked for."""


Result: TypeAlias = Classification | Detections | Embedding | Tensors | Text


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
    """One classified image."""

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
class Outcome(Generic[T]):
    """One of many: what became of one input. Exactly one of `result` and `error` is set."""

    index: int
    """Position in what was given, from 0."""
    given: object
    """The input itself."""
    result: T | None = None
    error: InferenceError | OSError | None = None
    """OSError when the file could not be read."""


def prediction(message: pb.PredictResponse, timing: str) -> Prediction:
    """From the wire."""
    return Prediction(
        results=tuple(_result(one, message.request_id) for one in message.results),
        model=message.model,
        version=message.version,
        request_id=message.request_id,
        server_timing=ServerTiming.parse(timing),
    )


def classified(message: pb.PredictResponse, timing: str) -> Classified:
    """From the wire. Raises TypeError when the model's task is another one."""
    first = _only(message, Classification)
    return Classified(first.labels, **_facts(message, timing))


def detected(message: pb.PredictResponse, timing: str) -> Detected:
    """From the wire. Raises TypeError when the model's task is another one."""
    first = _only(message, Detections)
    return Detected(first.detections, first.width, first.height, **_facts(message, timing))


def _only(message: pb.PredictResponse, kind: type[K]) -> K:
    """The result of a request of one input."""
    first = _result(message.results[0], message.request_id) if message.results else None
    if not isinstance(first, kind):
        raise TypeError(f"model {message.model} answers {type(first).__name__}, not {kind.__name__}; use predict()")
    return first


def _facts(message: pb.PredictResponse, timing: str) -> "_Facts":
    return {
        "model": message.model,
        "version": message.version,
        "request_id": message.request_id,
        "server_timing": ServerTiming.parse(timing),
    }


class _Facts(TypedDict):
    """`Answered`'s fields."""

    model: str
    version: str
    request_id: str
    server_timing: ServerTiming


def _result(message: pb.Result, request_id: str) -> Result | InferenceError:
    kind = message.WhichOneof("kind")
    if kind == "error":
        return from_message(message.error, request_id)
    if kind is None:
        raise TypeError("the server answers a kind of result that this client does not know; update headrace-client")
    return _FROM_WIRE[kind](message)


def _label(message: pb.Label) -> Label:
    return Label(index=message.index, name=message.name, score=message.score)


def _detections(message: pb.Result) -> Detections:
    boxes = tuple(
        Detection(label=_label(box.label), left=box.left, top=box.top, right=box.right, bottom=box.bottom)
        for box in message.detections.detections
    )
    return Detections(boxes, message.detections.width, message.detections.height)


def _text(message: pb.TextResult) -> Text:
    end = finished(message.finished) if message.HasField("finished") else None
    return Text(message.text, end, tuple(map(token, message.tokens)))


def _tensors(message: pb.Result) -> Tensors:
    return Tensors(tuple(Tensor(one.name, one.datatype, tuple(one.shape), one.data) for one in message.tensors.tensors))


_FROM_WIRE: dict[str, Callable[[pb.Result], Result]] = {
    "classification": lambda message: Classification(tuple(_label(label) for label in message.classification.labels)),
    "detections": _detections,
    "embedding": lambda message: Embedding(tuple(message.embedding.values)),
    "tensors": _tensors,
    "text": lambda message: _text(message.text),
}
