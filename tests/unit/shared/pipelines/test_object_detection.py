import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import yaml

from shared.errors import InvalidInput, InvalidOption, StartupError
from shared.letterbox import Letterbox, fit
from shared.pipeline import RawInput
from shared.pipelines.object_detection import ObjectDetection, ObjectDetectionConfig
from shared.results import Detection, Detections
from tests.support.pictures import encode, photo, with_orientation

ROOT = Path(__file__).parent.parent.parent.parent.parent
LABELS = ("cat", "dog", "emu")
HEAD = {"scheme": "yolo_rows"}
SIZE = 64

Float = npt.NDArray[np.float32]


def pipeline(labels: tuple[str, ...] = LABELS, **config: Any) -> ObjectDetection:  # noqa: ANN401 - any setting
    settings = {"size": SIZE, "head": HEAD, "max_candidates": 6, "max_detections": 5} | config
    return ObjectDetection(msgspec.convert(settings, ObjectDetectionConfig), Path(), labels)


def outputs(*found: tuple[tuple[float, float, float, float], float, int]) -> list[npt.NDArray[Any]]:
    """What leaves the worker for one image."""
    boxes, scores, classes = np.zeros((1, 6, 4), np.float32), np.zeros((1, 6), np.float32), np.zeros((1, 6), np.int32)
    for place, (box, score, number) in enumerate(found):
        boxes[0, place], scores[0, place], classes[0, place] = box, score, number
    return [boxes, scores, classes]


def told(subject: ObjectDetection, given: list[npt.NDArray[Any]], place: Letterbox, **options: Any) -> Detections:  # noqa: ANN401 - any option
    (result,) = subject.postprocess(given, msgspec.structs.asdict(place), subject.parse_options(options))
    assert isinstance(result, Detections)
    return result


def names(result: Detections) -> list[tuple[str, float]]:
    return [(each.label.name, round(each.label.score, 3)) for each in result.boxes]


def corners(box: Detection) -> tuple[float, float, float, float]:
    return box.left, box.top, box.right, box.bottom


SQUARE = fit(SIZE, SIZE, SIZE)
THREE = outputs(
    ((0, 0, 20, 20), 0.9, 0), ((1, 1, 21, 21), 0.8, 0), ((0, 0, 20, 20), 0.7, 1), ((40, 40, 60, 60), 0.3, 0)
)


def test_spec() -> None:
    spec = pipeline().spec
    assert [(each.name, each.datatype, each.shape) for each in spec.inputs] == [("image", "UINT8", (SIZE, SIZE, 3))]
    assert [(each.name, each.datatype, each.shape, each.maximum) for each in spec.outputs] == [
        ("boxes", "FP32", (6, 4), None),
        ("scores", "FP32", (6,), None),
        ("classes", "INT32", (6,), 3),
    ]


def test_of_boxes_that_show_the_same_thing_the_best_stays() -> None:
    assert names(told(pipeline(), THREE, SQUARE)) == [("cat", 0.9), ("dog", 0.7), ("cat", 0.3)]


def test_options_and_settings_say_which_boxes() -> None:
    subject = pipeline(score_threshold=0.5)
    assert names(told(subject, THREE, SQUARE)) == [("cat", 0.9), ("dog", 0.7)]
    assert names(told(subject, THREE, SQUARE, score_threshold=0.75)) == [("cat", 0.9)]
    assert len(told(subject, THREE, SQUARE, score_threshold=0.0, iou_threshold=1.0).boxes) == 4
    assert names(told(subject, THREE, SQUARE, max_detections=1)) == [("cat", 0.9)]
    assert names(told(subject, THREE, SQUARE, classes=["dog"])) == [("dog", 0.7)]
    assert names(told(subject, THREE, SQUARE, classes=["dog", "cat", "dog"])) == [("cat", 0.9), ("dog", 0.7)]
    assert names(told(subject, THREE, SQUARE, classes=["emu"])) == []


def test_of_equal_names_every_class_is_meant() -> None:
    found = told(pipeline(("cat", "cat", "emu")), THREE, SQUARE, classes=["cat"])
    assert [each.label.index for each in found.boxes] == [0, 1, 0]


