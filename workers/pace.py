"""How a load gives way to batches: the loop says when it has run one, the loader pauses between its steps."""

import os
import sys
import threading

from shared.clock import Clock
from shared.logs import get_logger

LATELY_S = 1.0
"""A batch that ended so long ago still means that there is traffic to give way to."""
PAUSE = 3.0
"""Seconds of pause for each second of a step: a quarter of the time is the load's, which takes twice as long as with
1.0. Nobody waits for a load, and docs/benchmarks.md has what live traffic notices of one."""
LONGEST_PAUSE_S = 1.5
"""A load takes at most so much longer per step, however long its steps are."""
NICE = 10
"""What is added for the loader's thread and the threads that it starts: they get a tenth of a core that batches want.
Not 19: a thread that holds the interpreter's lock while it waits for a core holds up the loop."""
SWITCH_S = 0.0005
"""How long the loader may keep the interpreter's lock from the loop. By default 5 ms, and a forward pass asks for it
after each layer."""

_log = get_logger()


class Pace:
    """Shared by two threads; each field has one writer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_s = float("-inf")
        self._closing = threading.Event()

    def ran(self) -> None:
        """The loop has run a batch."""
        self._last_s = self._clock()

    def give_way(self, spent_s: float) -> None:
        """The loader has just spent so long on a step: a longer pause, if there is traffic."""
        if self._clock() - self._last_s <= LATELY_S:
            self._closing.wait(min(PAUSE * spent_s, LONGEST_PAUSE_S))

    def close(self) -> None:
        """No more pauses: the one under way ends."""
        self._closing.set()

    def __repr__(self) -> str:
        return f"<Pace last={self._last_s:.3f} closing={self._closing.is_set()}>"


def step_back() -> None:
    """Lower the priority of the calling thread, and the threads that it will start. Only on Linux.

    It can't be raised again without a privilege, and need not be.
    """
    if sys.platform == "linux":
        try:
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)
        except OSError as error:  # a sandbox may forbid it: loads are then as important as batches
            _log.info("loads have the priority of batches", reason=error.strerror)
