"""Input rows that a pipeline's declaration allows, for warm-up and self-checks. No torch, no decoding."""

from collections.abc import Sequence

import numpy as np

from shared.tensors import DTYPES, Array, TensorSpec

FREE_DIMENSION = 16
"""Size of an input dimension that the pipeline leaves free."""


def rows(specs: Sequence[TensorSpec], count: int) -> list[Array]:
    """One array `[count, …]` per input, the same ones every time: integers over their range, floats in [0, 1)."""
    generator = np.random.default_rng(0)
    return [_row(spec, count, generator) for spec in specs]


def _row(spec: TensorSpec, count: int, generator: np.random.Generator) -> Array:
    shape = (count, *(FREE_DIMENSION if size < 0 else size for size in spec.shape))
    dtype = DTYPES[spec.datatype]
    if dtype.kind == "O":
        return np.full(shape, b"example", object)
    if dtype.kind == "f":
        return generator.random(shape, np.float32).astype(dtype)
    highest = 2 if dtype.kind == "b" else min(256, 2 ** (8 * dtype.itemsize - (dtype.kind == "i")))
    return generator.integers(0, min(highest, spec.maximum or highest), shape).astype(dtype)
