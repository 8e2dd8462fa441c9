"""When two versions are said to answer alike."""

import math
import tracemalloc

import numpy as np
import pytest

from gateway.agreement import agree
from shared.errors import HeadraceError, InternalFault, InvalidInput
from shared.results import (
    Classification,
    Detection,
    Detections,
    Embedding,
    Entities,
    Entity,
    Label,
    Result,
    Tensors,
    Text,
)
from shared.tensors import SlotRef, Tensor, datatype_of


def classes(*scores: tuple[str, float]) -> Classification:
    return Classification([Label(number, name, score) for number, (name, score) in enumerate(scores)])


def boxes(*found: tuple[str, float, tuple[float, float, float, float]]) -> Detections:
    return Detections([Detection(Label(0, name, score), *place) for name, score, place in found], 640, 480)


def numbers(*values: float, kind: str = "<f4", name: str = "x") -> Tensors:
    array = np.array([values], kind)
    return Tensors([Tensor(name, datatype_of(array), array.shape, array.tobytes())])


def bf16(*values: float) -> Tensors:
    halves = (np.array([values], "<f4").view("<u4") >> 16).astype("<u2")
    return Tensors([Tensor("x", "BF16", halves.shape, halves.tobytes())])


NAN, INF = math.nan, math.inf
CAT = ("cat", 0.9, (0.0, 0.0, 10.0, 10.0))

ALIKE: list[tuple[Result | HeadraceError, Result | HeadraceError]] = [
    (classes(("cat", 0.9), ("dog", 0.1)), classes(("cat", 0.6), ("dog", 0.4))),
    (classes(("cat", 0.5002), ("dog", 0.4998)), classes(("dog", 0.51), ("cat", 0.49))),
    (Classification([Label(3, "", 0.9)]), Classification([Label(3, "", 0.8)])),
    (Classification([Label(3, "cat", 0.9)]), Classification([Label(4, "cat", 0.8)])),
    (classes(), classes()),
    (boxes(CAT), boxes(("cat", 0.6, (1.0, 0.0, 10.0, 10.0)))),
    (boxes(CAT), boxes(("dog", 0.3, (50.0, 50.0, 60.0, 60.0)), ("cat", 0.2, (0.0, 1.0, 10.0, 10.0)))),
    (boxes(), boxes()),
    (boxes(("cat", 0.9, (1.0, 1.0, 1.0, 1.0))), boxes(("cat", 0.9, (1.0, 1.0, 1.0, 1.0)))),
    (Embedding([1.0, 0.0]), Embedding([2.0, 0.1])),
    (Embedding([0.0, 0.0]), Embedding([0.0, 0.0])),
    (Embedding([1.0, NAN]), Embedding([1.0, NAN])),
    (numbers(1.0, -100.0), numbers(1.5, -100.5)),
    (numbers(1.0, NAN, INF), numbers(1.0, NAN, INF)),
    (numbers(), numbers()),
    (numbers(0.0, 0.0), numbers(0.0, -0.0)),
    (bf16(1.0, 2.0), bf16(1.0, 2.0078125)),
    (numbers(1, 2, kind="<i8"), numbers(1, 2, kind="<i8")),
    (Text("a  b\n"), Text("a b")),
    (InvalidInput("one"), InvalidInput("other")),
]

