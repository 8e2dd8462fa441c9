"""The flow's answer → the output tensors that the caller asked for; with the classification extension."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gateway.api.open_inference import datatypes, detections, text_results
from gateway.api.open_inference.model import InferOutput, InferRequestedOutput, Parameters
from gateway.api.open_inference.models import CLASSES, LABELS, SCORES, TEXT_OUTPUT, ModelView, Served, classifies
from gateway.api.open_inference.parameters import whole_number
from gateway.api.parse import shown
from gateway.request import Answer
from shared.errors import HeadraceError, InternalFault, InvalidInput
from shared.pipeline import PipelineSpec
from shared.results import Classification, Detections, Embedding, Entities, Label, Tensors, Text
from shared.tensors import DTYPES, MAX_BYTES_ELEMENTS, Array, RawTensor, pack_bytes

CLASSIFICATION = "classification"
"""Parameter of a requested output: how many classes of each row to answer as text "value:index[:label]"."""
_NO_CLASS = Label(-1, "", 0.0)


def check_asked(model: Served, view: ModelView, asked: list[InferRequestedOutput]) -> None:
    """Before any work is done for nothing. Raises InvalidInput naming output and model."""
    declared = {spec.name: spec for spec in view.outputs}
    for one in asked:
        spec = declared.get(one.name)
        if spec is None:
            names = ", ".join(declared)[:300]
            raise InvalidInput(f"output {shown(one.name)} is not one of model {shown(model.name)}: it has {names}")
        if CLASSIFICATION in one.parameters:
            _check_has_classes(model, one.name)
            k = whole_number(f"output {shown(one.name)}", one.parameters, CLASSIFICATION, None)
            if k < 1:
                raise InvalidInput(f"output {shown(one.name)}: parameter {CLASSIFICATION} is 0; it is 1 or more")
            if spec.datatype == datatypes.BYTES:
                raise InvalidInput(f"output {shown(one.name)} is BYTES; only numbers can be answered as classes")


def _check_has_classes(model: Served, name: str) -> None:
    if detections.finds_boxes(model.spec):
        raise InvalidInput(
            f"output {shown(name)}: parameter {CLASSIFICATION} has no meaning for boxes; ask for {LABELS}"
        )
    if name == CLASSES and classifies(model.spec):
        raise InvalidInput(f"output {CLASSES} holds class numbers, no scores; ask for {SCORES} as classes")


def with_classes_asked(model: Served, options: Parameters, asked: list[InferRequestedOutput]) -> Parameters:
    """The options, with enough classes for the classification extension; the pipeline refuses more than it gives."""
    counts = [
        one.parameters[CLASSIFICATION] for one in asked if one.name == SCORES and CLASSIFICATION in one.parameters
    ]
    if not counts or not classifies(model.spec):
        return dict(options)
    wanted = max(count for count in counts if isinstance(count, int))
    wanted = min(wanted, len(model.pipeline.labels) or wanted)
    given = options.get("top_k", 0)
    return {**options, "top_k": max(wanted, given if isinstance(given, int) else 0)}


def selected(model: Served, answer: Answer, asked: list[InferRequestedOutput]) -> list[InferOutput]:
    """All outputs in the order of the metadata, or those asked for, once each. Raises HeadraceError."""
    found = {tensor.name: tensor for tensor in _tensors(model, answer)}
    if not asked:
        return [InferOutput(*tensor, parameters={}) for tensor in found.values()]
    outputs = []
    for one in {wanted.name: wanted for wanted in asked}.values():
        tensor = found[one.name]
        k = one.parameters.get(CLASSIFICATION)
        if isinstance(k, int):
            tensor = _classes(model, answer, tensor, k)
        outputs.append(InferOutput(*tensor, parameters={}))
    return outputs


def _tensors(model: Served, answer: Answer) -> list[RawTensor]:
    results = answer.results
    for result in results:
        if isinstance(result, HeadraceError):
            raise result
    first = results[0]
    form = _FORMS.get(type(first))
    if form is not None and form.fits(model.spec):
        return form.tensors(results)
    name = TEXT_OUTPUT if model.pipeline.generates else model.spec.outputs[0].name
    if isinstance(first, Embedding):
        vectors = [result.values for result in results if isinstance(result, Embedding)]
        return [RawTensor(name, "FP32", (len(vectors), len(vectors[0])), np.array(vectors, "<f4").tobytes())]
    if isinstance(first, Text):
        texts = [result.text.encode() for result in results if isinstance(result, Text)]
        return [RawTensor(name, datatypes.BYTES, (len(texts), 1), pack_bytes(texts))]
    raise InvalidInput(
        f"model {shown(model.name)} answers {type(first).__name__.lower()}, which has no tensor form: "
        "use headrace.v1.Inference"
    )


def _joined(results: list[Tensors]) -> list[RawTensor]:
    """One result per input, in order → one tensor per output; a single result is taken as it is, without a copy."""
    tensors = []
    for number, first in enumerate(results[0].tensors):
        if len(results) == 1 and isinstance(first.data, bytes | memoryview):
            tensors.append(RawTensor(first.name, first.datatype, first.shape, first.data))
            continue
        parts = [result.tensors[number] for result in results]
        if any(part.shape[1:] != first.shape[1:] for part in parts):
            raise InvalidInput(f"output {first.name!r} has rows of different shapes; send one row a request")
        data = [part.data for part in parts if isinstance(part.data, bytes | memoryview)]
        if len(data) != len(parts):
            raise InternalFault  # the flow's answers never refer to the arena
        rows = sum(part.shape[0] for part in parts)
        whole = data[0] if len(data) == 1 else b"".join(data)
        tensors.append(RawTensor(first.name, first.datatype, (rows, *first.shape[1:]), whole))
    return tensors


def _classification(results: list[Classification]) -> list[RawTensor]:
    places = max(len(result.labels) for result in results)
    shape = (len(results), places)
    labels = [label for result in results for label in _filled_up(result.labels, places)]
    return [
        RawTensor(SCORES, "FP32", shape, np.array([label.score for label in labels], "<f4").tobytes()),
        RawTensor(CLASSES, "INT32", shape, np.array([label.index for label in labels], "<i4").tobytes()),
        RawTensor(LABELS, datatypes.BYTES, shape, pack_bytes(label.name.encode() for label in labels)),
    ]


def _filled_up(labels: list[Label], places: int) -> list[Label]:
    """A threshold may have left out more of one row than of another."""
    return [*labels, *[_NO_CLASS] * (places - len(labels))]


class _Form(NamedTuple):
    """How results of one kind become tensors."""

    tensors: Callable[[Any], list[RawTensor]]
    """Of all results of a request, which are of one kind."""
    fits: Callable[[PipelineSpec], bool] = lambda _spec: True
    """Whether the model's metadata says so: a pipeline of one's own may answer such results under other names."""


_FORMS: dict[type, _Form] = {
    Tensors: _Form(_joined),
    Classification: _Form(_classification),
    Detections: _Form(detections.tensors),
    Embedding: _Form(text_results.vectors, text_results.embeds),
    Entities: _Form(text_results.entities, text_results.finds_entities),
}


def _classes(model: Served, answer: Answer, tensor: RawTensor, k: int) -> RawTensor:
    """The k best of each row as texts, best first; [rows, k]."""
    rows = tensor.shape[0]
    if tensor.name == SCORES and isinstance(answer.results[0], Classification):
        k = min(k, tensor.shape[1])
        texts = [
            "" if label is _NO_CLASS else f"{label.score:f}:{label.index}:{label.name}"
            for result in answer.results
            if isinstance(result, Classification)
            for label in _filled_up(result.labels[:k], k)
        ]
        return RawTensor(tensor.name, datatypes.BYTES, (rows, k), _packed(texts))
    values = _numbers(tensor).reshape(rows, -1)
    k = min(k, values.shape[1])
    if rows * k > MAX_BYTES_ELEMENTS:
        raise InvalidInput(
            f"output {shown(tensor.name)}: {rows} rows of {k} classes are asked for; "
            f"at most {MAX_BYTES_ELEMENTS} classes are given in one answer"
        )
    labels = model.pipeline.labels if len(model.pipeline.labels) == values.shape[1] else ()
    texts = []
    for row in values:
        for index in _best(row, k):
            value = row[index]
            number = f"{value:f}" if row.dtype.kind == "f" else str(int(value))
            texts.append(f"{number}:{index}:{labels[index]}" if labels else f"{number}:{index}")
    return RawTensor(tensor.name, datatypes.BYTES, (rows, k), _packed(texts))


def _packed(texts: list[str]) -> bytes:
    return pack_bytes(text.encode() for text in texts)


def _numbers(tensor: RawTensor) -> Array:
    if tensor.datatype == "BF16":  # the upper half of an FP32
        return (np.frombuffer(tensor.data, "<u2").astype("<u4") << 16).view("<f4")
    numbers = np.frombuffer(tensor.data, DTYPES[tensor.datatype])
    return numbers.astype("u1") if tensor.datatype == "BOOL" else numbers


def _best(row: Array, k: int) -> list[int]:
    """Indices of the k largest values, best first; of equal ones the lower index first, NaN last."""
    ranked: Array = np.nan_to_num(row, nan=-np.inf, posinf=np.inf, neginf=-np.inf) if row.dtype.kind == "f" else row
    # An ascending stable sort of the reversed row, read backwards: descending without negating unsigned numbers.
    backwards = np.argsort(ranked[::-1], kind="stable")[::-1][:k]
    return [len(row) - 1 - int(place) for place in backwards]
