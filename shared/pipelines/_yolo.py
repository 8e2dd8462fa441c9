"""What YOLO-like networks mean by their numbers: configured in model.yaml (`preprocessing.head`), not coded.

Everything here runs on the device, in float32, for a whole batch. Coordinates are worked out for the best
boxes of each image only, and no other box leaves the worker.
"""

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from shared.errors import ExitCode, StartupError
from shared.pipeline import Config
from shared.pipelines._pixels import Positive

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LARGEST_EXPONENT = 10.0
"""Of a side, in anchors: 22 000 times an anchor. A network's wild guess must not become infinite."""

Anchor: TypeAlias = tuple[Positive, Positive]


class YoloAnchors(Config, frozen=True, tag_field="scheme", tag="yolo_anchors"):
    """Raw maps with anchors, as of YOLOv2, v3, v4, v5 and v7: one `[n, anchors · (5 + classes), h, w]` per stride.

    Each anchor's numbers are x, y, width, height, objectness and the classes.
    """

    strides: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=1024)], ...], msgspec.Meta(min_length=1)]
    """Pixels per cell of each map, in the order of the network's outputs; they divide `size`."""
    anchors: tuple[Annotated[tuple[Anchor, ...], msgspec.Meta(min_length=1, max_length=32)], ...]
    """Of each map: width and height of each anchor, in pixels of the network's input."""
    xy_scale: Annotated[float, msgspec.Meta(ge=1, le=2)] = 1.0
    """How far a box's centre may leave its cell: 1 not at all (YOLOv3), 1.05 to 1.2 (v4), 2 half a cell (v5, v7)."""
    wh: Literal["exp", "squared"] = "exp"
    """A side is its anchor times `e^x` (v2 to v4), or times `(2 · sigmoid x)²` (v5, v7)."""


class YoloRows(Config, frozen=True, tag_field="scheme", tag="yolo_rows"):
    """Boxes that the network has worked out itself, as exporters write them: one tensor, the first of its outputs.

    As it is: YOLOv8 and later, `[n, 4 + classes, boxes]`. With `objectness` and `boxes_first`: v5, v7.
    """

    objectness: bool = False
    """Between the box and the classes is one more number, by which the classes' scores are multiplied."""
    boxes_first: bool = False
    """The tensor is `[n, boxes, 4 + classes]`."""
    corners: bool = False
    """A box is left, top, right, bottom; else centre x, centre y, width, height."""
    fractions: bool = False
    """Coordinates are 0..1 of the network's input; else pixels of it."""
    sigmoid: bool = False
    """Scores are logits yet; else 0..1."""


HeadConfig: TypeAlias = YoloAnchors | YoloRows


class Found(NamedTuple):
    """Of each image the best boxes, best first; those that are none have the score 0."""

    boxes: "Tensor"
    """float32 [n, keep, 4]: left, top, right, bottom in pixels of the network's input."""
    scores: "Tensor"
    """float32 [n, keep]."""
    classes: "Tensor"
    """int32 [n, keep]."""


class Raw(NamedTuple):
    """Of all boxes of all images, in one order."""

    scores: "Tensor"
    """float32 [n, boxes]: of the likeliest class."""
    classes: "Tensor"
    """int64 [n, boxes]."""
    numbers: "Tensor"
    """[n, boxes, 4]: of the box, as the network gives them."""


class Head(Protocol):
    """How one scheme is read. The constructors run in every process, the rest in the worker."""

    def raw(self, outputs: "tuple[Tensor, ...]") -> Raw:
        """Raises ValueError when the network's outputs are not what the settings say."""

    def boxes(self, numbers: "Tensor", places: "Tensor") -> "Tensor":
        """Some boxes' numbers, float32 [n, k, 4], and their places in the order of `raw`, [n, k] → corners."""


def head(config: HeadConfig, size: int, classes: int) -> Head:
    """Raises StartupError(BAD_SETTINGS) for anchors and strides that contradict each other."""
    return Rows(config, size, classes) if isinstance(config, YoloRows) else Maps(config, size, classes)


def best(reader: Head, outputs: "tuple[Tensor, ...]", keep: int, min_score: float) -> Found:
    """The best `keep` boxes of each image with at least `min_score`. Raises ValueError as `Head.raw`."""
    raw = reader.raw(outputs)
    # A box has one class, its likeliest: what is filtered and sorted is one number per box.
    scores = raw.scores.where(raw.scores >= min_score, raw.scores.new_zeros(()))
    top = scores.topk(min(keep, scores.shape[1]), dim=1)
    numbers = raw.numbers.gather(1, top.indices[..., None].expand(-1, -1, 4)).float()
    nothing = top.values == 0
    boxes = reader.boxes(numbers, top.indices).masked_fill(nothing[..., None], 0.0)
    classes = raw.classes.gather(1, top.indices).masked_fill(nothing, 0).int()
    return Found(_padded(boxes, keep), _padded(top.values, keep), _padded(classes, keep))


