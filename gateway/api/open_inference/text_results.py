"""Vectors and entities of texts as tensors: those of all texts of a request side by side."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gateway.api.open_inference import datatypes
from shared.pipeline import PipelineSpec
from shared.results import Embedding, Entities, Entity
from shared.tensors import RawTensor, TensorSpec, pack_bytes

EMBEDDING, TOKENS, TRUNCATED = "embedding", "tokens", "truncated"
ENTITIES, LABELS, SCORES, STARTS, ENDS = "entities", "labels", "scores", "starts", "ends"
NOWHERE = -1
"""In a place without an entity, whose score is 0 and whose texts are empty."""

ENTITY_OUTPUTS = (
    TensorSpec(name=ENTITIES, datatype="BYTES", shape=(-1,)),
    TensorSpec(name=LABELS, datatype="BYTES", shape=(-1,)),
    TensorSpec(name=SCORES, datatype="FP32", shape=(-1,)),
    TensorSpec(name=STARTS, datatype="INT32", shape=(-1,)),
    TensorSpec(name=ENDS, datatype="INT32", shape=(-1,)),
    TensorSpec(name=TRUNCATED, datatype="BOOL", shape=(1,)),
)
"""In the order of the text; start and end in characters. Each text has as many places as the one with the most."""


def embeds(spec: PipelineSpec) -> bool:
    """Whether a model's answers are vectors."""
    return {output.name for output in spec.outputs} == {EMBEDDING, "norm"}


def vector_outputs(spec: PipelineSpec) -> tuple[TensorSpec, ...]:
    """What a model of vectors declares: how long one was before it was brought to length 1 stays here."""
    return (
        spec.outputs[0],
        TensorSpec(name=TOKENS, datatype="INT32", shape=(1,)),
        TensorSpec(name=TRUNCATED, datatype="BOOL", shape=(1,)),
    )


def vectors(results: Sequence[Embedding]) -> list[RawTensor]:
    """All of `vector_outputs`."""
    rows = len(results)
    values = np.array([result.values for result in results], "<f4")
    tokens = np.array([result.tokens for result in results], "<i4")
    return [
        RawTensor(EMBEDDING, "FP32", values.shape, values.tobytes()),
        RawTensor(TOKENS, "INT32", (rows, 1), tokens.tobytes()),
        _truncated([result.truncated for result in results]),
    ]


def finds_entities(spec: PipelineSpec) -> bool:
    """Whether a model's answers are entities."""
    return {output.name for output in spec.outputs} == {"token_scores", "token_classes"}


def entities(results: Sequence[Entities]) -> list[RawTensor]:
    """All of `ENTITY_OUTPUTS`."""
    places = max(len(result.entities) for result in results)
    shape = (len(results), places)

    def filled(value: Callable[[Entity], Any], empty: Any) -> list[Any]:  # noqa: ANN401 - texts or numbers
        return [
            cell
            for result in results
            for cell in [*map(value, result.entities), *[empty] * (places - len(result.entities))]
        ]

    scores = np.array(filled(lambda one: one.label.score, 0.0), "<f4")
    starts = np.array(filled(lambda one: one.start, NOWHERE), "<i4")
    ends = np.array(filled(lambda one: one.end, NOWHERE), "<i4")
    return [
        RawTensor(ENTITIES, datatypes.BYTES, shape, pack_bytes(filled(lambda one: one.text.encode(), b""))),
        RawTensor(LABELS, datatypes.BYTES, shape, pack_bytes(filled(lambda one: one.label.name.encode(), b""))),
        RawTensor(SCORES, "FP32", shape, scores.tobytes()),
        RawTensor(STARTS, "INT32", shape, starts.tobytes()),
        RawTensor(ENDS, "INT32", shape, ends.tobytes()),
        _truncated([result.truncated for result in results]),
    ]


def _truncated(told: list[bool]) -> RawTensor:
    return RawTensor(TRUNCATED, "BOOL", (len(told), 1), np.array(told, "?").tobytes())
