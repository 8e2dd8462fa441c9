"""How an open loop's calls travel: what a way of sending them offers, and what it needs to know."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

REASON = "error-reason"
"""Trailing metadata of a refusal: the server's word for it. Without it, the client's own clock ended the call."""
TIMING = "server-timing"
"""Trailing metadata of every answer: milliseconds in each stage."""
OPEN_LIMIT_S = 5.0

Ended = Callable[[int, str, str], None]
"""Told each call's only end: its place in the plan, its word (`bench.ledger`), its `server-timing` or nothing."""


class Target(NamedTuple):
    """Where calls go."""

    address: str
    method: str
    channels: int
    """Connections."""
    stages: bool
    """Whether `server-timing` is wanted; reading it costs CPU."""


class Wire(Protocol):
    """A way of sending unary calls. Made with a Target and an Ended; the event loop's thread only."""

    async def open(self) -> None:
        """Connect. Raises TimeoutError when the server is not there."""

    def send(self, index: int, request: bytes, left_s: float) -> None:
        """Begin a call that ends by itself after `left_s` seconds. Calls come in the order of their deadlines."""

    async def close(self) -> None:
        """Drop the connections."""
