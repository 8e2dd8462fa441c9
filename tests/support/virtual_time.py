"""An event loop whose clock only moves when nothing is left to do: an hour of timers in milliseconds, always the same.

The gateway's own code runs on it unchanged: `shared.clock.now_s` is replaced wherever it was imported.
"""

import asyncio
import math
import selectors
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from shared.clock import Clock

T = TypeVar("T")

START_S = 1000.0
"""Not 0, so that nothing works only because a time is falsy."""
GRID = 1 << 30
"""Times are multiples of about a nanosecond, so that sums and differences of them are exact."""


class _Selector(selectors.SelectSelector):
    """Instead of waiting it lets the time pass; no file is ever looked at."""

    now_s = START_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits for something that nobody will ever do")
        self.now_s = math.ceil((self.now_s + max(timeout, 0.0)) * GRID) / GRID  # never before a timer
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Timers and tasks only."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Seconds, as everybody on this loop sees them."""
        return self._virtual.now_s


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run to the end in virtual time.

    Raises RuntimeError where real time would wait for ever, or when a callback raised, which the loop would only log.
    """
    loop = VirtualLoop()
    raised: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _loop, context: raised.append(context))
    with _now_is(loop.time), asyncio.Runner(loop_factory=lambda: loop) as runner:
        found = runner.run(main())
    if raised:
        raise RuntimeError(f"{len(raised)} callbacks raised, first: {raised[0]}")
    return found


@contextmanager
def _now_is(clock: Clock) -> Iterator[None]:
    """Everywhere in the product; modules take the function over by name."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in {"gateway", "shared"} and getattr(module, "now_s", None) is time.monotonic
    ]
    for module in modules:
        vars(module)["now_s"] = clock
    try:
        yield
    finally:
        for module in modules:
            vars(module)["now_s"] = time.monotonic
