"""The versions that a worker holds, within a budget of bytes. All of it is the loop's; a thread of its own loads.

Who wants a version stands in line. The first in line is loaded when there is room for it; for room, others are given up
(`workers.memory` says which). What counts is what versions were measured at, and before that what their files promise.
"""

from typing import Protocol

import msgspec

from shared.clock import Clock
from shared.errors import Code
from shared.logs import get_logger
from shared.messages import Failure, MemoryNote
from workers.holdings import Holdings, News, Users
from workers.loaded import Key, LoadedVersion
from workers.loader_thread import Box, Estimated, Finished, GaveBack, Outcome
from workers.memory import PATIENCE_S
from workers.pace import Pace

__all__ = ["Key", "LoadedVersion", "ModelPool", "News", "Users"]

TELL_EVERY_S = 10.0
"""While batches run, gateways are told so often how much each version is used."""
MAX_TRIES = 3
"""Loads of one version that turned out larger than promised while others were in use. From the second one on it is
known how large it is; a third one means that it grows."""

_log = get_logger()


class Thread(Protocol):
    """What the pool needs of `LoaderThread`, where each method is described."""

    pace: Pace

    def fileno(self) -> int: ...
    def estimate(self, key: Key, config: bytes) -> None: ...
    def load(self, key: Key, config: bytes) -> None: ...
    def give_back(self, key: Key, box: Box, event: str) -> None: ...
    def outcomes(self) -> list[Outcome]: ...
    def close(self, limit_s: float) -> bool: ...


class _Wanted(msgspec.Struct):
    """A place in the line."""

    config: bytes
    nbytes: int | None = None
    """What it will need, once that is known."""
    asked: bool = False
    since_s: float | None = None
    """When it was first in line and its size known."""
    waited_s: float = 0.0
    """From then on until it was loaded."""
    tries: int = 0
    dropped: bool = False
    """While it was loaded."""