class Rows:
    """See `YoloRows`."""

    def __init__(self, config: YoloRows, size: int, classes: int) -> None:
        self._config = config
        self._size = size
        self._first = 5 if config.objectness else 4
        self._numbers = self._first + classes

    def raw(self, outputs: "tuple[Tensor, ...]") -> Raw:
        """See Head."""
        config, output = self._config, outputs[0]
        if output.ndim != 3 or output.shape[2 if config.boxes_first else 1] != self._numbers:
            order = f"[boxes, {self._numbers}]" if config.boxes_first else f"[{self._numbers}, boxes]"
            raise ValueError(f"the network gives {list(output.shape[1:])} per image, the settings say {order}")
        rows = output if config.boxes_first else output.transpose(1, 2)
        likeliest = rows[:, :, self._first :].float().max(dim=2)
        scores = likeliest.values.sigmoid() if config.sigmoid else likeliest.values
        if config.objectness:
            objectness = rows[:, :, 4].float()
            scores = scores * (objectness.sigmoid() if config.sigmoid else objectness)
        return Raw(scores, likeliest.indices, rows[:, :, :4])

    def boxes(self, numbers: "Tensor", places: "Tensor") -> "Tensor":  # noqa: ARG002 - the protocol's signature
        """See Head."""
        if self._config.fractions:
            numbers = numbers * self._size
        return numbers if self._config.corners else _corners(numbers)


class Maps:
    """See `YoloAnchors`."""

    def __init__(self, config: YoloAnchors, size: int, classes: int) -> None:
        """Raises StartupError(BAD_SETTINGS)."""
        _check(config, size)
        self._config = config
        self._size = size
        self._classes = classes
        self._cells: dict[torch.device, Tensor] = {}

    def raw(self, outputs: "tuple[Tensor, ...]") -> Raw:
        """See Head."""
        import torch  # noqa: PLC0415 - the worker only

        config = self._config
        if len(outputs) != len(config.strides):
            raise ValueError(f"the network gives {len(outputs)} maps, the settings have {len(config.strides)} strides")
        parts = [self._raw(*each) for each in zip(outputs, config.strides, config.anchors, strict=True)]
        return Raw(*(torch.cat(part, 1) for part in zip(*parts, strict=True)))

    def boxes(self, numbers: "Tensor", places: "Tensor") -> "Tensor":
        """See Head."""
        import torch  # noqa: PLC0415 - the worker only

        scale = self._config.xy_scale
        cells = self._cells_on(numbers.device)[places]
        cell, stride, anchor = cells[..., :2], cells[..., 2:3], cells[..., 3:]
        centre = numbers[..., :2].sigmoid() * scale - (scale - 1) / 2 + cell
        sides = numbers[..., 2:]
        exponential = self._config.wh == "exp"
        factor = sides.clamp(max=_LARGEST_EXPONENT).exp() if exponential else (sides.sigmoid() * 2).square()
        return _corners(torch.cat((centre * stride, factor * anchor), -1))

    def _raw(self, output: "Tensor", stride: int, anchors: tuple[Anchor, ...]) -> Raw:
        cells = self._size // stride
        wanted = [len(anchors) * (5 + self._classes), cells, cells]
        if list(output.shape[1:]) != wanted:
            raise ValueError(f"the network gives a map of {list(output.shape[1:])}, the settings say {wanted}")
        numbers = output.float().reshape(len(output), len(anchors), 5 + self._classes, -1)
        likeliest = numbers[:, :, 5:].max(dim=2)
        scores = likeliest.values.sigmoid() * numbers[:, :, 4].sigmoid()
        box = numbers[:, :, :4].transpose(2, 3)
        return Raw(scores.flatten(1), likeliest.indices.flatten(1), box.flatten(1, 2))

    def _cells_on(self, device: "torch.device") -> "Tensor":
        """[boxes, 5]: cell x and y, stride, width and height of the anchor, in the order of the maps' boxes.

        Kept per device: making them anew would wait for the device each time.
        """
        import torch  # noqa: PLC0415 - the worker only

        found = self._cells.get(device)
        if found is None:
            rows = [
                (x, y, stride, *anchor)
                for stride, anchors in zip(self._config.strides, self._config.anchors, strict=True)
                for anchor in anchors
                for y in range(self._size // stride)
                for x in range(self._size // stride)
            ]
            found = self._cells[device] = torch.tensor(rows, dtype=torch.float32, device=device)
        return found


def _corners(boxes: "Tensor") -> "Tensor":
    """Centre and sides → corners."""
    import torch  # noqa: PLC0415 - the worker only

    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat((centre - half, centre + half), -1)


def _padded(tensor: "Tensor", keep: int) -> "Tensor":
    """Zeros behind the boxes of a network that has fewer than `keep`."""
    missing = keep - tensor.shape[1]
    if not missing:
        return tensor
    padded = tensor.new_zeros((tensor.shape[0], keep, *tensor.shape[2:]))
    padded[:, : tensor.shape[1]] = tensor
    return padded


def _check(config: YoloAnchors, size: int) -> None:
    if len(config.anchors) != len(config.strides):
        text = f"preprocessing.head.anchors has {len(config.anchors)} lists, strides has {len(config.strides)}"
        raise StartupError(ExitCode.BAD_SETTINGS, f"{text}: each map needs one of both")
    for stride in config.strides:
        if size % stride:
            text = f"preprocessing.size is {size}, which {stride} (preprocessing.head.strides) does not divide"
            raise StartupError(ExitCode.BAD_SETTINGS, text)
