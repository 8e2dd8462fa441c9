"""Batch buffers in host memory: the rows of many items side by side, in memory that is reused. No torch.

The pages are touched once, at the largest batch so far; after that gathering is one copy per item.
"""

import math
from collections.abc import Sequence

import numpy as np

from shared.tensors import Array

Inputs = Sequence[Sequence[Array]]
"""Per item: one array per input spec, first dimension its rows; views of arena memory or of the message."""


def batch_shape(arrays: Sequence[Array]) -> tuple[int, ...]:
    """The shape that holds all items' rows: rows are added, other dimensions grow to the largest."""
    rows = sum(len(array) for array in arrays)
    return (rows, *(max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays), strict=True)))


class HostStaging:
    """One growing buffer per input. The arrays it returns are valid until the next `gather`."""

    def __init__(self) -> None:
        self._buffers: list[Array] = []

    def gather(self, items: Inputs) -> list[Array]:
        """One array `[rows, …]` per input; items smaller than others are filled up with zeros."""
        return [self._gather(number, arrays) for number, arrays in enumerate(zip(*items, strict=True))]

    def _gather(self, number: int, arrays: Sequence[Array]) -> Array:
        shape = batch_shape(arrays)
        batch = self._buffer(number, math.prod(shape) * arrays[0].itemsize).view(arrays[0].dtype).reshape(shape)
        row = 0
        for array in arrays:
            rows = len(array)
            target = batch[row : row + rows]
            if array.shape[1:] != shape[1:]:
                target[...] = 0
                target = target[(slice(None), *(slice(size) for size in array.shape[1:]))]
            np.copyto(target, array)
            row += rows
        return batch

    def _buffer(self, number: int, nbytes: int) -> Array:
        while len(self._buffers) <= number:
            self._buffers.append(np.empty(0, np.uint8))
        if self._buffers[number].nbytes < nbytes:
            self._buffers[number] = np.empty(nbytes, np.uint8)
        return self._buffers[number][:nbytes]
