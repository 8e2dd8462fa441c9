"""Boxes as tensors: one image, many images, none found."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.open_inference import metadata, outputs
from gateway.api.open_inference.model import InferOutput, InferRequestedOutput
from gateway.api.open_inference.models import view_of
from gateway.request import Answer
from shared.errors import InvalidInput
from shared.results import Detection, Detections, Label
from shared.tensors import DTYPES, unpack_bytes
from tests.support.open_inference_parts import detector

number = st.floats(0, 1000, width=32)
box = st.builds(Detection, st.builds(Label, st.integers(0, 1), st.just("née"), number), number, number, number, number)
images = st.lists(
    st.builds(Detections, st.lists(box, max_size=5), st.integers(1, 9000), st.integers(1, 9000)), min_size=1, max_size=4
)


def selected(results: list[Detections], *asked: str) -> dict[str, InferOutput]:
    found = outputs.selected(
        detector(), Answer("m", "v", list(results)), [InferRequestedOutput(name, {}) for name in asked]
    )
    return {one.name: one for one in found}


@given(images)
def test_every_image_has_its_boxes_and_behind_them_places_that_say_so(results: list[Detections]) -> None:
    found = selected(results)
    places = max(len(one.boxes) for one in results)
    arrays = {
        name: np.frombuffer(one.data, DTYPES[one.datatype]).reshape(one.shape)
        for name, one in found.items()
        if name != "labels"
    }
    labels = np.array(unpack_bytes(found["labels"].data, len(results) * places), object).reshape(len(results), places)
    for row, result in enumerate(results):
        count = len(result.boxes)
        for place, one in enumerate(result.boxes):
            assert arrays["boxes"][row, place].tolist() == [one.left, one.top, one.right, one.bottom]
            assert (arrays["scores"][row, place], arrays["classes"][row, place]) == (one.label.score, one.label.index)
            assert labels[row, place] == "née".encode()
        assert not arrays["boxes"][row, count:].any()
        assert not arrays["scores"][row, count:].any()
        assert (arrays["classes"][row, count:] == -1).all()
        assert (labels[row, count:] == b"").all()
        assert arrays["image_size"][row].tolist() == [result.width, result.height]


def test_the_answer_is_what_the_metadata_declares() -> None:
    declared = {one.name: one for one in metadata.model_metadata(detector(), ["v"]).outputs}
    one = Detections([Detection(Label(0, "cat", 0.5), 1, 2, 3, 4)] * 3, 8, 9)
    for name, tensor in selected([one, Detections([], 7, 6)]).items():
        assert tensor.datatype == declared[name].datatype
        fits = [want in (-1, have) for want, have in zip(declared[name].shape, tensor.shape, strict=True)]
        assert all(fits), (name, tensor.shape)
    assert list(declared) == ["boxes", "scores", "classes", "labels", "image_size"]


def test_only_what_is_asked_for() -> None:
    assert list(selected([Detections([], 7, 6)], "scores", "boxes")) == ["scores", "boxes"]
    assert selected([Detections([], 7, 6)], "boxes")["boxes"].shape == (1, 0, 4)


@pytest.mark.parametrize("name", ["scores", "classes"])
def test_boxes_can_not_be_asked_for_as_classes(name: str) -> None:
    model = detector()
    asked = [InferRequestedOutput(name, {"classification": 3})]
    with pytest.raises(InvalidInput, match=f"output '{name}': parameter classification has no meaning for boxes"):
        outputs.check_asked(model, view_of(model), asked)
