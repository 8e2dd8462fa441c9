"""Whose turn it is among the models: worker time in relation to weight. Part of the batcher's pure policy.

Start-time fair queueing. A share's `start_s` is the virtual time at which its next batch starts: it moves on by the
batch's seconds over the weight, first as predicted, then corrected by what the worker really took. The smallest goes
first. The level's virtual time is the start of the latest batch sent; a share that was idle starts there, so that
nobody saves up a claim while there is nothing to run.

Each priority is a level by itself: a claim counts only against those who could have been chosen instead.
"""

LEVELS = 64
"""So many priorities are remembered while nothing waits in them; callers may make up any number."""


class Level:
    """One priority."""

    __slots__ = ("shares", "virtual_s")

    def __init__(self) -> None:
        self.virtual_s = 0.0
        self.shares: dict[int, Share] = {}


class Share:
    """One model's part of one level."""

    __slots__ = ("_level", "queues", "start_s")

    def __init__(self, level: Level) -> None:
        self._level = level
        self.start_s = level.virtual_s
        self.queues = 0
        """Those of this share that are not empty."""

    def charge(self, seconds: float, weight: float) -> None:
        """A batch of so many predicted seconds is sent.

        Who let others pass while it waited for company has fallen behind the virtual time. It keeps the claim to one
        batch of that, not to all: its wait was its own choice.
        """
        level, cost_s = self._level, seconds / weight
        start_s = max(self.start_s, level.virtual_s - cost_s)
        level.virtual_s = max(level.virtual_s, start_s)
        self.start_s = start_s + cost_s


class Shares:
    """All shares; bounded by the number of models and of priorities in use."""

    __slots__ = ("_levels", "_room")

    def __init__(self) -> None:
        self._levels: dict[int, Level] = {}
        self._room = LEVELS

    def join(self, model: int, priority: int) -> Share:
        """A queue begins to wait; `queues` is to be counted down when it is empty again."""
        level = self._levels.get(priority)
        if level is None:
            level = self._new_level(priority)
        share = level.shares.get(model)
        if share is None:
            share = level.shares[model] = Share(level)
        if not share.queues and share.start_s < level.virtual_s:
            share.start_s = level.virtual_s
        share.queues += 1
        return share

    def correct(self, model: int, priority: int, seconds: float, weight: float) -> None:
        """A batch took so many seconds more (or less, when negative) than was charged."""
        level = self._levels.get(priority)
        share = level.shares.get(model) if level is not None else None
        if share is not None:
            share.start_s += seconds / weight

    def forget(self, model: int) -> None:
        """Drop a model's shares."""
        for level in self._levels.values():
            level.shares.pop(model, None)

    def __len__(self) -> int:
        """Priorities that are remembered."""
        return len(self._levels)

    def _new_level(self, priority: int) -> Level:
        if len(self._levels) >= self._room:
            self._levels = {
                number: level
                for number, level in self._levels.items()
                if any(share.queues for share in level.shares.values())
            }
            self._room = max(LEVELS, 2 * len(self._levels))
        level = self._levels[priority] = Level()
        return level
