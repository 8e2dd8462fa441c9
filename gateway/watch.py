"""Looks at what the disk says of the served models, and at ramps whose next step is due. Lives on the event loop.

So all gateways come to serve the same, whoever wrote traffic.json, and an edited model.yaml takes effect by itself.
What is in force and could not be written is tried again from here.
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

FIRST_DELAY_S, LAST_DELAY_S = 5.0, 300.0
"""What can't be served is tried again after the first, then after twice as long each time up to the last."""
LOOK_EVERY_S = 1.0
"""Two `stat` calls a model: some microseconds, in a thread, since a disk may hang."""

Print: TypeAlias = tuple[int, int, int]
"""Inode, length and time of a change (ns): what tells one content of a file from another without reading it."""
Prints: TypeAlias = tuple[Print | None, ...]
"""Of all files of one model that are looked at."""
GiveOrder: TypeAlias = Callable[[str, Order, str], Awaitable[Traffic]]


class Watch:
    """One task, begun by `start`, which looks again and again."""

    def __init__(self, root: Path, control: ModelControl, order: GiveOrder, *, leads: bool) -> None:
        """`order`: where a due step is ordered. `leads`: whether ramps are this gateway's affair; just one has them."""
        self._root = root
        self._control = control
        self._order = order
        self._leads = leads
        self._seen: dict[str, Prints] = {}
        self._task: asyncio.Task[None] | None = None
        self._reconciling: dict[str, asyncio.Task[None]] = {}
        self._stepping: dict[str, asyncio.Task[None]] = {}
        self._writing: dict[str, asyncio.Task[None]] = {}
        self._delays_s: dict[str, float] = {}
        self._again_s: dict[str, float] = {}
        """Models that could not be served as the files say: since how long the next try waits, and when it is due."""
        self.has_evidence: Callable[[str], bool] = lambda _name: True
        """Whether enough is known of a canary for a larger share."""

    def start(self) -> None:
        """Begin with what is on the disk now: canaries and standbys are loaded, too."""
        self._task = asyncio.get_running_loop().create_task(self._look_again_and_again())

    def close(self) -> None:
        """Look no more. Idempotent."""
        tasks = (*self._reconciling.values(), *self._stepping.values(), *self._writing.values())
        for task in (self._task, *tasks):
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
        for known in (self._seen, self._delays_s, self._again_s):
            for name in known.keys() - prints.keys():
                del known[name]
        for name, found in prints.items():
            if name not in self._reconciling and self._is_to_be_served(name, found):
                self._seen[name] = found
                _begin(self._reconciling, name, self._reconcile)
        for name in self._control.unwritten():
            if name not in self._writing:
                _begin(self._writing, name, self._control.write)
        if self._leads:
            for name in self._control.names():
                if name not in self._stepping and self._is_due(name):
                    _begin(self._stepping, name, self._step)

    def _is_to_be_served(self, name: str, found: Prints) -> bool:
        """Whether the files have changed, or what they said could not be served and it is time to try again."""
        if found != self._seen.get(name):
            self._delays_s.pop(name, None)
            return True
        if name not in self._delays_s:
            return not self._control.is_whole(name)
        return now_s() >= self._again_s[name]

    async def _reconcile(self, name: str) -> None:
        delay_s = min(2 * self._delays_s.get(name, FIRST_DELAY_S / 2), LAST_DELAY_S)
        self._delays_s[name], self._again_s[name] = delay_s, now_s() + delay_s  # also if a bug ends what follows
        if await self._control.reconcile(name) and self._control.is_whole(name):
            del self._delays_s[name], self._again_s[name]

    def _is_due(self, name: str) -> bool:
        """Whether a ramp's next step is due, and as much is known of the canary as a larger share needs."""
        canary = self._control.traffic(name).canary
        if canary is None or canary.ramp is None or time.time() < canary.ramp.next_at_s:
            return False
        return self.has_evidence(name)

    async def _step(self, name: str) -> None:
        try:
            await self._order(name, NextStep(time.time()), "ramp")
        except HeadraceError as error:
            log.warning("a ramp's next step can't be taken", model=name, reason=error.text)

    def _prints(self, name: str) -> Prints:
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
