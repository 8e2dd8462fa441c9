"""`gateway.request.Answer` → protobuf."""

from collections.abc import Callable
from typing import Any

from gateway.api.status import error_message
from gateway.request import Answer
from protos.headrace.v1 import inference_pb2 as pb
from shared.errors import HeadraceError
from shared.results import (
    Classification,
    Detections,
    Embedding,
    Entities,
    Result,
    Tensors,
    Text,
    TextEnd,
    Token,
)


def response(answer: Answer, request_id: str) -> pb.PredictResponse:
    """The answer as a message; results keep the order of the inputs."""
    message = pb.PredictResponse(model=answer.model, version=answer.version, request_id=request_id)
    results = message.results
    for result in answer.results:
        if isinstance(result, HeadraceError):
            results.add(error=error_message(result))
        else:
            _RENDER[type(result)](result, results.add())
    return message


def _classification(result: Classification, message: pb.Result) -> None:
    # A plain loop over `add` beats building Label objects and copying them in.
    message.classification.SetInParent()
    add = message.classification.labels.add
    for label in result.labels:
        add(index=label.index, name=label.name, score=label.score)


def _detections(result: Detections, message: pb.Result) -> None:
    detections = message.detections
    detections.width = result.width
    detections.height = result.height
    for box in result.boxes:
        label = pb.Label(index=box.label.index, name=box.label.name, score=box.label.score)
        detections.detections.add(label=label, left=box.left, top=box.top, right=box.right, bottom=box.bottom)


def _embedding(result: Embedding, message: pb.Result) -> None:
    message.embedding.SetInParent()
    message.embedding.values.extend(result.values)
    message.embedding.tokens = result.tokens
    message.embedding.truncated = result.truncated


def _entities(result: Entities, message: pb.Result) -> None:
    entities = message.entities
    entities.truncated = result.truncated
    entities.SetInParent()
    for entity in result.entities:
        label = pb.Label(index=entity.label.index, name=entity.label.name, score=entity.label.score)
        entities.entities.add(label=label, start=entity.start, end=entity.end, text=entity.text)


def _tensors(result: Tensors, message: pb.Result) -> None:
    message.tensors.SetInParent()
    for tensor in result.tensors:
        if not isinstance(tensor.data, bytes):
            raise TypeError(f"output {tensor.name} reached the edge as a slot reference")
        message.tensors.tensors.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape, data=tensor.data)


def _text(result: Text, message: pb.Result) -> None:
    message.text.text = result.text
    if result.end is not None:
        message.text.finished.CopyFrom(finished(result.end))
    message.text.tokens.extend(map(token, result.tokens))


def finished(end: TextEnd) -> pb.Finished:
    """Where a generated text ended."""
    return pb.Finished(
        reason=pb.Finished.Reason.Value(end.reason.name),
        prompt_tokens=end.prompt_tokens,
        completion_tokens=end.completion_tokens,
    )


def token(given: Token) -> pb.Token:
    """One token with its alternatives."""
    return pb.Token(id=given.id, bytes=given.data, logprob=given.logprob, alternatives=map(token, given.alternatives))


_RENDER: dict[type[Result], Callable[[Any, pb.Result], None]] = {
    Classification: _classification,
    Detections: _detections,
    Embedding: _embedding,
    Entities: _entities,
    Tensors: _tensors,
    Text: _text,
}
