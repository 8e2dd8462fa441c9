"""A picture in, the class of each of its pixels out: a pipeline of one's own, with its network, in one file.

The gateway and the pool read this file without torch, so what needs it imports it inside `normalise`, `head` and
`build`, which only a worker calls.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from shared.errors import ExitCode, StartupError
from shared.image_example import gradient_png
from shared.letterbox import Letterbox
from shared.pipeline import Config, Options, Pipeline, PipelineSpec, Prepared, RawInput
from shared.results import Result, Tensors
from shared.tensors import Array, Tensor, TensorSpec

if TYPE_CHECKING:
    import torch

CLASSES = 4
"""Of the network below. One byte a pixel tells up to 256."""
GREY = (128, 128, 128)


class SegmentationConfig(Config, frozen=True):
    """The `preprocessing:` block of model.yaml."""

    size: Annotated[int, msgspec.Meta(ge=8, le=2048)] = 512
    """Height and width of the network's input, in pixels."""


class SegmentationOptions(Options, frozen=True):
    """What a request may say."""

    full_size: bool = True
    """The mask is as large as the picture; else as large as the picture was inside the network's input."""


class Segmentation(Pipeline[SegmentationOptions]):
    """Decode → fit into the square | scale → network → likeliest class of each pixel | cut out, enlarge."""

    config_type = SegmentationConfig
    options_type = SegmentationOptions
    config: SegmentationConfig

    def __init__(self, config: Config, folder: Path, labels: tuple[str, ...]) -> None:
        """Raises StartupError for names that are not the network's."""
        super().__init__(config, folder, labels)
        if len(labels) != CLASSES:
            text = f"the labels file has {len(labels)} lines, the network has {CLASSES} classes"
            raise StartupError(ExitCode.MODEL_LOAD, text)

    @property
    def spec(self) -> PipelineSpec:
        """`image` UINT8 [size, size, 3] → `mask` UINT8; its sides are free, since an answer's are its picture's."""
        image = TensorSpec(name="image", datatype="UINT8", shape=(self.config.size, self.config.size, 3))
        mask = TensorSpec(name="mask", datatype="UINT8", shape=(-1, -1), maximum=CLASSES)
        return PipelineSpec(kind="image", inputs=(image,), outputs=(mask,))

    def preprocess(self, item: RawInput, options: SegmentationOptions, out: list[Array]) -> Prepared:  # noqa: ARG002 - the hook's signature
        """Pool: the upright picture into `out[0]`, [1, size, size, 3] of shared memory. Raises InvalidInput."""
        from shared.images import fill_letterbox  # noqa: PLC0415 - OpenCV, which only the pool needs

        pixels: Any = out[0][0]
        place = fill_letterbox(item.data, pixels, GREY)
        return Prepared(tensors=[out[0]], context=msgspec.structs.asdict(place))

    def normalise(self, inputs: "dict[str, torch.Tensor]") -> "tuple[torch.Tensor, ...]":
        """Worker, the whole batch on the device: [n, size, size, 3] of bytes → [n, 3, size, size] of 0..1."""
        return (inputs["image"].permute(0, 3, 1, 2).float() / 255,)

    def head(self, outputs: "tuple[torch.Tensor, ...]") -> "tuple[torch.Tensor, ...]":
        """Worker: logits [n, classes, size, size] → one byte a pixel, which is all that leaves the device."""
        import torch  # noqa: PLC0415 - the worker only

        return (outputs[0].argmax(1).to(torch.uint8),)

    def postprocess(self, outputs: list[Array], context: dict[str, Any], options: SegmentationOptions) -> list[Result]:
        """Pool: the part of each mask that is the picture, at its size."""
        return [self._mask(row, Letterbox(**context), options) for row in outputs[0]]

    def example(self) -> RawInput:
        """For warm-up and probes."""
        return RawInput(kind="image", data=gradient_png(self.config.size))

    def _mask(self, square: Any, place: Letterbox, options: SegmentationOptions) -> Tensors:  # noqa: ANN401 - an array
        bottom, right = place.top + place.inner_height, place.left + place.inner_width
        mask = np.ascontiguousarray(square[place.top : bottom, place.left : right])
        if options.full_size:
            import cv2  # noqa: PLC0415 - only the pool needs it

            mask = cv2.resize(mask, (place.width, place.height), interpolation=cv2.INTER_NEAREST)
        return Tensors([Tensor("mask", "UINT8", (1, *mask.shape), mask.tobytes())])


def build() -> "torch.nn.Module":
    """The network: here one convolution, which knows each class by its colour."""
    from torch import nn  # noqa: PLC0415 - the worker only

    return nn.Conv2d(3, CLASSES, 1)
