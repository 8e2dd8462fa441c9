"""MobileNetV2, for the worker: an own definition whose parameter names are those of torchvision's weights.

Input: float32 or float16 `[rows, 3, height, width]`, channels_last preferred, ImageNet's mean and deviation taken out.
Output: logits `[rows, classes]`. ReLU6 everywhere, batch norm with torch's eps, symmetric padding.
"""

from typing import NamedTuple, cast

from torch import Tensor, nn
from torch.nn import functional

STEM_CHANNELS = 32
HEAD_CHANNELS = 1280


class Stage(NamedTuple):
    """A run of equal blocks. `expand` multiplies the channels inside a block; the first one has the stride."""

    expand: int
    channels: int
    repeats: int
    stride: int


STAGES = (
    Stage(1, 16, 1, 1),
    Stage(6, 24, 2, 2),
    Stage(6, 32, 3, 2),
    Stage(6, 64, 4, 2),
    Stage(6, 96, 3, 1),
    Stage(6, 160, 3, 2),
    Stage(6, 320, 1, 1),
)


def _activated(channels_in: int, channels_out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU6(inplace=True))


class Block(nn.Module):
    """Expand (1×1), filter each channel (3×3), project (1×1); added to its input where shapes allow."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, expand: int) -> None:
        super().__init__()
        inner = channels_in * expand
        self.adds = stride == 1 and channels_in == channels_out
        self.conv = nn.Sequential(
            *([_activated(channels_in, inner, 1)] if expand != 1 else []),
            _activated(inner, inner, 3, stride, groups=inner),
            nn.Conv2d(inner, channels_out, 1, bias=False),
            nn.BatchNorm2d(channels_out),
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, channels_in, h, w]` → `[rows, channels_out, ceil(h / stride), ceil(w / stride)]`."""
        inner = self.conv(x)
        return cast("Tensor", inner + x if self.adds else inner)


def _blocks() -> list[Block]:
    blocks, channels = [], STEM_CHANNELS
    for stage in STAGES:
        for repeat in range(stage.repeats):
            blocks.append(Block(channels, stage.channels, stage.stride if repeat == 0 else 1, stage.expand))
            channels = stage.channels
    return blocks


class MobileNetV2(nn.Module):
    """The whole network; see the module's docstring for shapes."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _activated(3, STEM_CHANNELS, 3, stride=2),
            *_blocks(),
            _activated(STAGES[-1].channels, HEAD_CHANNELS, 1),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(HEAD_CHANNELS, classes))

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, 3, height, width]` → logits `[rows, classes]`."""
        pooled = functional.adaptive_avg_pool2d(self.features(x), 1).flatten(1)
        return cast("Tensor", self.classifier(pooled))


def mobilenet_v2() -> MobileNetV2:
    """3.50 M parameters, trained with 224 × 224 pixels."""
    return MobileNetV2()
