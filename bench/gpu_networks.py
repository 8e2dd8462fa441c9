"""The networks of `make bench-gpu`: the default one, and one of ResNet-50's size. Copied into the models' folders.

Each also as a network over raw pixels, which normalises them itself: for requests that need no decoding.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.networks.efficientnet_lite import efficientnet_lite0

_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Channels, blocks, stride of the first block."""
_WIDER = 4


def _convolution(channels_in: int, channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(channels)
    )


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1, around them a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.narrow = _convolution(channels_in, channels, 1)
        self.middle = _convolution(channels, channels, 3, stride)
        self.wide = _convolution(channels, channels * _WIDER, 1)
        same = stride == 1 and channels_in == channels * _WIDER
        self.shortcut = nn.Identity() if same else _convolution(channels_in, channels * _WIDER, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, channels_in, height, width]` → `[rows, channels · 4, height / stride, width / stride]`."""
        inner = functional.relu(self.middle(functional.relu(self.narrow(x))))
        return functional.relu(self.wide(inner) + self.shortcut(x))


class ResNet50(nn.Module):
    """25.6 million weights, 4.1 billion multiply-adds for 224 × 224 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _convolution(3, 64, 7, 2)
        blocks: list[nn.Module] = []
        channels_in = 64
        for channels, count, stride in _STAGES:
            for number in range(count):
                blocks.append(Bottleneck(channels_in, channels, stride if number == 0 else 1))
                channels_in = channels * _WIDER
        self.blocks = nn.Sequential(*blocks)
        self.classify = nn.Linear(channels_in, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Float `[rows, 3, height, width]` → logits `[rows, 1000]`."""
        x = functional.max_pool2d(functional.relu(self.stem(x)), 3, 2, 1)
        return torch.as_tensor(self.classify(self.blocks(x).mean((2, 3))))


class Pixels(nn.Module):
    """A network over uint8 `[rows, height, width, 3]`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits `[rows, 1000]`."""
        return torch.as_tensor(self.network(pixels.permute(0, 3, 1, 2).float().sub_(127).div_(128)))


def resnet50() -> nn.Module:
    """Random weights that keep their numbers in bounds through all blocks."""
    network = ResNet50()
    for module in network.modules():
        if isinstance(module, Bottleneck):
            nn.init.constant_(cast("nn.BatchNorm2d", module.wide[1]).weight, 0.2)
    return network


def resnet50_pixels() -> nn.Module:
    """See Pixels."""
    return Pixels(resnet50())


def efficientnet() -> nn.Module:
    """The default network."""
    return efficientnet_lite0()


def efficientnet_pixels() -> nn.Module:
    """See Pixels."""
    return Pixels(efficientnet_lite0())
