"""Whose turn is next, where several gateways share a worker, or several versions one that generates. Pure policy.

Each is charged for the seconds that its batches or steps took; the one with the least goes first. One that had nothing
to run for a while is charged as if it had kept up, so that it can't save up time and then hold the device for long.
"""

from collections.abc import Collection, Hashable, Sequence
from typing import Generic, TypeVar

Who = TypeVar("Who", bound=Hashable)


class Turns(Generic[Who]):
    """The charges of those who are here."""

    def __init__(self) -> None:
        self._used_s: dict[Who, float] = {}
        """In the order of the last turn: of two with the same charge, the one whose turn is longer ago goes first."""
        self._now_s = 0.0
        """The charge of the last one whose turn it was: all who wait have at least as much."""

    def next(self, waiting: Sequence[Who]) -> Who:
        """Whose turn it is, of those who have something to run (at least one)."""
        for who in waiting:
            self._used_s[who] = max(self._used_s.get(who, 0.0), self._now_s)
        return min((who for who in self._used_s if who in waiting), key=self._used_s.__getitem__)

    def took(self, who: Who) -> None:
        """It has taken its turn."""
        self._now_s = self._used_s.pop(who)
        self._used_s[who] = self._now_s

    def charge(self, who: Who, seconds: float) -> None:
        """Its batch, or step, took so long."""
        if who in self._used_s:
            self._used_s[who] += seconds

    def forget(self, who: Who) -> None:
        """It has left."""
        self._used_s.pop(who, None)

    def passed(self, seconds: float) -> None:
        """So long the device was used without any turns: who had had more before has made up for as much of it."""
        self._now_s += seconds

    def tidy(self, waiting: Collection[Who]) -> None:
        """Forget who neither waits nor has had more than the others: he would begin anew as what he is."""
        for who in [who for who, used_s in self._used_s.items() if used_s <= self._now_s and who not in waiting]:
            del self._used_s[who]

    def __repr__(self) -> str:
        return f"<Turns {list(self._used_s.values())}>"
