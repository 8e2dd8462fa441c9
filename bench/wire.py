"""How an open loop's calls travel: what a way of sending them offers, and what it needs to know."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

REASON = "error-reason"
"""Trailing metadata of a refusal: the server's word for it. Without it, the client's own clock ended the call."""
TIMING = "server-timing"
"""Trailing metadata of every answer: milliseconds in each stage."""
OPEN_LIMIT_S = 5.0

Ended = Callable[[int, str, str], None]
"""Told each call's only end: its place in the plan, its word (`bench.ledger`), its `server-timing` or nothing."""


class NotThere(ConnectionError):
    """No server could be reached; the text is a sentence that names the address."""


@asynccontextmanager
async def connecting(address: str, limit_s: float = OPEN_LIMIT_S) -> AsyncIterator[None]:
    """Around what connects: raises NotThere when that fails, or is not done after `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise NotThere(f"no gRPC server answered at {address} within {limit_s:g} s") from None
    except OSError as error:
        raise NotThere(f"no gRPC server answered at {address}: {error}") from None


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

    samples: dict[str, str]
    """By word: the text of the first call that ended so, of those that are not OK."""

    async def open(self) -> None:
        """Connect. Raises NotThere."""

    def send(self, index: int, request: bytes, left_s: float) -> None:
        """Begin a call that ends by itself after `left_s` seconds. Calls come in the order of their deadlines."""

    async def close(self) -> None:
        """Drop the connections."""
