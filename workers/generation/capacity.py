"""How much may be generated at a time, and how the cache's memory is cut into rows. Pure: no torch, no clock."""

from collections.abc import Sequence
from typing import NamedTuple

DEFAULT_SEQUENCES = 16
"""Enough that a step, which reads all weights once, does it for many; few enough that each one is quick."""
BUDGET_SHARE = 0.25
"""Of the worker's memory budget: what a model's cache takes by default, when all its sequences would take more."""
LEAST_ROWS, LEAST_TOKENS = 1, 64
"""The smallest cache: growing to it costs nothing."""


class Capacity(NamedTuple):
    """Of one version."""

    sequences: int
    """Most rows."""
    tokens: int
    """Most rows times tokens of each."""
    context: int
    """Most tokens of each."""

    def holds(self, rows: int, longest: int) -> bool:
        """Whether so many rows of so many tokens are within it."""
        return rows <= self.sequences and longest <= self.context and rows * longest <= self.tokens

    def room(self, rows: int, longest: int) -> tuple[int, int]:
        """Rows and tokens of a cache for what `holds`: powers of two as far as that fits, so that it seldom changes."""
        wide = min(max(_power(rows), LEAST_ROWS), self.sequences)
        long = min(max(_power(longest), LEAST_TOKENS), self.context)
        if wide * long <= self.tokens:
            return wide, long
        if rows * long <= self.tokens:
            return min(wide, self.tokens // long), long
        return rows, min(long, self.tokens // rows)


def tokens_of(wanted: int | None, sequences: int, context: int, token_bytes: int, budget_bytes: int | None) -> int:
    """Tokens of the cache: as wanted, else all that the sequences can need, or a share of the budget if that is less.

    At least one whole context, so that no prompt is too long for the cache alone.
    """
    if wanted is not None:
        return wanted
    most = sequences * context
    if budget_bytes is not None:
        most = min(most, max(context, int(budget_bytes * BUDGET_SHARE) // max(1, token_bytes)))
    return most


def portions(unread: Sequence[int], budget: int) -> list[int]:
    """How many tokens of each of the first prompts in line to read at once; the rest waits for the next time.

    In order: all but the last of those that are begun are finished, so that who came first is done first. Their rows
    are as wide as the longest portion, and `budget` (1 or more) bounds the whole.
    """
    best = [min(unread[0], budget)]
    for count in range(2, min(len(unread), budget) + 1):
        width = budget // count
        if any(tokens > width for tokens in unread[: count - 1]):
            break
        best = [*unread[: count - 1], min(unread[count - 1], width)]
    return best


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << max(0, number - 1).bit_length()
