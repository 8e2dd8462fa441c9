"""Identical requests at the same time are computed once: the first one leads, the others wait for its answer.

Who waits stands in admission's books like everybody else, so that nothing here needs a limit of its own.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar, cast

from shared.errors import Code, HeadraceError, InternalFault

T = TypeVar("T")

_OWN_REASON = {Code.CANCELLED, Code.DEADLINE_EXCEEDED, Code.OVERLOADED}
"""Failures that belong to the one who computed, not to what was computed: deadline, priority, the moment it came."""


class _Landed(NamedTuple, Generic[T]):
    """What became of it: a result, or a failure that is everybody's.

    Never the exception that was raised: its trace holds the frames that hold this, a cycle for every failure.
    """

    result: T | None
    error: HeadraceError | None = None


class SingleFlight(Generic[T]):
    """Used on the event loop only. What is returned is shared: nobody may change it."""

    def __init__(self) -> None:
        self._leading: dict[bytes, asyncio.Future[_Landed[T] | None]] = {}
        self.led = 0
        """How often something was computed."""
        self.joined = 0
        """How often a caller got what another one had computed, failures included."""

    def __len__(self) -> int:
        """What is being computed now."""
        return len(self._leading)

    async def run(self, key: bytes, compute: Callable[[], Awaitable[T]]) -> T:
        """What `compute` returns, or what it returns for somebody who asks the same at this moment.

        Cancelling a waiter concerns nobody else. When the one who computes is cancelled, or fails for a reason of its
        own (`_OWN_REASON`), the first who waits computes anew and the others wait for that one. All other failures
        are shared: they are the input's or the server's. A bug is raised for the one who met it, whose trace goes to
        the log, and as InternalFault for the others.
        """
        while (leader := self._leading.get(key)) is not None:
            landed = await asyncio.shield(leader)
            if landed is not None:
                self.joined += 1
                return _unpacked(landed)
        return await self._lead(key, compute)

    async def _lead(self, key: bytes, compute: Callable[[], Awaitable[T]]) -> T:
        future: asyncio.Future[_Landed[T] | None] = asyncio.get_running_loop().create_future()
        self._leading[key] = future
        self.led += 1
        landed: _Landed[T] | None = None
        try:
            result = await compute()
            landed = _Landed(result)
            return result
        except Exception as error:
            if not isinstance(error, HeadraceError):
                landed = _Landed(None, InternalFault())
            elif error.code not in _OWN_REASON:
                landed = _Landed(None, _anew(error))
            raise
        finally:  # also when it was cancelled: nothing has landed then
            del self._leading[key]
            future.set_result(landed)


def _unpacked(landed: _Landed[T]) -> T:
    if landed.error is None:
        return cast("T", landed.result)
    raise _anew(landed.error)  # one of its own for everybody: a trace grows wherever an exception is raised


def _anew(error: HeadraceError) -> HeadraceError:
    return type(error)(error.text, retry_after_ms=error.retry_after_ms)
