"""Times in which this process did not run, so that nobody else is judged by them. Pure policy of the gateway process.

A process that was stopped (SIGSTOP, `docker pause`, a frozen machine) sees the clock jump when it goes on: all that it
waits for is older than any limit, though the answers may long lie in its sockets. It notices by its own tick.
"""

from collections import deque
from typing import NamedTuple

LATE_S = 1.0
"""A tick that comes this long after the one before, four times its period, means that we were not running."""

KEPT = 64
"""Pauses remembered: those within the age of anything that is judged, unless they never end."""


class _Pause(NamedTuple):
    """From the last tick before it to the first one after it."""

    begun_s: float
    ended_s: float


class Pauses:
    """Told of every tick; corrects ages. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._ticked_s: float | None = None
        self._pauses: deque[_Pause] = deque(maxlen=KEPT)

    def noticed(self, now_s: float) -> float:
        """Called with each tick, first of all: how long we were not running until now, else 0.

        After a pause nobody should be judged before the next tick: what arrived meanwhile has to be read first.
        """
        before_s, self._ticked_s = self._ticked_s, now_s
        if before_s is None or now_s - before_s <= LATE_S:
            return 0.0
        self._pauses.append(_Pause(before_s, now_s))
        return now_s - before_s

    def age_s(self, since_s: float, now_s: float) -> float:
        """How much of the time since then we were there to see what happened."""
        missed_s = sum(pause.ended_s - max(since_s, pause.begun_s) for pause in self._pauses if pause.ended_s > since_s)
        return now_s - since_s - missed_s
