"""Object detection: one encoded image in, boxes with a class and a score out.

The pool fits the upright picture into a square, straight into the slot; the worker normalises it, runs the network and
keeps the best boxes on the device, a fixed number of them; the pool drops those that show the same thing twice, and
tells the rest in pixels of the original picture.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import numpy as np

from shared.errors import ExitCode, InvalidOption, StartupError
from shared.image_example import gradient_png
from shared.letterbox import Letterbox
from shared.pipeline import Config, Options, Pipeline, PipelineSpec, Prepared, RawInput
from shared.pipelines import _yolo
from shared.pipelines._finite import check_finite
from shared.pipelines._labels import count_classes
from shared.pipelines._pixels import Colours, PixelScale, Positive
from shared.results import Detection, Detections, Label, Result
from shared.tensors import Array, TensorSpec

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from shared.image_geometry import Pixels

Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=4096)]
"""Of boxes. To suppress doubles takes time with the square of their number: 0.1 s for this many."""


class ObjectDetectionConfig(Config, frozen=True):
    """The `preprocessing:` block of a detector's model.yaml."""

    head: _yolo.HeadConfig
    """What the network's outputs mean; `scheme` says which kind."""
    size: Annotated[int, msgspec.Meta(ge=1, le=2048)] = 640
    """Height and width of the network's input, in pixels."""
    background: Colours = (128, 128, 128)
    """Red, green, blue beside the picture, and behind transparent pixels."""
    mean: tuple[float, float, float] = (0, 0, 0)
    """Subtracted from red, green, blue; in units of 0..255."""
    std: tuple[Positive, Positive, Positive] = (255, 255, 255)
    """Divides what is left; in units of 0..255."""
    score_threshold: Fraction = 0.25
    """Boxes with a lower score are left out, where the request does not say."""
    iou_threshold: Fraction = 0.45
    """Of two boxes of one class that overlap by more (intersection over union) the better one stays."""
    max_detections: Count = 100
    """The most boxes of an image, and how many a request gets that does not say."""
    max_candidates: Count = 300
    """Boxes that leave the worker per image, before those that show the same thing are dropped."""
    min_score: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.01
    """Boxes with a lower score never leave the worker, whatever a request says."""
    classes: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """Number of classes; needed only when the model has no labels file."""


class ObjectDetectionOptions(Options, frozen=True):
    """What a request may say; None: what the settings say."""

    score_threshold: Fraction | None = None
    iou_threshold: Fraction | None = None
    max_detections: Annotated[int, msgspec.Meta(ge=1)] | None = None
    classes: Annotated[tuple[str, ...], msgspec.Meta(max_length=1000)] = ()
    """Only boxes of these; empty: of all."""


