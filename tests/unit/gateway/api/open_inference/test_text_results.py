"""Vectors, entities and classes of texts as tensors."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from gateway.api.open_inference import metadata, outputs
from gateway.api.open_inference.model import InferOutput, InferRequestedOutput
from gateway.request import Answer
from gateway.served import ServedModel
from gateway.state import ModelState
from shared.pipeline import Config, Options, Pipeline
from shared.pipelines.text_classification import TextClassification
from shared.pipelines.text_embedding import TextEmbedding
from shared.pipelines.token_classification import TokenClassification
from shared.results import Classification, Embedding, Entities, Entity, Label, Result
from shared.tensors import DTYPES, unpack_bytes
from tests.support.fake_flow import VERSION
from tests.support.open_inference_parts import LIMITS

VECTORS = [Embedding([1.0, 2.0], 5), Embedding([3.0, 4.0], 256, truncated=True)]
PERSON = Entity(Label(1, "PER", 0.5), 4, 8, "Zoë")
ENTITIES = [Entities([]), Entities([PERSON, PERSON], truncated=True), Entities([PERSON])]
CLASSES = [
    Classification([Label(2, "c", 0.75), Label(0, "a", 0.5)]),
    Classification([]),
    Classification([Label(1, "b", 1.0)]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text")
    (path / "tokenizer.json").write_text("{}")  # the gateway never opens it
    return path


def served(kind: type[Pipeline[Options]], folder: Path, **config: object) -> ServedModel:
    typed: Config = msgspec.convert(config, kind.config_type)
    pipeline = kind(typed, folder, ("a", "b", "c") if kind is not TextEmbedding else ())
    return ServedModel(1, ModelState(name="m", version=VERSION, phase="ready"), pipeline, LIMITS)


def selected(model: ServedModel, results: list[Result], *asked: str, **parameters: int) -> dict[str, InferOutput]:
    wanted = [InferRequestedOutput(name, dict(parameters)) for name in asked]
    return {one.name: one for one in outputs.selected(model, Answer("m", "v", list(results)), wanted)}


def values(tensor: InferOutput) -> object:
    if tensor.datatype == "BYTES":
        count = int(np.prod(tensor.shape))
        return np.array([one.decode() for one in unpack_bytes(tensor.data, count)]).reshape(tensor.shape).tolist()
    return np.frombuffer(tensor.data, DTYPES[tensor.datatype]).reshape(tensor.shape).tolist()


def test_vectors_with_their_tokens(folder: Path) -> None:
    found = selected(served(TextEmbedding, folder, dimensions=2), VECTORS)
    assert {name: values(one) for name, one in found.items()} == {
        "embedding": [[1, 2], [3, 4]],
        "tokens": [[5], [256]],
        "truncated": [[False], [True]],
    }


def test_every_text_has_as_many_places_as_the_one_with_the_most_entities(folder: Path) -> None:
    found = selected(served(TokenClassification, folder), ENTITIES)
    assert {name: values(one) for name, one in found.items()} == {
        "entities": [["", ""], ["Zoë", "Zoë"], ["Zoë", ""]],
        "labels": [["", ""], ["PER", "PER"], ["PER", ""]],
        "scores": [[0, 0], [0.5, 0.5], [0.5, 0]],
        "starts": [[-1, -1], [4, 4], [4, -1]],
        "ends": [[-1, -1], [8, 8], [8, -1]],
        "truncated": [[False], [True], [False]],
    }
    assert selected(served(TokenClassification, folder), [Entities([])])["scores"].shape == (1, 0)


def test_classes_that_a_threshold_has_left_out_leave_empty_places(folder: Path) -> None:
    model = served(TextClassification, folder)
    found = selected(model, CLASSES)
    assert {name: values(one) for name, one in found.items()} == {
        "scores": [[0.75, 0.5], [0, 0], [1, 0]],
        "classes": [[2, 0], [-1, -1], [1, -1]],
        "labels": [["c", "a"], ["", ""], ["b", ""]],
    }
    assert values(selected(model, CLASSES, "scores", classification=5)["scores"]) == [
        ["0.750000:2:c", "0.500000:0:a"],
        ["", ""],
        ["1.000000:1:b", ""],
    ]
    assert selected(model, [Classification([])])["scores"].shape == (1, 0)


@pytest.mark.parametrize(
    ("kind", "results"), [(TextEmbedding, VECTORS), (TokenClassification, ENTITIES), (TextClassification, CLASSES)]
)
def test_the_answer_is_what_the_metadata_declares(
    folder: Path, kind: type[Pipeline[Options]], results: list[Result]
) -> None:
    model = served(kind, folder)
    declared = metadata.model_metadata(model, ["v"])
    assert [(one.name, one.datatype, tuple(one.shape)) for one in declared.inputs] == [("text", "BYTES", (-1, 1))]
    found = selected(model, results)
    assert list(found) == [one.name for one in declared.outputs]
    for one in declared.outputs:
        tensor = found[one.name]
        assert tensor.datatype == one.datatype
        assert all(want in (-1, have) for want, have in zip(one.shape, tensor.shape, strict=True)), one.name
        assert list(selected(model, results, one.name)) == [one.name]
