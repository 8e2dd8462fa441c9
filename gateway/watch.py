"""Looks at what the disk says of the served models, and at ramps whose next step is due. Lives on the event loop.

So all gateways come to serve the same, whoever wrote traffic.json, and an edited model.yaml takes effect by itself.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

from gateway.model_control import ModelControl
from gateway.orders import NextStep, Order
from shared.clock import now_s
from shared.errors import HeadraceError
from shared.logs import get_logger
from shared.model_config import CONFIG_FILE
from shared.repository import TRAFFIC_FILE
from shared.traffic import Traffic

log = get_logger()

LOOK_EVERY_S = 1.0
"""Two `stat` calls a model: some microseconds, in a thread, since a disk may hang."""

Print: TypeAlias = tuple[int, int, int]
"""Inode, length and time of a change (ns): what tells one content of a file from another without reading it."""
GiveOrder: TypeAlias = Callable[[str, Order, str], Awaitable[Traffic]]


class Watch:
    """One task, begun by `start`, which looks again and again."""

    def __init__(self, root: Path, control: ModelControl, order: GiveOrder, *, leads: bool) -> None:
        """`order`: where a due step is ordered. `leads`: whether ramps are this gateway's affair; just one has them."""
        self._root = root
        self._control = control
        self._order = order
        self._leads = leads
        self._seen: dict[str, tuple[Print | None, ...]] = {}
        self._task: asyncio.Task[None] | None = None
        self._reconciling: dict[str, asyncio.Task[None]] = {}
        self._stepping: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Begin with what is on the disk now: canaries and standbys are loaded, too."""
        self._task = asyncio.get_running_loop().create_task(self._look_again_and_again())

    def close(self) -> None:
        """Look no more. Idempotent."""
        for task in (self._task, *self._reconciling.values(), *self._stepping.values()):
            if task is not None:
                task.cancel()
        self._task = None

    async def _look_again_and_again(self) -> None:
        while True:
            began_s = now_s()
            try:
                await self.look()
            except Exception:  # a bug must not end the watch for good
                log.exception("looking at the repository failed")
            await asyncio.sleep(max(0.1, LOOK_EVERY_S - (now_s() - began_s)))

    async def look(self) -> None:
        """Once."""
        names = self._control.names()
        prints = await asyncio.to_thread(lambda: {name: self._prints(name) for name in names})
        self._seen = {name: seen for name, seen in self._seen.items() if name in prints}
        for name, found in prints.items():
            if found != self._seen.get(name) and name not in self._reconciling:
                self._seen[name] = found
                _begin(self._reconciling, name, self._control.reconcile)
        if self._leads:
            for name in self._control.names():
                if name not in self._stepping and self._is_due(name):
                    _begin(self._stepping, name, self._step)

    def _is_due(self, name: str) -> bool:
        canary = self._control.traffic(name).canary
        return canary is not None and canary.ramp is not None and time.time() >= canary.ramp.next_at_s

    async def _step(self, name: str) -> None:
        try:
            await self._order(name, NextStep(time.time()), "ramp")
        except HeadraceError as error:
            log.warning("a ramp's next step can't be taken", model=name, reason=error.text)

    def _prints(self, name: str) -> tuple[Print | None, ...]:
        return tuple(_print_of(self._root / name / file) for file in (TRAFFIC_FILE, CONFIG_FILE))


def _begin(tasks: dict[str, asyncio.Task[None]], name: str, work: Callable[[str], Awaitable[None]]) -> None:
    """By a task of its own: a version that takes minutes to load must not keep others waiting."""

    async def noted() -> None:
        try:
            await work(name)
        except Exception:  # a bug must not go unseen
            log.exception("looking at a model failed", model=name)

    task = tasks[name] = asyncio.get_running_loop().create_task(noted())
    task.add_done_callback(lambda _done: tasks.pop(name, None))


def _print_of(path: Path) -> Print | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