class ObjectDetection(Pipeline[ObjectDetectionOptions]):
    """Decode → fit into the square | normalise → network → best boxes | suppress → pixels of the picture."""

    options_type = ObjectDetectionOptions
    config_type = ObjectDetectionConfig
    config: ObjectDetectionConfig

    def __init__(self, config: Config, folder: Path, labels: tuple[str, ...]) -> None:
        """Raises StartupError: BAD_SETTINGS for contradictory settings, MODEL_LOAD for an unknown number of classes."""
        super().__init__(config, folder, labels)
        check_finite(self.config, "preprocessing")
        if self.config.max_detections > self.config.max_candidates:
            raise StartupError(
                ExitCode.BAD_SETTINGS,
                f"preprocessing.max_detections is {self.config.max_detections}, more than max_candidates "
                f"({self.config.max_candidates})",
            )
        classes = count_classes(self.config.classes, labels)
        self._spec = _make_spec(self.config, classes)
        self._head = _yolo.head(self.config.head, self.config.size, classes)
        self._scale = PixelScale(self.config.mean, self.config.std, self.config.size)

    @property
    def spec(self) -> PipelineSpec:
        """`image` UINT8 [size, size, 3] → `boxes` FP32 [k, 4], `scores` FP32 [k] and `classes` INT32 [k]."""
        return self._spec

    def parse_options(self, given: dict[str, Any]) -> ObjectDetectionOptions:
        """Raises InvalidOption, also for a class that the model does not have."""
        options = super().parse_options(given)
        most = self.config.max_detections
        if options.max_detections is not None and options.max_detections > most:
            raise InvalidOption(
                f"options.max_detections is {options.max_detections}: this model gives at most {most} "
                "(preprocessing.max_detections)"
            )
        for name in options.classes:
            if name not in self.labels:
                have = f"one of this model's {len(self.labels)} classes" if self.labels else "known: it has no names"
                raise InvalidOption(f"options.classes has {name[:100]!r}, which is not {have}")
        return options

    def preprocess(self, item: RawInput, options: ObjectDetectionOptions, out: list[Array]) -> Prepared:  # noqa: ARG002 - the hook's signature
        """Fill `out[0]`, uint8 [1, size, size, 3] in the arena, with the whole upright picture. Raises InvalidInput."""
        from shared import images  # noqa: PLC0415 - OpenCV: the gateway and the worker load this file without it

        place = images.fill_letterbox(item.data, cast("Pixels", out[0][0]), self.config.background)
        return Prepared(tensors=[out[0]], context=msgspec.structs.asdict(place))

    def normalise(self, inputs: "dict[str, torch.Tensor]") -> "tuple[torch.Tensor, ...]":
        """uint8 [n, size, size, 3] → float32 [n, 3, size, size] in channels_last order, on the same device."""
        return (self._scale(inputs["image"]),)

    def head(self, outputs: "tuple[torch.Tensor, ...]") -> "tuple[torch.Tensor, ...]":
        """The network's outputs → the best boxes of each image, best first; behind them boxes with the score 0."""
        return _yolo.best(self._head, outputs, self.config.max_candidates, self.config.min_score)

    def postprocess(
        self, outputs: list[Array], context: dict[str, Any], options: ObjectDetectionOptions
    ) -> list[Result]:
        """One Detections per row, best box first."""
        place = Letterbox(**context)
        return [self._detections(place, options, *row) for row in zip(*outputs, strict=True)]

    def example(self) -> RawInput:
        """A colour gradient as PNG."""
        return RawInput(kind="image", data=gradient_png(min(self.config.size, 640)))

    def _detections(
        self, place: Letterbox, options: ObjectDetectionOptions, boxes: Array, scores: Array, classes: Array
    ) -> Detections:
        from shared.boxes import suppressed  # noqa: PLC0415 - OpenCV: the gateway and the worker load this file without it

        corners = boxes.astype(np.float64)
        wanted = self._wanted(corners, scores, classes, options)
        corners, scores, classes = corners[wanted], scores[wanted], classes[wanted]
        iou_threshold = _or_else(options.iou_threshold, self.config.iou_threshold)
        kept = suppressed(corners, cast("Any", scores), cast("Any", classes), iou_threshold)
        shown = place.to_picture(corners[kept])
        # What lies beside the picture, in the grey, is nowhere in it.
        inside = ((shown[:, 2:] - shown[:, :2]) > 0).all(1)
        most = options.max_detections or self.config.max_detections
        found = zip(shown[inside].tolist(), scores[kept][inside].tolist(), classes[kept][inside].tolist(), strict=True)
        return Detections([self._detection(*each) for each in list(found)[:most]], place.width, place.height)

    def _wanted(
        self, corners: Array, scores: Array, classes: Array, options: ObjectDetectionOptions
    ) -> "npt.NDArray[np.bool_]":
        threshold = max(_or_else(options.score_threshold, self.config.score_threshold), self.config.min_score)
        # Options may come as 32-bit numbers: a score of exactly the threshold stays.
        wanted: npt.NDArray[np.bool_] = cast("Any", scores) >= np.float32(threshold)
        sides: npt.NDArray[np.float64] = cast("Any", corners[:, 2:]) - cast("Any", corners[:, :2])
        wanted &= (sides > 0).all(1)
        if options.classes:
            wanted &= np.isin(classes, [n for n, name in enumerate(self.labels) if name in options.classes])
        return wanted

    def _detection(self, box: list[float], score: float, number: int) -> Detection:
        name = self.labels[number] if number < len(self.labels) else ""
        return Detection(Label(index=number, name=name, score=score), *box)


def _or_else(given: float | None, configured: float) -> float:
    return configured if given is None else given


def _make_spec(config: ObjectDetectionConfig, classes: int) -> PipelineSpec:
    k = config.max_candidates
    return PipelineSpec(
        kind="image",
        inputs=(TensorSpec(name="image", datatype="UINT8", shape=(config.size, config.size, 3)),),
        outputs=(
            TensorSpec(name="boxes", datatype="FP32", shape=(k, 4)),
            TensorSpec(name="scores", datatype="FP32", shape=(k,)),
            TensorSpec(name="classes", datatype="INT32", shape=(k,), maximum=classes),
        ),
    )
