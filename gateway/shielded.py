"""Orders that go on when whoever gave them has left: half done, they would leave a server that nobody has ordered."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from shared.errors import Overloaded

MAX_ORDERS = 16
"""At a time: each may load a version, and its caller may long have left."""

_T = TypeVar("_T")


class Shielded:
    """The orders that one place has taken. Event loop only."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def carried_out(self, order: Coroutine[Any, Any, _T]) -> _T:
        """Wait for it; it goes on when the wait is given up. Raises what it raises, and Overloaded."""
        if len(self._tasks) >= MAX_ORDERS:
            order.close()
            raise Overloaded("too many orders are being carried out", retry_after_ms=1000)
        task = asyncio.get_running_loop().create_task(order)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def give_up(self) -> None:
        """Carry nothing out any more: this process ends."""
        for task in self._tasks:
            task.cancel()

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # asked for here, since whoever waited may have left