UNLIKE: list[tuple[Result | HeadraceError, Result | HeadraceError]] = [
    (classes(("cat", 0.9), ("dog", 0.1)), classes(("dog", 0.9), ("cat", 0.1))),
    (classes(("cat", 0.9)), classes()),
    (Classification([Label(3, "", 0.9)]), Classification([Label(4, "", 0.9)])),
    (boxes(CAT), boxes()),
    (boxes(CAT), boxes(("dog", 0.9, (0.0, 0.0, 10.0, 10.0)))),
    (boxes(CAT), boxes(("cat", 0.9, (6.0, 0.0, 16.0, 10.0)))),
    (boxes(CAT), boxes(("cat", 0.9, (20.0, 20.0, 30.0, 30.0)))),
    (Embedding([1.0, 0.0]), Embedding([1.0, 0.2])),
    (Embedding([1.0, 0.0]), Embedding([-1.0, 0.0])),
    (Embedding([1.0, 0.0]), Embedding([0.0, 0.0])),
    (Embedding([1.0]), Embedding([1.0, 0.0])),
    (Embedding([1.0, 0.0]), Embedding([1.0, NAN])),
    (numbers(1.0, -100.0), numbers(3.0, -100.0)),
    (numbers(1.0, 2.0), numbers(1.0, NAN)),
    (numbers(1.0, NAN), numbers(1.0, 2.0)),
    (numbers(1.0, INF), numbers(1.0, -INF)),
    (numbers(1.0, 2.0), numbers(1.0)),
    (numbers(1.0), numbers(1.0, name="y")),
    (numbers(1.0), numbers(1.0, kind="<f8")),
    (numbers(100, 200, kind="<i8"), numbers(100, 201, kind="<i8")),
    (bf16(1.0, 2.0), bf16(1.0, 3.0)),
    (numbers(1.0), Tensors([*numbers(1.0).tensors, *numbers(1.0).tensors])),
    (Tensors([Tensor("x", "FP32", (1,), SlotRef(0, 4))]), numbers(1.0)),
    (Text("a b"), Text("ab")),
    (Text("a"), classes(("a", 1.0))),
    (InvalidInput("one"), InternalFault()),
    (InvalidInput("one"), Text("one")),
]


@pytest.mark.parametrize(("left", "right"), ALIKE)
def test_alike(left: Result | HeadraceError, right: Result | HeadraceError) -> None:
    assert agree([left], [right])
    assert agree([right], [left])


@pytest.mark.parametrize(("left", "right"), UNLIKE)
def test_not_alike(left: Result | HeadraceError, right: Result | HeadraceError) -> None:
    assert not agree([left], [right])
    assert not agree([right], [left])


def test_all_inputs_must_agree() -> None:
    assert agree([Text("a"), Text("b")], [Text("a"), Text("b")])
    assert not agree([Text("a"), Text("b")], [Text("a"), Text("c")])
    assert not agree([Text("a")], [Text("a"), Text("b")])
    assert agree([], [])


def test_large_tensors_are_compared_whole_and_in_little_memory() -> None:
    count = 1 << 20
    left, right = np.zeros(count, "<f4"), np.zeros(count, "<f4")
    left[0] = right[0] = 100.0  # largest of all, and in another part than what differs
    right[-1] = 0.9
    tensors = [Tensors([Tensor("x", "FP32", (count,), each.tobytes())]) for each in (left, right)]
    tracemalloc.start()
    try:
        assert agree(tensors[:1], tensors[1:])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * count, "less than one copy of it"
    right[-1] = 1.1
    assert not agree(tensors[:1], [Tensors([Tensor("x", "FP32", (count,), right.tobytes())])])
    right[-1] = NAN
    assert not agree(tensors[:1], [Tensors([Tensor("x", "FP32", (count,), right.tobytes())])])


def entities(*found: tuple[str, int, int, float]) -> Entities:
    return Entities([Entity(Label(1, name, score), start, end, "x") for name, start, end, score in found])


@pytest.mark.parametrize(
    ("left", "right", "alike"),
    [
        (entities(("PER", 0, 4, 0.9)), entities(("PER", 0, 4, 0.6)), True),
        (entities(("PER", 0, 4, 0.9)), entities(("LOC", 0, 4, 0.9)), False),
        (entities(("PER", 0, 4, 0.9)), entities(("PER", 0, 5, 0.9)), False),
        (entities(("PER", 0, 4, 0.9), ("LOC", 9, 12, 0.4)), entities(("PER", 0, 4, 0.9)), True),
        (entities(("PER", 0, 4, 0.9)), entities(("PER", 0, 4, 0.9), ("LOC", 9, 12, 0.8)), False),
        (entities(), entities(), True),
        (entities(), Text(""), False),
    ],
)
def test_entities_of_which_one_is_sure_are_in_both(left: Entities, right: Result, alike: bool) -> None:
    assert agree([left], [right]) == agree([right], [left]) == alike