def test_a_score_of_exactly_the_threshold_stays_whatever_its_bits() -> None:
    given = outputs(((0, 0, 9, 9), 0.3, 0))
    assert len(told(pipeline(), given, SQUARE, score_threshold=0.3).boxes) == 1
    assert len(told(pipeline(), given, SQUARE, score_threshold=float(np.float32(0.3))).boxes) == 1


def test_boxes_are_told_in_pixels_of_the_picture_and_end_at_its_edges() -> None:
    place = fit(640, 320, SIZE)  # a tenth, 16 rows of grey above and below
    result = told(pipeline(), outputs(((10, 20, 30, 40), 0.9, 0), ((-5, 0, 70, 64), 0.8, 1)), place)
    assert (result.width, result.height) == (640, 320)
    assert corners(result.boxes[0]) == pytest.approx((100, 40, 300, 240))
    assert corners(result.boxes[1]) == (0, 0, 640, 320)


def test_what_is_no_box_is_left_out() -> None:
    place = fit(640, 320, SIZE)
    beside = ((0, 0, 60, 10), 0.9, 0)  # only in the grey
    turned = ((30, 30, 20, 20), 0.8, 0)
    flat = ((30, 30, 40, 30), 0.7, 0)
    good = ((30, 30, 40, 40), 0.6, 0)
    assert names(told(pipeline(), outputs(beside, turned, flat, good), place)) == [("cat", 0.6)]
    assert told(pipeline(), outputs(), place).boxes == []


def test_grey_boxes_take_no_place_of_good_ones() -> None:
    place = fit(640, 320, SIZE)
    given = outputs(((0, 0, 60, 10), 0.9, 0), ((30, 30, 40, 40), 0.6, 0))
    assert names(told(pipeline(), given, place, max_detections=1)) == [("cat", 0.6)]


