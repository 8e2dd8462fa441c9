"""Shapes that batches are padded up to, and how many rows of one fit a budget. Used by gateway, pool and worker."""

from collections.abc import Sequence
from typing import TypeAlias

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""One per input, without the row dimension."""


def fitting(allowed: Sequence[Shapes], shapes: Sequence[tuple[int, ...]]) -> Shapes | None:
    """The first of the `allowed` shapes that holds these, which have no row dimension either; None: none does."""
    for each in allowed:
        pairs = zip(each, shapes, strict=True)
        if all(len(room) == len(shape) and all(map(int.__ge__, room, shape)) for room, shape in pairs):
            return each
    return None


def rows_within(max_tokens: int | None, bucket: Sequence[int], max_rows: int) -> int:
    """Rows of a batch whose items were rounded up to `bucket`: at least one, at most `max_rows`.

    `max_tokens` bounds rows times the longest free dimension; None does not.
    """
    if max_tokens is None or not bucket:
        return max_rows
    return max(1, min(max_rows, max_tokens // max(1, *bucket)))


def sizes_within(sizes: Sequence[int], rows: int) -> tuple[int, ...]:
    """The allowed batch sizes of at most `rows` rows, which is the last one unless all are smaller."""
    if rows >= sizes[-1]:
        return tuple(sizes)
    return (*(size for size in sizes if size < rows), rows)
