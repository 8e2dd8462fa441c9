"""YOLOv3-tiny, for the worker: Darknet's network with the batch norms folded into the convolutions.

Input: `[rows, 3, height, width]`, RGB divided by 255, sides that are multiples of 32. Output: the raw maps of both
heads, `[rows, anchors · (5 + classes), height / 32, width / 32]` and the same for 16; what they mean (anchors, boxes,
the numbers' squashing) is the pipeline's matter.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 80
ANCHORS = 3
"""Per head."""
SHAPES = (
    (3, 16, 3),
    (16, 32, 3),
    (32, 64, 3),
    (64, 128, 3),
    (128, 256, 3),
    (256, 512, 3),
    (512, 1024, 3),
    (1024, 256, 1),
    (256, 512, 3),
    (512, ANCHORS * (5 + CLASSES), 1),
    (256, 128, 1),
    (384, 256, 3),
    (256, ANCHORS * (5 + CLASSES), 1),
)
"""Channels in, channels out and kernel of each convolution, in the order of Darknet's file."""
LINEAR = (9, 12)
"""The heads: without batch norm and activation."""


class YoloV3Tiny(nn.Module):
    """See the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(cin, cout, k, padding=k // 2) for cin, cout, k in SHAPES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Maps of the coarse head (large objects) and of the fine one."""
        for number in range(4):
            x = functional.max_pool2d(self._step(number, x), 2)
        fine = self._step(4, x)
        x = self._step(5, functional.max_pool2d(fine, 2))
        # Stride 1: Darknet's window looks over the right and lower edge. A repeated edge never changes a maximum.
        x = functional.max_pool2d(functional.pad(x, (0, 1, 0, 1), mode="replicate"), 2, stride=1)
        x = self._step(7, self._step(6, x))
        coarse_map = self.convolutions[9](self._step(8, x))
        wide = functional.interpolate(self._step(10, x), scale_factor=2.0, mode="nearest")
        fine_map = self.convolutions[12](self._step(11, torch.cat((wide, fine), 1)))
        return cast("Tensor", coarse_map), cast("Tensor", fine_map)

    def _step(self, number: int, x: Tensor) -> Tensor:
        return functional.leaky_relu(self.convolutions[number](x), 0.1)


def yolov3_tiny() -> YoloV3Tiny:
    """8.85 M parameters, COCO's 80 classes, trained with sides around 416 pixels."""
    return YoloV3Tiny()
