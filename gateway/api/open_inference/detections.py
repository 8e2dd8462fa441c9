"""Boxes as tensors: those of all images of a request, each image with as many places as the fullest one has boxes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.api.open_inference import datatypes
from shared.pipeline import PipelineSpec
from shared.results import Detection, Detections
from shared.tensors import RawTensor, TensorSpec, pack_bytes

BOXES, SCORES, CLASSES, LABELS, SIZE = "boxes", "scores", "classes", "labels", "image_size"
NO_CLASS = -1
"""In a place without a box, whose score is 0."""

OUTPUTS = (
    TensorSpec(name=BOXES, datatype="FP32", shape=(-1, 4)),
    TensorSpec(name=SCORES, datatype="FP32", shape=(-1,)),
    TensorSpec(name=CLASSES, datatype="INT32", shape=(-1,)),
    TensorSpec(name=LABELS, datatype="BYTES", shape=(-1,)),
    TensorSpec(name=SIZE, datatype="INT32", shape=(2,)),
)
"""Best first; a box is left, top, right, bottom in pixels of the upright image, whose width and height are the size."""


def finds_boxes(spec: PipelineSpec) -> bool:
    """Whether a model's answers are boxes."""
    return {output.name for output in spec.outputs} == {BOXES, SCORES, CLASSES}


def tensors(results: list[Detections]) -> list[RawTensor]:
    """All of `OUTPUTS`."""
    places = max(len(result.boxes) for result in results)
    shape = (len(results), places)
    labels = [name for result in results for name in _names(result, places)]
    sizes = np.array([(result.width, result.height) for result in results], "<i4")
    boxes = _filled(results, np.zeros((*shape, 4), "<f4"), lambda one: (one.left, one.top, one.right, one.bottom))
    scores = _filled(results, np.zeros(shape, "<f4"), lambda one: one.label.score)
    classes = _filled(results, np.full(shape, NO_CLASS, "<i4"), lambda one: one.label.index)
    return [
        RawTensor(BOXES, "FP32", boxes.shape, boxes.tobytes()),
        RawTensor(SCORES, "FP32", shape, scores.tobytes()),
        RawTensor(CLASSES, "INT32", shape, classes.tobytes()),
        RawTensor(LABELS, datatypes.BYTES, shape, pack_bytes(labels)),
        RawTensor(SIZE, "INT32", sizes.shape, sizes.tobytes()),
    ]


def _names(result: Detections, places: int) -> list[bytes]:
    return [each.label.name.encode() for each in result.boxes] + [b""] * (places - len(result.boxes))


def _filled(results: list[Detections], array: npt.NDArray[Any], value: Callable[[Detection], Any]) -> npt.NDArray[Any]:
    for row, result in zip(array, results, strict=True):
        if result.boxes:
            row[: len(result.boxes)] = [value(each) for each in result.boxes]
    return array
