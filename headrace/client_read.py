"""From the wire: protobuf → what the client returns (`client_results`)."""

from collections.abc import Callable
from typing import TypedDict, TypeVar

from headrace.client_errors import InferenceError, WrongTask, from_message
from headrace.client_results import (
    Classification,
    Classified,
    Detected,
    Detection,
    Detections,
    Embedded,
    Embedding,
    Entities,
    Entity,
    Label,
    Prediction,
    Recognised,
    Result,
    ServerTiming,
    Tensor,
    Tensors,
    Text,
)
from headrace.client_tokens import finished, token
from protos.headrace.v1 import inference_pb2 as pb

K = TypeVar("K")


def prediction(message: pb.PredictResponse, timing: str) -> Prediction:
    """Any answer."""
    return Prediction(
        results=tuple(_result(one, message.request_id) for one in message.results),
        model=message.model,
        version=message.version,
        request_id=message.request_id,
        server_timing=ServerTiming.parse(timing),
    )


def classified(message: pb.PredictResponse, timing: str) -> Classified:
    """Raises WrongTask."""
    first = _only(message, Classification)
    return Classified(first.labels, **_facts(message, timing))


def detected(message: pb.PredictResponse, timing: str) -> Detected:
    """Raises WrongTask."""
    first = _only(message, Detections)
    return Detected(first.detections, first.width, first.height, **_facts(message, timing))


def embedded(message: pb.PredictResponse, timing: str) -> Embedded:
    """Raises WrongTask."""
    first = _only(message, Embedding)
    return Embedded(first.values, first.tokens, first.truncated, **_facts(message, timing))


def recognised(message: pb.PredictResponse, timing: str) -> Recognised:
    """Raises WrongTask."""
    first = _only(message, Entities)
    return Recognised(first.entities, first.truncated, **_facts(message, timing))


def _only(message: pb.PredictResponse, kind: type[K]) -> K:
    """The result of a request of one input."""
    first = _result(message.results[0], message.request_id) if message.results else None
    if not isinstance(first, kind):
        raise WrongTask(message.model, type(first).__name__, kind.__name__)
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


def _embedding(message: pb.Embedding) -> Embedding:
    return Embedding(tuple(message.values), message.tokens, message.truncated)


def _entities(message: pb.Entities) -> Entities:
    found = (Entity(_label(one.label), one.start, one.end, one.text) for one in message.entities)
    return Entities(tuple(found), message.truncated)


def _text(message: pb.TextResult) -> Text:
    end = finished(message.finished) if message.HasField("finished") else None
    return Text(message.text, end, tuple(map(token, message.tokens)))


def _tensors(message: pb.Result) -> Tensors:
    return Tensors(tuple(Tensor(one.name, one.datatype, tuple(one.shape), one.data) for one in message.tensors.tensors))


_FROM_WIRE: dict[str, Callable[[pb.Result], Result]] = {
    "classification": lambda message: Classification(tuple(_label(label) for label in message.classification.labels)),
    "detections": _detections,
    "embedding": lambda message: _embedding(message.embedding),
    "entities": lambda message: _entities(message.entities),
    "tensors": _tensors,
    "text": lambda message: _text(message.text),
}
