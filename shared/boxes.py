"""Of boxes that show the same thing, keep the best. Used by pool processes only: it imports OpenCV."""

import cv2
import numpy as np
import numpy.typing as npt

from shared.letterbox import Boxes


def suppressed(
    boxes: Boxes, scores: npt.NDArray[np.float32], classes: npt.NDArray[np.int32], iou_threshold: float
) -> npt.NDArray[np.int64]:
    """Indices of the boxes that stay, best first: of two of one class that overlap by more than `iou_threshold`
    (intersection over union) the better one. Boxes have an area; equal scores keep their order.
    """  # noqa: D205 - the first sentence is as long as the rule
    if not len(boxes):
        return np.empty(0, np.int64)
    # OpenCV moves each class to a place of its own, reckoned from the largest coordinate: with one below zero, boxes
    # of two classes could meet there.
    moved = boxes - boxes.min()
    moved[:, 2:] -= moved[:, :2]
    # Which boxes count at all has been decided: no score is below -1.
    kept = cv2.dnn.NMSBoxesBatched(moved, scores, classes, -1.0, iou_threshold)  # type: ignore[arg-type]  # arrays are as good as lists
    return np.asarray(kept, np.int64).reshape(-1)
