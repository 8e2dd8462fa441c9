from typing import TypeAlias

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.boxes import suppressed

Box: TypeAlias = tuple[float, float, float, float]
Guess: TypeAlias = tuple[Box, float, int]

coordinate = st.integers(-50, 50).map(float)
length = st.integers(1, 40).map(float)
box = st.tuples(coordinate, coordinate, length, length).map(lambda b: (b[0], b[1], b[0] + b[2], b[1] + b[3]))
guesses = st.lists(st.tuples(box, st.floats(0.015625, 1, width=32), st.integers(0, 3)), max_size=25)
threshold = st.sampled_from([0.0, 0.300001, 0.450001, 0.700001, 1.0])  # no ratio of small whole numbers


def run(given_: list[Guess], iou: float) -> list[int]:
    boxes = np.array([one[0] for one in given_], np.float64).reshape(-1, 4)
    scores = np.array([one[1] for one in given_], np.float32)
    classes = np.array([one[2] for one in given_], np.int32)
    return suppressed(boxes, scores, classes, iou).tolist()  # type: ignore[no-any-return]


def overlap(a: Box, b: Box) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    both = width * height
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def reference(given_: list[Guess], iou: float) -> list[int]:
    """Greedy, as everybody describes it."""
    kept: list[int] = []
    for index in sorted(range(len(given_)), key=lambda i: -given_[i][1]):
        mine, _, number = given_[index]
        if all(given_[k][2] != number or overlap(given_[k][0], mine) <= iou for k in kept):
            kept.append(index)
    return kept


@given(guesses, threshold)
def test_what_stays_is_what_the_plain_algorithm_keeps(given_: list[Guess], iou: float) -> None:
    assert run(given_, iou) == reference(given_, iou)


@given(guesses, threshold)
def test_doing_it_twice_changes_nothing(given_: list[Guess], iou: float) -> None:
    kept = [given_[index] for index in run(given_, iou)]
    assert [one[1] for one in kept] == sorted((one[1] for one in kept), reverse=True)
    assert run(kept, iou) == list(range(len(kept)))


def test_classes_do_not_meet_left_of_the_edge() -> None:
    # With OpenCV alone the box of class 1 would be put where the large one of class 0 ends.
    both: list[Guess] = [((-50.0, -50.0, 50.0, 50.0), 0.9, 0), ((-50.0, -50.0, 50.0, 50.0), 0.8, 1)]
    assert run(both, 0.0) == [0, 1]


def test_nothing_of_nothing() -> None:
    assert run([], 0.5) == []
