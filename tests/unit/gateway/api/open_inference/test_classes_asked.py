from types import SimpleNamespace
from typing import Any

import pytest

from gateway.api.open_inference.model import InferRequestedOutput, Parameters
from gateway.api.open_inference.outputs import with_classes_asked

MODEL: Any = SimpleNamespace(
    spec=SimpleNamespace(kind="image", outputs=[SimpleNamespace(name="scores"), SimpleNamespace(name="classes")]),
    pipeline=SimpleNamespace(labels=tuple(map(str, range(1000)))),
)
RAW: Any = SimpleNamespace(spec=SimpleNamespace(kind="tensors"), pipeline=SimpleNamespace(labels=()))


def scores(count: int) -> list[InferRequestedOutput]:
    return [InferRequestedOutput("scores", {"classification": count})]


@pytest.mark.parametrize(
    ("options", "count", "expected"),
    [
        ({}, 8, {"top_k": 8}),  # more than the default of the pipeline
        ({"top_k": 2}, 4, {"top_k": 4}),
        ({"top_k": 9}, 4, {"top_k": 9}),
        ({}, 5000, {"top_k": 1000}),  # the pipeline refuses what it does not give, by its own sentence
    ],
)
def test_the_classification_extension_gets_as_many_classes_as_it_asks_for(
    options: Parameters, count: int, expected: Parameters
) -> None:
    assert with_classes_asked(MODEL, options, scores(count)) == expected


def test_without_it_the_options_stay() -> None:
    assert with_classes_asked(MODEL, {"top_k": 2}, []) == {"top_k": 2}
    assert with_classes_asked(MODEL, {}, [InferRequestedOutput("scores", {})]) == {}
    assert with_classes_asked(RAW, {}, scores(8)) == {}
