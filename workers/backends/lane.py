"""The buffers of one pass on a device with streams: rows in, numbers out. Worker only.

Two passes may be under way, each in a lane of its own. A lane belongs to one batch from the gathering of its rows until
its answers have been read; only then the next batch may have it, so none of its buffers is written while it is read.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from shared.tensors import Array
from workers.backends.streams import Streams
from workers.staging import Inputs, Padding, put_together

IsPinned = Callable[[Array], bool]
"""Whether the device copies an array by itself: whether it lies in a registered arena."""


class Lane:
    """Buffers that grow to the largest batch so far and are used again."""

    def __init__(self, streams: Streams, is_pinned: IsPinned, padding: Padding) -> None:
        self._padding = padding
        self._streams = streams
        self._is_pinned = is_pinned
        self._on_device: list[Tensor] = []
        self._inline: list[Tensor] = []
        self._results: list[Tensor] = []

    def gather(self, items: Inputs, padded_rows: int) -> list[Tensor]:
        """One tensor `[padded_rows, …]` per input on the device, queued inside `copying`; padding has its fill value.

        Rows of the arena are copied from where they lie: they stay the worker's until it has answered. Others come
        inside messages and go through pinned memory.
        """
        columns = list(zip(*items, strict=True))
        shapes = [(max(rows, padded_rows), *rest) for rows, *rest in self._padding.shapes(columns)]
        return [self._gather(number, arrays, shapes[number]) for number, arrays in enumerate(columns)]

    def fetch(self, outputs: Sequence[Tensor], rows: int) -> list[Tensor]:
        """Queue copies of the first `rows` rows of each into pinned memory, which they are views of."""
        return [self._fetch(number, output[:rows]) for number, output in enumerate(outputs)]

    def _gather(self, number: int, arrays: Sequence[Array], shape: tuple[int, ...]) -> Tensor:
        nbytes = math.prod(shape) * arrays[0].itemsize
        kind = _kind(arrays[0])
        batch = _grown(self._on_device, number, nbytes, self._streams.buffer).view(kind).view(shape)
        pinned = [self._is_pinned(array) for array in arrays]
        if any(pinned):
            self._copy_each(number, arrays, pinned, batch)
        else:  # one copy of all is much cheaper than many of a few bytes
            host = _grown(self._inline, number, nbytes, self._streams.pinned).view(kind).view(shape)
            put_together(arrays, host.numpy(), self._padding.fills[number])
            self._streams.copy(batch, host)
        return batch

    def _copy_each(self, number: int, arrays: Sequence[Array], pinned: Sequence[bool], batch: Tensor) -> None:
        rows, rest, fill = sum(len(array) for array in arrays), tuple(batch.shape[1:]), self._padding.fills[number]
        if any(array.shape[1:] != rest for array in arrays):
            self._streams.fill(batch, fill)  # around the rows of the smaller items, too
        elif rows < len(batch):
            self._streams.fill(batch[rows:], fill)
        row = 0
        for array, source in zip(arrays, self._sources(number, arrays, pinned), strict=True):
            target = batch[row : row + len(array)]
            if array.shape[1:] != rest:
                target = target[(slice(None), *(slice(size) for size in array.shape[1:]))]
            self._streams.copy(target, source)
            row += len(array)

    def _sources(self, number: int, arrays: Sequence[Array], pinned: Sequence[bool]) -> list[Tensor]:
        """Each item's rows as a tensor in pinned memory."""
        inline_bytes = sum(array.nbytes for array, there in zip(arrays, pinned, strict=True) if not there)
        room = _grown(self._inline, number, inline_bytes, self._streams.pinned)
        sources = []
        first = 0
        for array, there in zip(arrays, pinned, strict=True):
            if there:
                sources.append(torch.from_numpy(array))
                continue
            source = room[first : first + array.nbytes].view(_kind(array)).view(array.shape)
            np.copyto(source.numpy(), array)
            sources.append(source)
            first += array.nbytes
        return sources

    def _fetch(self, number: int, output: Tensor) -> Tensor:
        host = _grown(self._results, number, output.nbytes, self._streams.pinned).view(output.dtype).view(output.shape)
        self._streams.copy(host, output)
        return host


def _kind(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def _grown(buffers: list[Tensor], number: int, nbytes: int, make: Callable[[int], Tensor]) -> Tensor:
    """Buffer `number`, at least `nbytes` large, cut to it."""
    while len(buffers) <= number:
        buffers.append(torch.empty(0, dtype=torch.uint8))
    if buffers[number].nbytes < nbytes:
        buffers[number] = make(nbytes)
    return buffers[number][:nbytes]
