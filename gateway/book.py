"""The rows of one model that are in the server, in the order in which they are served. Pure policy.

Waiting work goes by priority and then by deadline wherever it waits (slots, pool, batcher), so what comes in last may
be served first. The book says what a newcomer would have behind it, and by when that must be done.
"""

from bisect import bisect_right, insort
from typing import NamedTuple, TypeAlias

from gateway.request import PROOF_PRIORITY

WIDTH_S = 0.05
"""Deadlines this close together count as one: a call a millisecond, each with a second to go, makes 20 entries."""

FAR_S = 1e12
"""Later deadlines are all the same, infinity included."""

Key: TypeAlias = tuple[int, int]
"""Priority (smaller first), and the deadline in steps of `WIDTH_S`."""


class Behind(NamedTuple):
    """Rows that would be served later."""

    priority: int
    deadline_s: float
    rows: int


class Book:
    """Of one model. Event loop only."""

    __slots__ = ("_order", "_rows", "first_priority")

    def __init__(self) -> None:
        self._rows: dict[Key, int] = {}
        self._order: list[Key] = []
        self.first_priority: int | None = None
        """The best that any caller's row had so far; None before the first."""

    def add(self, priority: int, deadline_s: float, rows: int) -> None:
        """Rows came in."""
        key = _key(priority, deadline_s)
        if key in self._rows:
            self._rows[key] += rows
            return
        self._rows[key] = rows
        insort(self._order, key)
        if priority != PROOF_PRIORITY and (self.first_priority is None or priority < self.first_priority):
            self.first_priority = priority

    def remove(self, priority: int, deadline_s: float, rows: int) -> None:
        """As many of these rows are done, or have left."""
        key = _key(priority, deadline_s)
        left = self._rows[key] - rows
        if left:
            self._rows[key] = left
            return
        del self._rows[key]
        self._order.remove(key)

    def behind(self, priority: int, deadline_s: float) -> list[Behind]:
        """What would be served after a row with this priority and deadline, in that order."""
        first = bisect_right(self._order, _key(priority, deadline_s))
        return [Behind(key[0], key[1] * WIDTH_S, self._rows[key]) for key in self._order[first:]]

    def __repr__(self) -> str:
        return f"<Book {sum(self._rows.values())} rows, {len(self._order)} entries>"


def _key(priority: int, deadline_s: float) -> Key:
    return priority, int(min(deadline_s, FAR_S) / WIDTH_S)
