"""Image classification: one encoded image in, the likeliest classes out.

The pool decodes, resizes and crops to `uint8 [1, size, size, 3]` RGB, straight into the slot; the worker normalises
on the device, and its head reduces the logits to the best k classes, so that only k numbers a row travel back.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec

from shared.image_example import gradient_png
from shared.pipeline import Config, Options, Pipeline, PipelineSpec, Prepared, RawInput
from shared.pipelines._labels import best_of, best_specs, check_top_k, class_scores, count_classes, named
from shared.pipelines._pixels import Colours, PixelScale, Positive
from shared.results import Classification, Result
from shared.tensors import Array, TensorSpec

if TYPE_CHECKING:
    import torch

    from shared.image_geometry import Pixels


class ImageClassificationConfig(Config, frozen=True):
    """The `preprocessing:` block of a classifier's model.yaml."""

    size: Annotated[int, msgspec.Meta(ge=1, le=2048)] = 224
    """Height and width of the network's input, in pixels."""
    crop_fraction: Annotated[float, msgspec.Meta(ge=0.5, le=1)] = 0.875
    """The shorter side is resized to size / crop_fraction, and the centre of size × size is kept."""
    mean: tuple[float, float, float] = (123.675, 116.28, 103.53)
    """Subtracted from red, green, blue; in units of 0..255."""
    std: tuple[Positive, Positive, Positive] = (58.395, 57.12, 57.375)
    """Divides what is left; in units of 0..255."""
    background: Colours = (255, 255, 255)
    """Red, green, blue behind transparent pixels."""
    max_top_k: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 10
    """Classes that leave the worker per row: the most that a request can ask for."""
    classes: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """Number of classes; needed only when the model has no labels file."""


class ImageClassificationOptions(Options, frozen=True):
    """What a request may say."""

    top_k: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 5
    """Classes to return, best first; a model with fewer classes returns all of them."""


class ImageClassification(Pipeline[ImageClassificationOptions]):
    """Decode → short side to size / crop_fraction → centre crop | normalise → network → softmax, top-k | labels."""

    options_type = ImageClassificationOptions
    config_type = ImageClassificationConfig
    postprocess_is_trivial = True
    config: ImageClassificationConfig

    def __init__(self, config: Config, folder: Path, labels: tuple[str, ...]) -> None:
        """Raises StartupError(MODEL_LOAD) when the number of classes is unknown or contradictory."""
        super().__init__(config, folder, labels)
        self.classes = count_classes(self.config.classes, labels)
        self._spec = _make_spec(self.config, self.classes)
        self._scale = PixelScale(self.config.mean, self.config.std, self.config.size)

    @property
    def spec(self) -> PipelineSpec:
        """`image` UINT8 [size, size, 3] → `scores` FP32 [k] and `classes` INT32 [k], best first."""
        return self._spec

    def parse_options(self, given: dict[str, Any]) -> ImageClassificationOptions:
        """Refuses more classes than leave the worker. Raises InvalidOption."""
        options = super().parse_options(given)
        check_top_k(given, options.top_k, self.config.max_top_k)
        return options

    def preprocess(self, item: RawInput, options: ImageClassificationOptions, out: list[Array]) -> Prepared:  # noqa: ARG002 - the hook's signature
        """Fill `out[0]`, uint8 [1, size, size, 3] in the arena, with the upright RGB crop. Raises InvalidInput."""
        from shared import images  # noqa: PLC0415 - OpenCV: the gateway and the worker load this file without it

        images.fill_crop(item.data, cast("Pixels", out[0][0]), self.config.crop_fraction, self.config.background)
        return Prepared(tensors=[out[0]])

    def normalise(self, inputs: "dict[str, torch.Tensor]") -> "tuple[torch.Tensor, ...]":
        """uint8 [n, size, size, 3] → float32 [n, 3, size, size] in channels_last order, on the same device."""
        return (self._scale(inputs["image"]),)

    def head(self, outputs: "tuple[torch.Tensor, ...]") -> "tuple[torch.Tensor, ...]":
        """Logits [n, classes] → float32 probabilities [n, k] and int32 class numbers [n, k], best first."""
        return best_of(class_scores(outputs, self.classes).softmax(1), self._spec.outputs[0].shape[0])

    def postprocess(
        self,
        outputs: list[Array],
        context: dict[str, Any],  # noqa: ARG002 - the hook's signature
        options: ImageClassificationOptions,
    ) -> list[Result]:
        """One Classification per row, the first `top_k` classes."""
        scores = outputs[0][:, : options.top_k].tolist()
        classes = outputs[1][:, : options.top_k].tolist()
        return [Classification(named(self.labels, *row)) for row in zip(classes, scores, strict=True)]

    def example(self) -> RawInput:
        """A colour gradient, a little larger than the network's input, as PNG."""
        return RawInput(kind="image", data=gradient_png(round(self.config.size / self.config.crop_fraction)))


def _make_spec(config: ImageClassificationConfig, classes: int) -> PipelineSpec:
    return PipelineSpec(
        kind="image",
        inputs=(TensorSpec(name="image", datatype="UINT8", shape=(config.size, config.size, 3)),),
        outputs=best_specs(classes, config.max_top_k),
    )
