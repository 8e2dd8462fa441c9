"""Weights in Darknet's own format: a header and then nothing but float32 numbers, in the network's order."""

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shared.errors import ExitCode, StartupError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

_HEADER_BYTES = 20
"""Three int32 (major, minor, revision) and an int64 (pictures seen)."""
_TINY = 1e-6
"""What Darknet adds to a standard deviation before it divides by it."""


class Convolution(NamedTuple):
    """One convolution of the file; all but the heads carry a batch norm."""

    channels_in: int
    channels_out: int
    kernel: int


class _Reader:
    def __init__(self, raw: bytes) -> None:
        import numpy as np  # noqa: PLC0415 - only while weights are converted

        self._values: npt.NDArray[np.float32] = np.frombuffer(raw, "<f4", offset=_HEADER_BYTES)
        self._at = 0

    def take(self, *shape: int) -> "npt.NDArray[np.float64]":
        count = math.prod(shape)
        if self._at + count > len(self._values):
            raise StartupError(ExitCode.MODEL_LOAD, "the Darknet file ends before the network does")
        self._at += count
        return self._values[self._at - count : self._at].reshape(shape).astype("f8")

    def end(self) -> None:
        if self._at != len(self._values):
            left = len(self._values) - self._at
            raise StartupError(ExitCode.MODEL_LOAD, f"the Darknet file has {left} numbers more than the network")


def folded(raw: bytes, shapes: Sequence[tuple[int, int, int]], linear: Collection[int]) -> "dict[str, Tensor]":
    """Weight and bias of each convolution, with its batch norm (those in `linear` have none) folded into it.

    Folded in float64, as Darknet computes it. Raises StartupError when the file is too short or too long.
    """
    import numpy as np  # noqa: PLC0415 - only while weights are converted
    import torch  # noqa: PLC0415

    reader = _Reader(raw)
    tensors = {}
    for number, shape in enumerate(Convolution(*each) for each in shapes):
        bias = reader.take(shape.channels_out)
        scale = np.ones(shape.channels_out)
        if number not in linear:
            gain, mean, variance = (reader.take(shape.channels_out) for _ in range(3))
            scale = gain / (np.sqrt(variance) + _TINY)
            bias = bias - mean * scale
        weight = reader.take(shape.channels_out, shape.channels_in, shape.kernel, shape.kernel)
        weight = weight * scale[:, None, None, None]
        tensors[f"convolutions.{number}.weight"] = torch.from_numpy(weight.astype(np.float32))
        tensors[f"convolutions.{number}.bias"] = torch.from_numpy(bias.astype(np.float32))
    reader.end()
    return tensors
