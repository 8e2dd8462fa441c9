"""EfficientNet-Lite 0 to 4, for the worker: an own definition whose parameter names are those of the published weights.

Input: float32 or float16 `[rows, 3, height, width]`, channels_last preferred, values (x - 127) / 128. Output: logits
`[rows, classes]`. No squeeze-and-excitation, ReLU6 everywhere, batch norm with eps 1e-3; padding is TensorFlow's
"same", computed from the input's size, so that every image size gives the numbers of the original.
"""

import math
from typing import NamedTuple, cast

import torch.fx
from torch import Tensor, nn
from torch.nn import functional

from workers.padding import pad_same

EPS = 1e-3
STEM_CHANNELS = 32
HEAD_CHANNELS = 1280


class Stage(NamedTuple):
    """A run of equal blocks before scaling. `expand` multiplies the channels inside a block."""

    repeats: int
    kernel: int
    stride: int
    expand: int
    channels_in: int
    channels_out: int


class Scale(NamedTuple):
    """How a variant grows the stages. `size` is the image side it was trained with."""

    width: float
    depth: float
    size: int
    dropout: float


STAGES = (
    Stage(1, 3, 1, 1, 32, 16),
    Stage(2, 3, 2, 6, 16, 24),
    Stage(2, 5, 2, 6, 24, 40),
    Stage(3, 3, 2, 6, 40, 80),
    Stage(3, 5, 1, 6, 80, 112),
    Stage(4, 5, 2, 6, 112, 192),
    Stage(1, 3, 1, 6, 192, 320),
)

SCALES = {
    "lite0": Scale(1.0, 1.0, 224, 0.2),
    "lite1": Scale(1.0, 1.1, 240, 0.2),
    "lite2": Scale(1.1, 1.2, 260, 0.3),
    "lite3": Scale(1.2, 1.4, 280, 0.3),
    "lite4": Scale(1.4, 1.8, 300, 0.3),
}


def scaled_channels(channels: int, width: float) -> int:
    """Channels times `width`, rounded to a multiple of 8 and never more than a tenth below."""
    if width == 1.0:
        return channels
    wanted = channels * width
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * wanted else rounded


torch.fx.wrap("pad_same")  # its arithmetic depends on the image's size: a graph keeps it as one step


def _convolution(channels_in: int, channels_out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Without bias; with stride 1 "same" is symmetric and the convolution pads by itself."""
    padding = kernel // 2 if stride == 1 else 0
    return nn.Conv2d(channels_in, channels_out, kernel, stride, padding, groups=groups, bias=False)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=EPS, momentum=0.01)


class Block(nn.Module):
    """Expand (1×1), filter each channel (k×k), project (1×1); added to its input where shapes allow."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        inner = channels_in * expand
        self.expands = expand != 1
        self.adds = stride == 1 and channels_in == channels_out
        self.kernel, self.stride = kernel, stride
        if self.expands:
            self._expand_conv = _convolution(channels_in, inner, 1)
            self._bn0 = _norm(inner)
        self._depthwise_conv = _convolution(inner, inner, kernel, stride, groups=inner)
        self._bn1 = _norm(inner)
        self._project_conv = _convolution(inner, channels_out, 1)
        self._bn2 = _norm(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, channels_in, h, w]` → `[rows, channels_out, ceil(h / stride), ceil(w / stride)]`."""
        inner = functional.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        if self.stride > 1:
            inner = pad_same(inner, self.kernel, self.stride)
        inner = functional.relu6(self._bn1(self._depthwise_conv(inner)))
        inner = self._bn2(self._project_conv(inner))
        return inner + x if self.adds else cast("Tensor", inner)


def _blocks(scale: Scale) -> list[Block]:
    """All blocks in order. The first and last stage are not repeated more often by a deeper variant."""
    blocks = []
    for number, stage in enumerate(STAGES):
        at_the_edge = number in (0, len(STAGES) - 1)
        repeats = stage.repeats if at_the_edge else math.ceil(stage.repeats * scale.depth)
        # The stem's width is fixed in the Lite family, so the first block's input is too.
        channels_in = STEM_CHANNELS if number == 0 else scaled_channels(stage.channels_in, scale.width)
        channels_out = scaled_channels(stage.channels_out, scale.width)
        for repeat in range(repeats):
            first = repeat == 0
            blocks.append(
                Block(
                    channels_in if first else channels_out,
                    channels_out,
                    stage.kernel,
                    stage.stride if first else 1,
                    stage.expand,
                )
            )
    return blocks


class EfficientNetLite(nn.Module):
    """The whole network; see the module's docstring for shapes."""

    def __init__(self, scale: Scale, classes: int = 1000) -> None:
        super().__init__()
        last = scaled_channels(STAGES[-1].channels_out, scale.width)
        self._conv_stem = _convolution(3, STEM_CHANNELS, 3, stride=2)
        self._bn0 = _norm(STEM_CHANNELS)
        self._blocks = nn.ModuleList(_blocks(scale))
        self._conv_head = _convolution(last, HEAD_CHANNELS, 1)
        self._bn1 = _norm(HEAD_CHANNELS)
        self._dropout = nn.Dropout(scale.dropout)
        self._fc = nn.Linear(HEAD_CHANNELS, classes)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, 3, height, width]` → logits `[rows, classes]`."""
        x = functional.relu6(self._bn0(self._conv_stem(pad_same(x, 3, 2))))
        for block in self._blocks:
            x = block(x)
        x = functional.relu6(self._bn1(self._conv_head(x)))
        x = functional.adaptive_avg_pool2d(x, 1).flatten(1)
        return cast("Tensor", self._fc(self._dropout(x)))


def efficientnet_lite0() -> EfficientNetLite:
    """4.65 M parameters, trained with 224 × 224 pixels."""
    return EfficientNetLite(SCALES["lite0"])


def efficientnet_lite1() -> EfficientNetLite:
    """5.42 M parameters, trained with 240 × 240 pixels."""
    return EfficientNetLite(SCALES["lite1"])


def efficientnet_lite2() -> EfficientNetLite:
    """6.09 M parameters, trained with 260 × 260 pixels."""
    return EfficientNetLite(SCALES["lite2"])


def efficientnet_lite3() -> EfficientNetLite:
    """8.20 M parameters, trained with 280 × 280 pixels."""
    return EfficientNetLite(SCALES["lite3"])


def efficientnet_lite4() -> EfficientNetLite:
    """13.0 M parameters, trained with 300 × 300 pixels."""
    return EfficientNetLite(SCALES["lite4"])