class ModelPool:
    """Loaded versions by key, and the line of those to come."""

    def __init__(self, thread: Thread, budget_bytes: int, clock: Clock) -> None:
        self._thread = thread
        self._clock = clock
        self._held = Holdings(budget_bytes, thread.give_back, clock)
        self._line: dict[Key, _Wanted] = {}  # at most one per version of the repository
        self._loading: tuple[Key, _Wanted] | None = None
        self._look_s: float | None = None
        self._process_bytes: int | None = None
        """As it was last told; None: nothing has been loaded yet."""
        self._ran_since, self._told_s = False, clock()

    @property
    def users(self) -> Users:
        """Who uses the versions."""
        return self._held.users

    @users.setter
    def users(self, users: Users) -> None:
        self._held.users = users

    def fileno(self) -> int:
        """Becomes readable when `turn` has something."""
        return self._thread.fileno()

    def sleep_s(self) -> float | None:
        """After what time `turn` should be called, whatever happens; None: any."""
        return None if self._look_s is None else max(0.0, self._look_s - self._clock())

    def get(self, key: Key) -> LoadedVersion | None:
        """The version, if it is loaded."""
        return self._held.loaded.get(key)

    def takes(self, key: Key) -> bool:
        """Whether new batches may run on a version."""
        return key in self._held.loaded and key not in self._held.leaving

    def ran(self, loaded: LoadedVersion, rows: int) -> None:
        """A batch of a version has ended."""
        loaded.use.ran(rows, self._clock())
        self._ran_since = True
        self._thread.pace.ran()

    def preload(self, key: Key, config: bytes) -> None:
        """Want a version ahead of the gateways, and keep it until they say what they want."""
        self._held.at_start.add(key)
        self.want(key, config)

    def want(self, key: Key, config: bytes = b"") -> None:
        """Load a version unless it is loaded or stands in line; `turn` tells the outcome."""
        if self._loading is not None and self._loading[0] == key:
            self._loading[1].dropped = False
        elif not self.takes(key) and key not in self._line:
            self._line[key] = _Wanted(config)

    def drop(self, key: Key) -> None:
        """Forget a version; its memory is free for the next one."""
        self._line.pop(key, None)
        if self._loading is not None and self._loading[0] == key:
            self._loading[1].dropped = True
        self._held.drop(key)

    def keep(self, keys: set[Key]) -> None:
        """Forget all versions but these; what of them is not loaded yet has to be asked for."""
        loading = set() if self._loading is None else {self._loading[0]}
        for key in (self._held.loaded.keys() | self._line.keys() | loading) - keys:
            self.drop(key)

    def turn(self) -> News:
        """Do what can be done now, and say what has come about. Never blocks. Raises DeviceLost."""
        news = News()
        for outcome in self._thread.outcomes():
            self._take(outcome, news)
        self._held.let_go()
        self._look_s = None
        while self._line and self._loading is None and self._advance(news):
            pass
        if news.memory is None and self._ran_since and self._clock() - self._told_s > TELL_EVERY_S:
            news.memory = self.memory()
        if news.memory is not None:
            self._process_bytes = news.memory.process_bytes
            self._ran_since, self._told_s = False, self._clock()
        return news

    def memory(self) -> MemoryNote | None:
        """For a gateway that has just come; None when nothing has been loaded yet."""
        return None if self._process_bytes is None else self._held.note(self._process_bytes)

    def close(self, limit_s: float) -> bool:
        """Stop the thread. False when it is still inside a load after `limit_s` seconds."""
        return self._thread.close(limit_s)

    # ------------------------------------------------------------ the line

    def _advance(self, news: News) -> bool:
        """Load or refuse the first in line. False when it has to wait."""
        key, wanted = next(iter(self._line.items()))
        if not self._is_sized(key, wanted) or key in self._held.loaded:  # which is still leaving
            return False
        room = self._held.room_for(key, wanted.nbytes or 0)
        if room.wait:
            self._wait(wanted, room.until_s, news)
            return False
        del self._line[key]
        if room.refusal:
            self._refuse(key, room.refusal, room.told, news)
            return True
        news.evicted += self._held.evict(room.evict)
        wanted.waited_s = self._clock() - (wanted.since_s or 0.0)
        self._loading = key, wanted
        self._thread.load(key, wanted.config)
        return True

    def _is_sized(self, key: Key, wanted: _Wanted) -> bool:
        """Whether its size is known; if not, that is asked for."""
        if wanted.nbytes is None:
            wanted.nbytes = self._held.measured(key)
        if wanted.nbytes is None:
            if not wanted.asked:
                wanted.asked = True
                self._thread.estimate(key, wanted.config)
            return False
        wanted.since_s = self._clock() if wanted.since_s is None else wanted.since_s
        return True

    def _wait(self, wanted: _Wanted, until_s: float | None, news: News) -> None:
        """All that could go is in use or has just come."""
        patient_until_s = (wanted.since_s or 0.0) + PATIENCE_S
        if self._clock() >= patient_until_s:
            self._look_s = until_s
            news.evicted += self._held.send_away(wanted.nbytes or 0)
        else:
            self._look_s = patient_until_s if until_s is None else min(patient_until_s, until_s)

    def _refuse(self, key: Key, reason: str, told: str, news: News) -> None:
        _log.error("model not loaded", model=key.name, version=key.version, reason=reason)
        news.finished.append((key, Failure(Code.NOT_READY, told)))

    # ------------------------------------------------------------ what has come about

    def _take(self, outcome: Outcome, news: News) -> None:
        match outcome:
            case Estimated(key, nbytes) if key in self._line:
                if isinstance(nbytes, Failure):
                    del self._line[key]
                    news.finished.append((key, nbytes))
                else:
                    self._line[key].nbytes = nbytes
            case Finished():
                self._finish(outcome, news)
            case GaveBack():
                news.memory = self._held.gone(outcome)

    def _finish(self, finished: Finished, news: News) -> None:
        """A load has ended, as well or badly as it may."""
        if self._loading is None:
            raise RuntimeError("a load has ended that was not begun")
        (key, wanted), self._loading = self._loading, None
        box = finished.outcome
        if isinstance(box, Failure):
            if not wanted.dropped:
                news.finished.append((key, box))
        elif wanted.dropped:
            self._thread.give_back(key, box, "model dropped while it was loaded")
        elif not self._fits(key, wanted, box[0].memory_bytes, news):
            self._thread.give_back(key, box, "model does not fit")
        else:
            box[0].estimated_bytes = wanted.nbytes or 0
            box[0].stages_s["wait"] = wanted.waited_s
            self._held.add(box[0])
            news.finished.append((key, box[0]))
            news.memory = self._held.note(finished.process_bytes)

    def _fits(self, key: Key, wanted: _Wanted, nbytes: int, news: News) -> bool:
        """Whether there is room for what it was measured at; makes some if need be."""
        self._held.remember(key, nbytes)
        room = self._held.room_for(key, nbytes)
        if room.wait and wanted.tries + 1 < MAX_TRIES:
            # Larger than promised, and the others are in use: next time it waits for them first.
            again = _Wanted(wanted.config, nbytes, since_s=wanted.since_s, tries=wanted.tries + 1)
            self._line = {key: again, **self._line}
            return False
        if room.refusal or room.wait:
            grows = f"model {key.name} needs more memory each time it is loaded"
            self._refuse(key, room.refusal or grows, room.told or grows, news)
            return False
        news.evicted += self._held.evict(room.evict)
        return True

    def __repr__(self) -> str:
        return f"<ModelPool {self._held} line={[key.name for key in self._line]} loading={self._loading}>"
