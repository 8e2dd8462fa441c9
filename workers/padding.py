"""Padding that depends on the image's size, for networks whose weights come from TensorFlow."""

import math

from torch import Tensor
from torch.nn import functional


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Zeros (before, after) one image side of `size` pixels, so that ceil(size / stride) windows fit.

    An odd total leaves the larger part after.
    """
    total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def pad_same(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Zero-pad `[rows, channels, height, width]` as TensorFlow's "same" does.

    A module that calls it says `torch.fx.wrap("pad_same")`, so that a graph keeps it as one step; on a CPU it then
    costs nothing (see `workers.backends.cpu_graph`).
    """
    top, bottom = same_padding(x.shape[-2], kernel, stride)
    left, right = same_padding(x.shape[-1], kernel, stride)
    return functional.pad(x, (left, right, top, bottom))
