"""The captured graphs of one version, by the batch's shape: a whole forward pass queued by one call. Worker only.

Launching the some hundred kernels of a small network takes the host longer than the device needs to run them; a graph
launches them at once. It reads static inputs, into which a batch is copied on the device first, and writes static
outputs. All graphs of a version share their memory, since the queue for computing runs them one after another.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from torch import Tensor

from shared.tensors import Array
from workers.backends.streams import Function, Graph, Streams

MAX_DRIFT = 1e-3
"""How far a graph's outputs may be from the plain network's, relative to the largest: the same kernels run, so that
they are equal but for those that add up in any order."""


_Shape: TypeAlias = tuple[tuple[int, ...], ...]
"""Of each input."""


class _Captured(NamedTuple):
    inputs: list[Tensor]
    graph: Graph


class Graphs:
    """See the module's docstring. Shapes that are not in it run eagerly."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._by_shape: dict[_Shape, _Captured] = {}
        self._room: list[Tensor] = []
        """Per input: memory for the largest batch, in which those of all shapes begin."""
        self._pool: object = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes that have a graph, rising."""
        return tuple(sorted({shape[0][0] for shape in self._by_shape}))

    def __len__(self) -> int:
        """How many there are."""
        return len(self._by_shape)

    def capture(self, function: Function, batch: Sequence[Tensor]) -> None:
        """Make the graph for batches of this shape; the largest one comes first. Raises what `Streams.capture` does.

        The batch must be complete: the host has waited for it.
        """
        if not self._room:
            self._room = [tensor.clone().flatten() for tensor in batch]
            self._pool = self._streams.pool()
            self._streams.settle()
        inputs = [room[: tensor.numel()].view(tensor.shape) for room, tensor in zip(self._room, batch, strict=True)]
        self._by_shape[_shape_of(batch)] = _Captured(inputs, self._streams.capture(function, inputs, self._pool))

    def drop(self, batch: Sequence[Tensor]) -> None:
        """Batches of this one's shape run eagerly again."""
        self._by_shape.pop(_shape_of(batch), None)
        if not self._by_shape:
            self._room, self._pool = [], None

    def run(self, batch: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """Queue the graph for a batch inside `computing`; its outputs hold until the next one. None: there is none."""
        captured = self._by_shape.get(_shape_of(batch)) if self._by_shape else None
        if captured is None:
            return None
        for static, tensor in zip(captured.inputs, batch, strict=True):
            self._streams.copy(static, tensor)
        captured.graph.replay()
        return captured.graph.outputs

    def memory_bytes(self) -> int:
        """Device memory that is theirs alone."""
        if not self._by_shape:
            return 0
        return sum(tensor.nbytes for tensor in self._room) + self._streams.pool_bytes(self._pool)

    def __repr__(self) -> str:
        return f"<Graphs {' '.join(map(str, self.sizes)) or 'none'}>"


def _shape_of(batch: Sequence[Tensor]) -> _Shape:
    return tuple(tuple(tensor.shape) for tensor in batch)


def agree(expected: Sequence[Array], got: Sequence[Array]) -> bool:
    """Whether two passes gave the same: floats but for rounding, everything else exactly."""
    return all(map(_same, expected, got))


def _same(expected: Array, got: Array) -> bool:
    if expected.dtype.kind != "f":
        return bool((expected == got).all())
    finite = np.isfinite(expected)
    if not np.array_equal(expected[~finite], got[~finite], equal_nan=True):
        return False
    wanted, found = expected[finite].astype(np.float64), got[finite].astype(np.float64)
    scale = float(np.abs(wanted).max(initial=0.0))
    return float(np.abs(wanted - found).max(initial=0.0)) <= MAX_DRIFT * max(scale, 1e-6)
