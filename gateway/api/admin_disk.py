"""Where the admin service touches the disk: in threads of its own, few at a time, never on the event loop."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

from shared.errors import Conflict, Overloaded, StartupError
from shared.logs import get_logger

_P = ParamSpec("_P")
_T = TypeVar("_T")

LARGE_CALLS = 2
"""Calls at a time that read or write whole versions: more would only share the disk, and each may be many GB."""

log = get_logger()


class Disk:
    """Runs functions that read and write the repository. Event loop only."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._large = 0

    @contextlib.contextmanager
    def large(self) -> Iterator[None]:
        """A place for a call that reads or writes whole versions. Raises Overloaded when all are taken."""
        if self._large >= LARGE_CALLS:
            raise Overloaded(
                f"{LARGE_CALLS} other calls are reading or writing whole versions: try again when one is done",
                retry_after_ms=1000,
            )
        self._large += 1
        try:
            yield
        finally:
            self._large -= 1

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a function in a thread; it runs to its end when the caller leaves meanwhile.

        Raises what it raises; what the repository or the system refuses becomes Conflict.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_T] = loop.create_future()

        def settle(result: _T | None, error: Exception | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(result)  # type: ignore[arg-type]  # None only when that is what the function returns
            else:
                done.set_exception(error)

        def work() -> None:
            try:
                result, error = function(*args, **kwargs), None
            except Exception as raised:  # noqa: BLE001 - handed to whoever waits
                result, error = None, raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(settle, result, error)

        # A daemon: a process that ends does not wait for gigabytes to be hashed. Writers leave nothing half-done.
        threading.Thread(target=work, name="admin-disk", daemon=True).start()
        try:
            return await done
        except StartupError as error:  # the repository's: its sentence is safe to show but for where the file lies
            log.info("the repository refuses", reason=error.told)
            raise Conflict(error.text.replace(f"{self._root}/", "")) from None
        except OSError as error:
            log.warning("the repository can't be used", reason=str(error))
            raise Conflict(
                f"the repository can't be read or written: {error.strerror or type(error).__name__}"
            ) from None
