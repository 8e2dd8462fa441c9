import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shared.errors import InvalidInput, InvalidOption, StartupError
from shared.pipeline import RawInput
from shared.pipelines.image_classification import ImageClassification, ImageClassificationConfig
from shared.results import Classification
from tests.support.pictures import difference, encode, photo

ROOT = Path(__file__).parent.parent.parent.parent.parent
LABELS = ("cat", "dog", "emu", "fox")


def pipeline(labels: tuple[str, ...] = LABELS, **config: Any) -> ImageClassification:  # noqa: ANN401 - any setting
    return ImageClassification(ImageClassificationConfig(**({"size": 32} | config)), Path(), labels)


def test_spec() -> None:
    spec = pipeline(max_top_k=3).spec
    assert [(each.name, each.datatype, each.shape) for each in spec.inputs] == [("image", "UINT8", (32, 32, 3))]
    assert [(each.name, each.datatype, each.shape, each.maximum) for each in spec.outputs] == [
        ("scores", "FP32", (3,), None),
        ("classes", "INT32", (3,), 4),
    ]


def test_no_more_classes_leave_than_there_are() -> None:
    assert pipeline(max_top_k=100).spec.outputs[0].shape == (4,)


def test_classes_without_labels() -> None:
    assert pipeline((), classes=1000).spec.outputs[1].maximum == 1000
    with pytest.raises(StartupError, match=r"set preprocessing\.classes"):
        pipeline(())
    with pytest.raises(StartupError, match=r"preprocessing\.classes is 5, but the labels file has 4 lines"):
        pipeline(classes=5)


@pytest.mark.parametrize(
    ("key", "value"),
    [("size", 0), ("size", 4096), ("crop_fraction", 0.1), ("crop_fraction", 1.5), ("std", [1, 0, 1]), ("sise", 224)],
)
def test_settings_are_bounded(key: str, value: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({key: value}, ImageClassificationConfig)


def test_options() -> None:
    assert pipeline().parse_options({}).top_k == 5
    assert pipeline().parse_options({"top_k": 1}).top_k == 1


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"top_k": 0}, r"options\.top_k is 0"),
        ({"top_k": 11}, r"at most 10 \(preprocessing\.max_top_k\)"),
        ({"top_k": 2**31}, r"options\.top_k"),
        ({"top_k": -(2**63)}, r"options\.top_k"),
        ({"top_k": 1.5}, r"options\.top_k"),
        ({"topk": 1}, r"options\.topk is not an option"),
    ],
)
def test_wrong_options_are_named(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidOption, match=sentence):
        pipeline().parse_options(given)


def test_preprocess_writes_into_the_slot() -> None:
    slot = np.zeros((1, 32, 32, 3), np.uint8)
    subject = pipeline()
    item = RawInput(kind="image", data=encode(photo(100, 80), "PNG"))
    prepared = subject.preprocess(item, subject.parse_options({}), [slot])
    assert prepared.tensors[0] is slot
    assert prepared.context == {}
    assert slot.std() > 10


def test_transparent_pixels_show_the_configured_background() -> None:
    slot = np.zeros((1, 32, 32, 3), np.uint8)
    subject = pipeline(background=(10, 20, 30))
    clear = photo(40, 40).convert("RGBA")
    clear.putalpha(0)
    subject.preprocess(RawInput(kind="image", data=encode(clear, "PNG")), subject.parse_options({}), [slot])
    assert (slot == (10, 20, 30)).all()


def test_a_broken_image_is_the_callers_fault() -> None:
    subject = pipeline()
    with pytest.raises(InvalidInput):
        subject.preprocess(RawInput(kind="image", data=b"no"), subject.parse_options({}), [np.empty((1, 32, 32, 3))])


@pytest.mark.parametrize("size", [1, 32, 224])
def test_the_example_is_valid(size: int) -> None:
    subject = pipeline(size=size)
    slot = np.zeros((1, size, size, 3), np.uint8)
    subject.preprocess(subject.example(), subject.parse_options({}), [slot])
    assert slot[0, :, :, 2].min() == slot[0, :, :, 2].max() == 128
    if size > 1:
        assert int(slot[0, 0, -1, 0]) - slot[0, 0, 0, 0] > 150  # red grows to the right
        assert int(slot[0, -1, 0, 1]) - slot[0, 0, 0, 1] > 150  # green grows downwards


def test_postprocess_names_the_classes() -> None:
    subject = pipeline()
    outputs = [np.array([[0.75, 0.25], [0.5, 0.5]], np.float32), np.array([[3, 0], [1, 2]], np.int32)]
    both = subject.postprocess(outputs, {}, subject.parse_options({}))
    assert [
        [(label.index, label.name, label.score) for label in result.labels]
        for result in both
        if isinstance(result, Classification)
    ] == [
        [(3, "fox", 0.75), (0, "cat", 0.25)],
        [(1, "dog", 0.5), (2, "emu", 0.5)],
    ]
    first = subject.postprocess(outputs, {}, subject.parse_options({"top_k": 1}))[0]
    assert isinstance(first, Classification)
    assert len(first.labels) == 1


def test_classes_without_names_have_empty_ones() -> None:
    subject = pipeline((), classes=9)
    outputs = [np.array([[1.0]], np.float32), np.array([[8]], np.int32)]
    result = subject.postprocess(outputs, {}, subject.parse_options({}))[0]
    assert isinstance(result, Classification)
    assert (result.labels[0].index, result.labels[0].name) == (8, "")


def test_normalise_is_what_the_settings_say() -> None:
    torch = pytest.importorskip("torch")
    subject = pipeline(mean=(127, 100, 50), std=(128, 64, 3))
    image = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)
    for _ in range(2):  # the second time with kept constants
        (network_input,) = subject.normalise({"image": image})
    expected = (image.double() - torch.tensor([127, 100, 50])) / torch.tensor([128, 64, 3])
    assert network_input.dtype == torch.float32
    assert torch.allclose(network_input.double(), expected.permute(0, 3, 1, 2), atol=1e-5)
    assert network_input.is_contiguous(memory_format=torch.channels_last)


def test_head_gives_the_best_classes_first() -> None:
    torch = pytest.importorskip("torch")
    subject = pipeline(max_top_k=2)
    scores, classes = subject.head((torch.tensor([[0.0, 5.0, 1.0, 4.0]], dtype=torch.float16),))
    assert classes.tolist() == [[1, 3]]
    assert classes.dtype == torch.int32
    assert scores.dtype == torch.float32
    assert scores[0].tolist() == pytest.approx([0.7178, 0.2641], abs=1e-3)


def test_a_network_of_other_size_than_the_labels_is_named() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"gives \[5\] numbers a row, labels say 4"):
        pipeline().head((torch.zeros(1, 5),))


def test_loading_needs_neither_torch_nor_opencv() -> None:
    script = "import sys, shared.pipelines.image_classification; print({'torch', 'cv2'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"


def test_crop_is_centred() -> None:
    subject = pipeline(crop_fraction=1)
    slot = np.zeros((1, 32, 32, 3), np.uint8)
    image = photo(96, 32)
    subject.preprocess(RawInput(kind="image", data=encode(image, "PNG")), subject.parse_options({}), [slot])
    assert difference(slot[0], np.asarray(image)[:, 32:64]) == 0
