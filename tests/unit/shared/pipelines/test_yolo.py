"""Heads by value: boxes that were written into a network's numbers come out of them again."""

import math
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import StartupError
from shared.pipelines import _yolo

torch = pytest.importorskip("torch")

SIZE, CLASSES, KEEP = 64, 3, 8
STRIDES = (32, 16)
ANCHORS = (((40.0, 30.0), (20.0, 50.0)), ((8.0, 12.0), (16.0, 6.0)))
NOTHING = -30.0
"""A logit of what is not there."""

Numbers: TypeAlias = npt.NDArray[np.float32]


class Spot(NamedTuple):
    """Where in the maps a box is written."""

    level: int
    anchor: int
    y: int
    x: int


class Told(NamedTuple):
    """The numbers written there."""

    xywh: tuple[float, float, float, float]
    objectness: float
    classes: tuple[float, float, float]


number = st.floats(-3, 3, width=32)
logits = st.permutations([-2.5, 0.25, 2.0]).map(tuple)
spots = st.integers(0, 1).flatmap(
    lambda level: st.builds(
        Spot,
        st.just(level),
        st.integers(0, 1),
        st.integers(0, SIZE // STRIDES[level] - 1),
        st.integers(0, SIZE // STRIDES[level] - 1),
    )
)
written = st.dictionaries(spots, st.builds(Told, st.tuples(number, number, number, number), number, logits), max_size=6)


def anchors(**changes: Any) -> _yolo.YoloAnchors:  # noqa: ANN401 - any setting
    return msgspec.convert(
        {"strides": STRIDES, "anchors": ANCHORS, "scheme": "yolo_anchors"} | changes, _yolo.YoloAnchors
    )


def rows(**changes: bool) -> _yolo.YoloRows:
    return msgspec.convert({"scheme": "yolo_rows"} | changes, _yolo.YoloRows)


def maps(given_: dict[Spot, Told]) -> tuple[Any, ...]:
    """A network's raw outputs for one image."""
    levels = [np.full((2, 5 + CLASSES, SIZE // s, SIZE // s), NOTHING, np.float32) for s in STRIDES]
    for spot, told in given_.items():
        levels[spot.level][spot.anchor, :, spot.y, spot.x] = [*told.xywh, told.objectness, *told.classes]
    return tuple(torch.from_numpy(level.reshape(1, -1, *level.shape[2:])) for level in levels)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def meaning(spot: Spot, told: Told, scale: float, wh: str) -> tuple[float, int, list[float]]:
    """Score, class and corners, as the papers have them."""
    stride, anchor = STRIDES[spot.level], ANCHORS[spot.level][spot.anchor]
    tx, ty, tw, th = told.xywh
    x = (sigmoid(tx) * scale - (scale - 1) / 2 + spot.x) * stride
    y = (sigmoid(ty) * scale - (scale - 1) / 2 + spot.y) * stride
    sides = [math.exp(tw), math.exp(th)] if wh == "exp" else [(2 * sigmoid(tw)) ** 2, (2 * sigmoid(th)) ** 2]
    width, height = (side * length for side, length in zip(sides, anchor, strict=True))
    likeliest = max(range(CLASSES), key=lambda c: told.classes[c])
    score = sigmoid(told.objectness) * sigmoid(told.classes[likeliest])
    return score, likeliest, [x - width / 2, y - height / 2, x + width / 2, y + height / 2]


def check(found: _yolo.Found, wanted: list[tuple[float, int, list[float]]]) -> None:
    """All of the first image, best first; equal scores in any order."""
    count = len(wanted)
    scores, classes, boxes = found.scores[0].numpy(), found.classes[0].numpy(), found.boxes[0].numpy()
    assert np.allclose(scores[:count], sorted((each[0] for each in wanted), reverse=True), rtol=1e-4)
    for score, number_, box in wanted:
        alike = np.isclose(scores, score, rtol=1e-4) & (classes == number_)
        assert np.isclose(boxes[alike], box, rtol=1e-3, atol=1e-3).all(1).any()
    assert not scores[count:].any()
    assert not boxes[count:].any()
    assert not classes[count:].any()


@given(written, st.sampled_from([(1.0, "exp"), (1.2, "exp"), (2.0, "squared")]))
def test_boxes_written_into_maps_come_out_again(given_: dict[Spot, Told], kind: tuple[float, str]) -> None:
    scale, wh = kind
    head = _yolo.head(anchors(xy_scale=scale, wh=wh), SIZE, CLASSES)
    found = _yolo.best(head, maps(given_), KEEP, 1e-6)
    check(found, [meaning(spot, told, scale, wh) for spot, told in given_.items()])


@given(written, written)
def test_images_of_a_batch_do_not_mix(one: dict[Spot, Told], other: dict[Spot, Told]) -> None:
    head = _yolo.head(anchors(), SIZE, CLASSES)
    both = tuple(torch.cat(pair) for pair in zip(maps(one), maps(other), strict=True))
    found = _yolo.best(head, both, KEEP, 1e-6)
    for row, alone in enumerate((one, other)):
        single = _yolo.best(head, maps(alone), KEEP, 1e-6)
        for mine, theirs in zip(found, single, strict=True):
            assert torch.equal(mine[row], theirs[0])


def test_only_the_best_leave_and_none_below_the_lowest_score() -> None:
    given_ = {
        Spot(1, 0, y, x): Told((0, 0, 0, 0), -3.0 + 0.4 * (4 * y + x), (0.0, 5.0, 1.0))
        for y in range(4)
        for x in range(4)
    }
    head = _yolo.head(anchors(), SIZE, CLASSES)
    scores = _yolo.best(head, maps(given_), KEEP, 1e-6).scores[0]
    everything = sorted((meaning(*each, 1.0, "exp")[0] for each in given_.items()), reverse=True)
    assert np.allclose(scores, everything[:KEEP], rtol=1e-5)
    few = _yolo.best(head, maps(given_), 100, everything[3] * 0.9999)
    assert int((few.scores > 0).sum()) == 4
    assert few.boxes.shape == (1, 100, 4)  # more than there are: zeros behind them


def test_a_wild_guess_stays_finite() -> None:
    given_ = {Spot(0, 0, 0, 0): Told((0.0, 0.0, 1000.0, 1000.0), 3.0, (3.0, 0.0, 0.0))}
    found = _yolo.best(_yolo.head(anchors(), SIZE, CLASSES), maps(given_), KEEP, 0.01)
    assert torch.isfinite(found.boxes).all()


@pytest.mark.parametrize("objectness", [False, True])
@pytest.mark.parametrize("boxes_first", [False, True])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("fractions", [False, True])
@pytest.mark.parametrize("sigmoid_", [False, True])
def test_rows_of_every_form(
    objectness: bool, boxes_first: bool, corners: bool, fractions: bool, sigmoid_: bool
) -> None:
    random = np.random.default_rng(3)
    boxes = random.uniform(5, 30, (20, 4)).astype(np.float32)
    classes = random.uniform(0.02, 0.98, (20, CLASSES)).astype(np.float32)
    there = random.uniform(0.5, 1, (20, 1)).astype(np.float32)
    ends = np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], 1)
    scores = (classes * there if objectness else classes).max(1)

    written_boxes = (ends if corners else boxes) / (SIZE if fractions else 1)
    parts = [written_boxes, *([there] if objectness else []), classes]
    if sigmoid_:
        parts[1:] = [np.log(part / (1 - part + 1e-7)) for part in parts[1:]]
    output = np.concatenate(parts, 1)[None].astype(np.float32)
    output = output if boxes_first else output.transpose(0, 2, 1).copy()
    config = rows(
        objectness=objectness, boxes_first=boxes_first, corners=corners, fractions=fractions, sigmoid=sigmoid_
    )
    found = _yolo.best(_yolo.head(config, SIZE, CLASSES), (torch.from_numpy(output),), KEEP, 0.001)

    order = np.argsort(-scores, kind="stable")[:KEEP]
    assert np.allclose(found.scores[0], scores[order], atol=1e-4)
    assert np.allclose(found.boxes[0], ends[order], atol=1e-3)
    assert found.classes[0].tolist() == classes[order].argmax(1).tolist()
    assert found.classes.dtype == torch.int32


@pytest.mark.parametrize(
    ("config", "outputs", "sentence"),
    [
        (anchors(), [(1, 16, 2, 2)], "gives 1 maps, the settings have 2 strides"),
        (anchors(), [(1, 16, 2, 2), (1, 16, 2, 2)], r"a map of \[16, 2, 2\], the settings say \[16, 4, 4\]"),
        (anchors(), [(1, 18, 2, 2), (1, 18, 4, 4)], r"a map of \[18, 2, 2\]"),
        (rows(), [(1, 8, 20)], r"gives \[8, 20\] per image, the settings say \[7, boxes\]"),
        (rows(boxes_first=True, objectness=True), [(1, 7, 20)], r"say \[boxes, 8\]"),
        (rows(), [(1, 7)], r"gives \[7\] per image"),
    ],
)
def test_outputs_of_another_network_are_told(
    config: _yolo.HeadConfig, outputs: list[tuple[int, ...]], sentence: str
) -> None:
    head = _yolo.head(config, SIZE, CLASSES)
    with pytest.raises(ValueError, match=sentence):
        _yolo.best(head, tuple(torch.zeros(shape) for shape in outputs), KEEP, 0.1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"strides": [32]}, "anchors has 2 lists, strides has 1"),
        ({"strides": [32, 24]}, r"size is 64, which 24 \(preprocessing\.head\.strides\) does not divide"),
    ],
)
def test_contradictory_settings_are_refused_at_start(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        _yolo.head(anchors(**changes), SIZE, CLASSES)


@pytest.mark.parametrize(
    "changes",
    [{"anchors": [[], []]}, {"strides": []}, {"wh": "log"}, {"xy_scale": 0.5}, {"anchors": [[[0, 1]], [[1, 1]]]}],
)
def test_settings_are_bounded(changes: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        anchors(**changes)
