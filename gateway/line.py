"""Waiters in order of rank, any of whom may leave at any time. Pure bookkeeping on the gateway's event loop."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

Waiter = TypeVar("Waiter")

SPARE = 64
"""So many who have left may still stand in a line before it is cleared of them."""


class Line(Generic[Waiter]):
    """The smallest rank goes first. Who has left is skipped, and forgotten once as many stand here as wait."""

    __slots__ = ("_clear_at", "_entries", "_left")

    def __init__(self, left: Callable[[Waiter], bool]) -> None:
        """`left(waiter)`: whether it does not wait any more."""
        self._left = left
        self._entries: list[tuple[tuple[Any, ...], Waiter]] = []
        self._clear_at = SPARE

    def push(self, rank: tuple[Any, ...], waiter: Waiter) -> None:
        """Let it wait. No two ranks may be equal."""
        if len(self._entries) >= self._clear_at:
            self._entries = [entry for entry in self._entries if not self._left(entry[1])]
            heapify(self._entries)
            self._clear_at = 2 * len(self._entries) + SPARE
        heappush(self._entries, (rank, waiter))

    def first(self) -> Waiter | None:
        """Whose turn it is; None when nobody waits."""
        entries, left = self._entries, self._left
        while entries:
            if not left(entries[0][1]):
                return entries[0][1]
            heappop(entries)
        return None

    def pop(self) -> None:
        """The first one has been served."""
        heappop(self._entries)

    def __bool__(self) -> bool:
        """Whether anybody may still wait here."""
        return bool(self._entries)

    def __len__(self) -> int:
        """Who really waits: counted when somebody looks."""
        return sum(1 for _, waiter in self._entries if not self._left(waiter))
