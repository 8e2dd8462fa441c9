"""Where the tensors of a prepared item lie: in the slots that the gateway leased, or inside the message."""

from collections.abc import Sequence

import numpy as np

from shared.arena import AttachedArena
from shared.results import Result
from shared.tensors import DTYPES, Array, SlotRef, Tensor, TensorSpec, wire_bytes


class Placing:
    """For the inputs of one pipeline: buffers before `preprocess`, tensor messages after it."""

    def __init__(self, specs: Sequence[TensorSpec], arena: AttachedArena) -> None:
        self._specs = specs
        self._arena = arena
        self._fixed = all(spec.row_nbytes is not None for spec in specs)

    def buffers(self, slots: Sequence[SlotRef]) -> list[Array]:
        """One writable array [1, *shape] per input, in its slot where there is one; none when a dimension is free.

        Raises ValueError when a slot does not fit the input.
        """
        if not self._fixed:
            return []
        if not slots:
            return [np.empty((1, *spec.shape), DTYPES[spec.datatype]) for spec in self._specs]
        return [
            self._arena.array(ref, spec.datatype, (1, *spec.shape))
            for spec, ref in zip(self._specs, slots, strict=True)
        ]

    def place(self, arrays: Sequence[Array], out: Sequence[Array], slots: Sequence[SlotRef]) -> list[Tensor]:
        """What `preprocess` returned, as tensors: nothing is copied that lies in its slot already.

        Raises ValueError when the arrays are not what the pipeline's spec declares: a mistake of the pipeline.
        """
        check_tensors(arrays, self._specs)
        return [
            self._place(spec, array, out[index] if out else None, slots[index] if slots else None)
            for index, (spec, array) in enumerate(zip(self._specs, arrays, strict=True))
        ]

    def _place(self, spec: TensorSpec, array: Array, own: Array | None, ref: SlotRef | None) -> Tensor:
        shape = array.shape
        if ref is None or array.nbytes > ref.nbytes:
            return Tensor(spec.name, spec.datatype, shape, wire_bytes(array))
        if array is not own:
            np.copyto(self._arena.array(ref, spec.datatype, shape), array)
        return Tensor(spec.name, spec.datatype, shape, ref)


def check_tensors(arrays: Sequence[Array], specs: Sequence[TensorSpec]) -> None:
    """Raises ValueError when the arrays are not, in number, datatype, shape and rows, what `specs` declare."""
    if len(arrays) != len(specs):
        raise ValueError(f"{len(arrays)} tensors, the spec declares {len(specs)}")
    for array, spec in zip(arrays, specs, strict=True):
        fits = array.ndim == len(spec.shape) + 1 and all(
            want in (-1, have) for want, have in zip(spec.shape, array.shape[1:], strict=True)
        )
        if not fits or array.dtype != DTYPES[spec.datatype]:
            raise ValueError(
                f"tensor {spec.name} is {array.dtype} {list(array.shape)}, the spec declares {spec.datatype} "
                f"[rows, {', '.join(map(str, spec.shape))}]"
            )
    if len({len(array) for array in arrays}) > 1:
        raise ValueError(f"tensors have different row counts: {[len(array) for array in arrays]}")


def check_results(results: Sequence[Result], arrays: Sequence[Array]) -> None:
    """Raises ValueError when there is not exactly one result per row."""
    if arrays and len(results) != len(arrays[0]):
        raise ValueError(f"postprocess gave {len(results)} results for {len(arrays[0])} rows")
