"""One lock for each name that somebody uses at the moment, and nothing kept of names that nobody does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class NameLocks:
    """Names come from callers, so they must not pile up. Event loop only."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: dict[str, int] = {}

    @asynccontextmanager
    async def held(self, name: str) -> AsyncIterator[None]:
        """Inside, nobody else is inside with this name; who waits comes in the order of asking."""
        lock = self._locks.setdefault(name, asyncio.Lock())
        self._users[name] = self._users.get(name, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._users[name] -= 1
            if not self._users[name]:  # else somebody waits for this very lock
                del self._users[name], self._locks[name]

    def __len__(self) -> int:
        """Names in use."""
        return len(self._locks)
