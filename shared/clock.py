"""The one clock of the system.

`CLOCK_MONOTONIC` is shared by all processes of a machine, so an absolute `deadline_s` may travel in a message.
Policies never call this: `now_s` is passed in.
"""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds from an arbitrary, machine-wide, never-decreasing origin."""

now_s: Clock = time.monotonic

FOREVER_S = float("inf")
"""A deadline that never passes (warm-up and probes)."""
