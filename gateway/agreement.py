"""Whether two versions answer the same question alike: what a shadow is judged by. Pure."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from shared.errors import HeadraceError
from shared.results import Classification, Detection, Detections, Embedding, Entities, Label, Result, Tensors, Text
from shared.tensors import Array, Tensor, as_array

TIE = 1e-3
"""Scores so close are equal: another backend or batch size adds up in another order."""
SURE = 0.5
"""Boxes and entities with this score or more must be found by both; what either doubts may be missing from the
other."""
OVERLAP = 0.5
"""Of two boxes of the same thing: intersection over union, as detectors are usually judged."""
COSINE = 0.99
"""Of two embeddings of the same input: about 8 degrees apart."""
RELATIVE = 1e-2
"""Of raw numbers: what half precision and another order of adding up make of the same weights."""

_AT_A_TIME = 1 << 16
"""Numbers that are held as float64 at once, half a megabyte: raw tensors may have many millions."""
_MOST_BOXES = 100
"""Looked at, the best first: pairs grow with the square, and this runs on the event loop."""

Answer = Sequence[Result | HeadraceError]


def agree(left: Answer, right: Answer) -> bool:
    """Whether two answers to the same request are alike, input by input.

    - classification: the same best class, or two that are equally good (`TIE`) in either
    - detections: each box of which one is `SURE` has a box of that class in the other, overlapping by `OVERLAP`
    - entities: each of which one is `SURE` is in the other, of the same kind, with the same borders
    - embedding: as long, and a cosine of at least `COSINE`
    - tensors: the same names, datatypes and shapes; integers, booleans and bytes equal, other numbers within
      `RELATIVE` of the largest one
    - text: equal but for white space
    - failures: the same code
    """
    return len(left) == len(right) and all(_alike(*pair) for pair in zip(left, right, strict=True))


def _alike(left: Result | HeadraceError, right: Result | HeadraceError) -> bool:
    if isinstance(left, HeadraceError) or isinstance(right, HeadraceError):
        return isinstance(left, HeadraceError) and isinstance(right, HeadraceError) and left.code is right.code
    return _alike_results(left, right)


def _alike_results(left: Result, right: Result) -> bool:
    match left, right:
        case Classification(), Classification():
            return _same_class(left.labels, right.labels)
        case Detections(), Detections():
            return _covers(left.boxes, right.boxes) and _covers(right.boxes, left.boxes)
        case Entities(), Entities():
            return _has_all(left, right) and _has_all(right, left)
        case Embedding(), Embedding():
            return _same_direction(left.values, right.values)
        case Tensors(), Tensors():
            return _same_tensors(left.tensors, right.tensors)
    return isinstance(left, Text) and isinstance(right, Text) and left.text.split() == right.text.split()


def _same_class(left: list[Label], right: list[Label]) -> bool:
    if not left or not right:
        return not left and not right
    return _is_best(left[0], right) or _is_best(right[0], left)


def _is_best(wanted: Label, labels: list[Label]) -> bool:
    """Whether this class is the best of them, or as good as the best. By name where there are names: they may move."""
    return any(_same(wanted, label) and label.score >= labels[0].score - TIE for label in labels)


def _same(one: Label, other: Label) -> bool:
    return one.name == other.name if one.name or other.name else one.index == other.index


def _covers(boxes: list[Detection], others: list[Detection]) -> bool:
    sure = [box for box in boxes[:_MOST_BOXES] if box.label.score >= SURE]
    return all(any(_same_thing(box, other) for other in others[:_MOST_BOXES]) for box in sure)


def _has_all(found: Entities, other: Entities) -> bool:
    there = {(one.label.name, one.start, one.end) for one in other.entities}
    sure = (one for one in found.entities if one.label.score >= SURE)
    return all((one.label.name, one.start, one.end) in there for one in sure)


def _same_thing(one: Detection, other: Detection) -> bool:
    if not _same(one.label, other.label):
        return False
    width = min(one.right, other.right) - max(one.left, other.left)
    height = min(one.bottom, other.bottom) - max(one.top, other.top)
    shared = max(width, 0.0) * max(height, 0.0)
    return shared >= OVERLAP * (_area(one) + _area(other) - shared) if shared else _place(one) == _place(other)


def _area(box: Detection) -> float:
    return max(box.right - box.left, 0.0) * max(box.bottom - box.top, 0.0)


def _place(box: Detection) -> tuple[float, ...]:
    return box.left, box.top, box.right, box.bottom


def _same_direction(left: list[float], right: list[float]) -> bool:
    if len(left) != len(right):
        return False
    one, other = np.asarray(left), np.asarray(right)
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return _close(one, other)
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) >= COSINE * lengths if lengths else not (one.any() or other.any())


def _same_tensors(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(_same_numbers(*pair) for pair in zip(left, right, strict=True))


def _same_numbers(left: Tensor, right: Tensor) -> bool:
    if (left.name, left.datatype, tuple(left.shape)) != (right.name, right.datatype, tuple(right.shape)):
        return False
    if left.data == right.data:
        return True
    one, other = _numbers(left), _numbers(right)
    return one is not None and other is not None and _close(one, other)


def _numbers(tensor: Tensor) -> Array | None:
    """As floats; None for what is not a number with a fraction, and for one whose bytes lie somewhere else."""
    if not isinstance(tensor.data, bytes) or tensor.datatype not in {"FP16", "FP32", "FP64", "BF16"}:
        return None
    array = as_array(tensor, None)
    if tensor.datatype == "BF16":  # the upper half of an FP32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def _close(one: Array, other: Array) -> bool:
    """Infinite and NaN at the same places, all others within `RELATIVE` of the first one's largest."""
    left, right = one.reshape(-1), other.reshape(-1)
    largest = max((_largest(part) for part in _parts(left)), default=0.0)
    return all(_within(*pair, RELATIVE * largest) for pair in zip(_parts(left), _parts(right), strict=True))


def _parts(numbers: Array) -> Iterator[npt.NDArray[np.float64]]:
    for start in range(0, numbers.size, _AT_A_TIME):
        yield numbers[start : start + _AT_A_TIME].astype(np.float64)


def _largest(numbers: npt.NDArray[np.float64]) -> float:
    return float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0))


def _within(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64], tolerance: float) -> bool:
    finite = np.isfinite(left)
    if not np.array_equal(left[~finite], right[~finite], equal_nan=True):
        return False
    return bool((np.abs(left[finite] - right[finite]) <= tolerance).all())
