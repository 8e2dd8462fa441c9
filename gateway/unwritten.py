"""Traffic that is in force and not on the disk yet. Pure but for the clock.

A rollback must not wait for a disk: the pointer moves first, and traffic.json follows as soon as it can be written.
"""

from typing import Any

import msgspec

from shared.clock import now_s
from shared.errors import Conflict
from shared.traffic import MAX_HISTORY, Traffic

FIRST_DELAY_S, LAST_DELAY_S = 1.0, 60.0
"""What could not be written is tried again after the first, then after twice as long each time up to the last."""

_SAYS_WHICH = "at", "action", "by", "from", "to"
"""Words of a change in the history that tell it from others."""


class ChangedMeanwhile(Conflict):
    """What an order was made for is not in force any more."""


def same(one: Traffic, other: Traffic) -> bool:
    """Whether both say that the same versions answer the same callers."""
    return one.without_history() == other.without_history()


def _times(entry: dict[str, Any], history: list[dict[str, Any]]) -> int:
    """How often this change is in a history. Its figures are left out: a file has no more than JSON can say."""
    return sum(all(other.get(word) == entry.get(word) for word in _SAYS_WHICH) for other in history)


class Unwritten:
    """What one model's traffic.json is to say as soon as the disk lets it."""

    __slots__ = ("_delay_s", "after", "again_s", "base", "entries", "reason")

    def __init__(self, base: Traffic, after: Traffic, entries: list[dict[str, Any]]) -> None:
        """`base`: what the disk says. `entries`: of the history of `after`, those that the disk does not have."""
        self.base = base
        self.after = after
        self.entries = entries
        self.reason = ""
        """Why it could not be written; empty before a try has failed."""
        self.again_s = float("inf")
        """When it is to be tried again (monotonic); not by itself before the first try has failed."""
        self._delay_s = FIRST_DELAY_S

    def followed_by(self, after: Traffic, changes: int = 1) -> "Unwritten":
        """With so many changes more."""
        return Unwritten(self.base, after, [*self.entries, *after.history[-changes:]][-MAX_HISTORY:])

    def stands_on(self, disk: Traffic) -> bool:
        """Whether the disk says what this is to replace, and has said so ever since.

        Another gateway may have written the same, and somebody then what was there before: that is newer than this.
        """
        return same(disk, self.base) and not any(
            _times(entry, disk.history) > _times(entry, self.base.history) for entry in self.entries
        )

    def over(self, disk: Traffic) -> Traffic:
        """What is to be read where the disk says this: nothing else, if somebody has changed it since."""
        if not self.stands_on(disk):
            return disk
        return msgspec.structs.replace(self.after, history=[*disk.history, *self.entries][-MAX_HISTORY:])

    def written(self, disk: Traffic) -> Traffic:
        """What the disk is to say in place of this. Raises ChangedMeanwhile when somebody has changed it since."""
        if same(disk, self.after):  # another gateway was faster
            return disk
        if not self.stands_on(disk):
            raise ChangedMeanwhile("something newer was written meanwhile")
        return self.over(disk)

    def lands(self, earlier: "Unwritten") -> None:
        """What it follows has been written while this came."""
        self.base, self.entries = earlier.after, self.entries[len(earlier.entries) :]

    def failed(self, reason: str) -> None:
        """A try to write it has failed."""
        self.reason = reason
        self.again_s, self._delay_s = now_s() + self._delay_s, min(2 * self._delay_s, LAST_DELAY_S)