def test_classes_without_names() -> None:
    subject = pipeline((), classes=3)
    assert [each.label.index for each in told(subject, THREE, SQUARE).boxes] == [0, 1, 0]
    assert told(subject, THREE, SQUARE).boxes[0].label.name == ""
    with pytest.raises(InvalidOption, match=r"options\.classes has 'cat', which is not known: it has no names"):
        subject.parse_options({"classes": ["cat"]})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"classes": ["cat", "gnu"]}, r"options\.classes has 'gnu', which is not one of this model's 3 classes"),
        ({"classes": ["x" * 500]}, r"has 'x{100}', which"),
        ({"classes": [3]}, r"options\.classes"),
        ({"classes": "cat"}, r"options\.classes"),
        ({"classes": ["cat"] * 1001}, r"options\.classes"),
        ({"score_threshold": float("nan")}, r"options\.score_threshold is nan"),
        ({"score_threshold": float("inf")}, r"options\.score_threshold is inf"),
        ({"score_threshold": -0.1}, r"options\.score_threshold is -0\.1"),
        ({"iou_threshold": float("nan")}, r"options\.iou_threshold is nan"),
        ({"iou_threshold": 1.1}, r"options\.iou_threshold is 1\.1"),
        ({"max_detections": 0}, r"options\.max_detections is 0"),
        ({"max_detections": 6}, r"at most 5 \(preprocessing\.max_detections\)"),
        ({"max_detections": 2**63}, r"options\.max_detections"),
        ({"top_k": 1}, r"options\.top_k is not an option of this model"),
    ],
)
def test_wrong_options_are_named(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidOption, match=sentence):
        pipeline().parse_options(given)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"max_detections": 7}, r"max_detections is 7, more than max_candidates \(6\)"),
        ({"head": {"scheme": "yolo_anchors", "strides": [30], "anchors": [[[1, 1]]]}}, "which 30 .* does not divide"),
        ({"mean": [0, math.nan, 0]}, r"preprocessing\.mean is nan: a finite number is needed"),
        ({"std": [1, math.inf, 1]}, r"preprocessing\.std is inf"),
        (
            {"head": {"scheme": "yolo_anchors", "strides": [32], "anchors": [[[math.inf, 1]]]}},
            r"preprocessing\.head\.anchors is inf",
        ),
        ({"classes": 4}, r"preprocessing\.classes is 4, but the labels file has 3 lines"),
    ],
)
def test_contradictory_settings_are_refused_at_start(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        pipeline(**config)


@pytest.mark.parametrize(
    "config",
    [
        {"head": {"scheme": "ssd"}},
        {"head": {}},
        {"score_threshold": 2},
        {"score_threshold": math.nan},
        {"min_score": 0},
        {"size": 0},
        {"sise": 1},
    ],
)
def test_settings_are_bounded(config: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        pipeline(**config)


def prepared(subject: ObjectDetection, data: bytes) -> tuple[npt.NDArray[np.uint8], Letterbox]:
    slot = np.zeros((1, SIZE, SIZE, 3), np.uint8)
    result = subject.preprocess(RawInput(kind="image", data=data), subject.parse_options({}), [slot])
    assert result.tensors[0] is slot
    context = msgspec.msgpack.decode(msgspec.msgpack.encode(result.context))  # the way between the processes
    return slot[0], Letterbox(**context)


def test_preprocess_writes_the_whole_upright_picture_into_the_slot() -> None:
    slot, place = prepared(pipeline(background=(1, 2, 3)), with_orientation(photo(300, 150), "JPEG", 6))
    assert (place.width, place.height) == (150, 300)
    assert (slot[:, :15] == (1, 2, 3)).all()
    assert slot[:, 20:44].std() > 10


@pytest.mark.parametrize("data", [b"", b"no", encode(photo(40, 40), "PNG")[:100]])
def test_a_broken_image_is_the_callers_fault(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        prepared(pipeline(), data)


def test_the_example_is_valid() -> None:
    slot, place = prepared(pipeline(), bytes(pipeline().example().data))
    assert (place.width, place.height) == (SIZE, SIZE)
    assert slot.std() > 10


def test_normalise_is_what_the_settings_say() -> None:
    torch = pytest.importorskip("torch")
    image = torch.randint(0, 256, (2, SIZE, SIZE, 3), dtype=torch.uint8)
    (plain,) = pipeline().normalise({"image": image})
    assert torch.allclose(plain, image.permute(0, 3, 1, 2) / 255, atol=1e-6)
    (other,) = pipeline(mean=(127.5,) * 3, std=(128,) * 3).normalise({"image": image})
    assert torch.allclose(other, (image.permute(0, 3, 1, 2) - 127.5) / 128, atol=1e-5)


def test_from_the_networks_numbers_to_the_pictures_pixels() -> None:
    torch = pytest.importorskip("torch")
    subject = pipeline(score_threshold=0.2)
    numbers = torch.zeros(1, 7, 9)  # centre x and y, width, height, three classes; nine boxes, most of them nothing
    numbers[0, :, 2] = torch.tensor([32, 32, 20, 10, 0.0, 0.9, 0.0])
    numbers[0, :, 5] = torch.tensor([33, 32, 20, 10, 0.0, 0.6, 0.1])
    numbers[0, :, 7] = torch.tensor([10, 32, 8, 8, 0.1, 0.0, 0.5])
    found = subject.head((numbers,))
    result = told(subject, [one.numpy() for one in found], fit(640, 640, SIZE))
    assert [(each.label.name, tuple(map(round, corners(each)))) for each in result.boxes] == [
        ("dog", (220, 270, 420, 370)),
        ("emu", (60, 280, 140, 360)),
    ]


def test_the_gateway_loads_it_without_torch_and_opencv() -> None:
    code = (
        "import sys, shared.pipelines.object_detection; "
        "print([name for name in ('torch', 'cv2') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert printed == "[]\n"


def guided() -> list[dict[str, Any]]:
    blocks = re.findall(
        r"^```yaml\n(.*?)^```", (ROOT / "docs/guides/detection.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return [yaml.safe_load(block) for block in blocks]


def test_every_head_of_the_guide_can_be_configured() -> None:
    assert len(guided()) == 4
    for block in guided():
        settings = block.get("preprocessing") or {"size": 640, **block}
        config = msgspec.convert(settings, ObjectDetectionConfig)
        ObjectDetection(config, Path(), LABELS)
    whole = msgspec.convert(guided()[0]["preprocessing"], ObjectDetectionConfig)
    defaults = msgspec.convert({"head": {"scheme": "yolo_rows"}}, ObjectDetectionConfig)
    for name in ("background", "mean", "std", "score_threshold", "iou_threshold", "max_detections", "max_candidates"):
        assert getattr(whole, name) == getattr(defaults, name)
