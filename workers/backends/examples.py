"""Input rows that a pipeline's declaration allows, for warm-up and self-checks. No torch, no decoding."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shared.lengths import Shapes
from shared.pipeline import Pipeline
from shared.tensors import DTYPES, Array, TensorSpec

FREE_DIMENSION = 16
"""Size of an input dimension that the pipeline leaves free and says nothing of."""


def of(pipeline: Pipeline[Any], count: int) -> list[Array]:
    """One array `[count, …]` per input, of the first of the shapes that are warmed."""
    return rows(pipeline.spec.inputs, count, next(iter(pipeline.warm_shapes()), None))


def rows(specs: Sequence[TensorSpec], count: int, shapes: Shapes | None = None) -> list[Array]:
    """One array `[count, …]` per input, the same ones every time: integers over their range, floats in [0, 1).

    `shapes` of a row, one per input; by default each free dimension has FREE_DIMENSION.
    """
    generator = np.random.default_rng(0)
    declared = [tuple(FREE_DIMENSION if size < 0 else size for size in spec.shape) for spec in specs]
    return [_row(spec, (count, *shape), generator) for spec, shape in zip(specs, shapes or declared, strict=True)]


def _row(spec: TensorSpec, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    dtype = DTYPES[spec.datatype]
    if dtype.kind == "O":
        return np.full(shape, b"example", object)
    if dtype.kind == "f":
        return generator.random(shape, np.float32).astype(dtype)
    highest = 2 if dtype.kind == "b" else min(256, 2 ** (8 * dtype.itemsize - (dtype.kind == "i")))
    return generator.integers(0, min(highest, spec.maximum or highest), shape).astype(dtype)
