"""Batch buffers in host memory: the rows of many items side by side, in memory that is reused. No torch.

The pages are touched once, at the largest batch so far; after that gathering is one copy per item.
"""

import math
from collections.abc import Sequence

import numpy as np

from shared.lengths import Shapes, fitting
from shared.tensors import Array, TensorSpec

Inputs = Sequence[Sequence[Array]]
"""Per item: one array per input spec, first dimension its rows; views of arena memory or of the message."""


class Padding:
    """Gives the items of a batch one shape: that of the largest, or the next one that has been warmed."""

    def __init__(self, specs: Sequence[TensorSpec], allowed: Sequence[Shapes] = ()) -> None:
        """`allowed`: shapes to round up to, where the device runs each shape from a prepared plan; else none."""
        self.fills = tuple(spec.fill for spec in specs)
        """Per input: what stands where an item is smaller than the batch."""
        self._allowed = allowed

    def shapes(self, columns: Sequence[Sequence[Array]]) -> list[tuple[int, ...]]:
        """Per input `[rows, …]` of the batch, of each input's arrays of all items."""
        exact = [batch_shape(arrays) for arrays in columns]
        rounded = fitting(self._allowed, [shape[1:] for shape in exact])
        return exact if rounded is None else [(shape[0], *rest) for shape, rest in zip(exact, rounded, strict=True)]


def batch_shape(arrays: Sequence[Array]) -> tuple[int, ...]:
    """The shape that holds all items' rows: rows are added, other dimensions grow to the largest."""
    rows = sum(len(array) for array in arrays)
    return (rows, *(max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays), strict=True)))


def put_together(arrays: Sequence[Array], batch: Array, fill: int) -> None:
    """All items' rows one below the other into a batch, `fill` beside and behind them; host memory."""
    row = 0
    for array in arrays:
        target = batch[row : row + len(array)]
        if array.shape[1:] != batch.shape[1:]:
            target[...] = fill
            target = target[(slice(None), *(slice(size) for size in array.shape[1:]))]
        np.copyto(target, array)
        row += len(array)
    batch[row:] = fill


class HostStaging:
    """One growing buffer per input. The arrays it returns are valid until the next `gather`."""

    def __init__(self, padding: Padding) -> None:
        self.padding = padding
        self._buffers: list[Array] = []

    def gather(self, items: Inputs) -> list[Array]:
        """One array `[rows, …]` per input; where an item is smaller than others stands the input's fill value."""
        columns = list(zip(*items, strict=True))
        shapes = self.padding.shapes(columns)
        return [self._gather(number, arrays, shapes[number]) for number, arrays in enumerate(columns)]

    def _gather(self, number: int, arrays: Sequence[Array], shape: tuple[int, ...]) -> Array:
        batch = self._buffer(number, math.prod(shape) * arrays[0].itemsize).view(arrays[0].dtype).reshape(shape)
        put_together(arrays, batch, self.padding.fills[number])
        return batch

    def _buffer(self, number: int, nbytes: int) -> Array:
        while len(self._buffers) <= number:
            self._buffers.append(np.empty(0, np.uint8))
        if self._buffers[number].nbytes < nbytes:
            self._buffers[number] = np.empty(nbytes, np.uint8)
        return self._buffers[number][:nbytes]
