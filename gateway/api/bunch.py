"""Small messages of one stream, worked on together: they share a batch, and with it the way to the worker and back.

gRPC for Python hands over one message of a stream at a time. A small tensor would be computed alone before the next one
is here, however many the caller has in flight.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

Message = TypeVar("Message")

SMALL_BYTES = 16 * 1024
"""Larger messages are worked on at once: their own cost is far above what they could share."""
HOLD_S = 0.002
"""In it some thirty messages are read. A model may hold a row for longer (`batching.max_wait_ms`)."""


class Bunch(Generic[Message]):
    """While some are being worked on, holds the next ones for `HOLD_S`, or until all of them are here. Event loop only.

    A caller that keeps N requests open sends the next ones when it has answers; N is what was open when the last hold
    ended by its time. Who sends one at a time never waits.
    """

    def __init__(self, start: Callable[[Message, float], None]) -> None:
        """`start(message, arrived_s)` begins to work on one."""
        self._start = start
        self._held: list[tuple[Message, float]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._usual = 1
        self.open = 0
        """Messages read and not yet answered on the wire."""

    def add(self, message: Message, nbytes: int, arrived_s: float) -> None:
        """One message was read. They begin in the order in which they are read."""
        self.open += 1
        if nbytes > SMALL_BYTES:
            self.flush()  # answers may have to be in order: nobody is overtaken
            self._start(message, arrived_s)
            return
        self._held.append((message, arrived_s))
        if self.open == len(self._held) >= self._usual:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HOLD_S, self._held_long_enough)

    def answered(self) -> None:
        """One answer was written."""
        self.open -= 1

    def flush(self) -> None:
        """Begin to work on what is held."""
        for message, arrived_s in self._take():
            self._start(message, arrived_s)

    def drop(self) -> None:
        """The stream has ended: nobody waits for what is held."""
        self.open -= len(self._take())

    def _take(self) -> list[tuple[Message, float]]:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, []
        return held

    def _held_long_enough(self) -> None:
        self._usual = self.open
        self.flush()
