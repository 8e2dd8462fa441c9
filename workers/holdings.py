"""The versions that are loaded, who uses them, and how they go. Of the worker's loop alone.

A version goes at once when it is idle. One in use leaves: it gets no new batches, and goes after its last one.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec

from shared.clock import Clock
from shared.messages import Failure, MemoryNote
from shared.model_messages import ModelUse
from workers.loaded import Key, LoadedVersion, Use
from workers.loader_thread import Box, GaveBack
from workers.memory import Held, Room, kept_until_s, next_to_go, room_for

REMEMBERED = 1024
"""Versions whose measured size is known after they are gone."""


class Users(Protocol):
    """What the gateways' sessions do with the versions."""

    def busy(self) -> Collection[Key]:
        """Those with a batch that waits or is under way."""

    def running(self) -> Collection[LoadedVersion]:
        """Those with a batch under way."""

    def pinned(self) -> Collection[Key]:
        """Those that some gateway never wants given up."""

    def wanted(self) -> Collection[Key]:
        """Those that some gateway has asked for."""


class Nobody:
    """Users before there are any."""

    def busy(self) -> Collection[Key]:
        """See Users."""
        return ()

    def running(self) -> Collection[LoadedVersion]:
        """See Users."""
        return ()

    def pinned(self) -> Collection[Key]:
        """See Users."""
        return ()

    def wanted(self) -> Collection[Key]:
        """See Users."""
        return ()


class News(msgspec.Struct):
    """What the gateways should know."""

    finished: list[tuple[Key, LoadedVersion | Failure]] = []
    """Loaded, or failed to."""
    evicted: list[Key] = []
    """Given up for another one's sake: no new batches."""
    memory: MemoryNote | None = None

    def __bool__(self) -> bool:
        return bool(self.finished or self.evicted or self.memory)


class GiveBack(Protocol):
    """`LoaderThread.give_back`."""

    def __call__(self, key: Key, box: Box, event: str) -> None:
        """See there."""


class Holdings:
    """Loaded versions by key."""

    def __init__(self, budget_bytes: int, give_back: GiveBack, clock: Clock) -> None:
        self.users: Users = Nobody()
        self.at_start: set[Key] = set()
        """Pinned until a gateway says what it wants."""
        self.loaded: dict[Key, LoadedVersion] = {}
        self.leaving: set[Key] = set()
        """Given up as far as the gateways know: they run the batches that were there when that was said."""
        self._budget_bytes = budget_bytes
        self._give_back = give_back
        self._clock = clock
        self._going: list[Box] = []
        """Dropped with a batch under way."""
        self._measured: dict[Key, int] = {}
        self._loads = self._evictions = 0
        self._last_gone = GaveBack(0, 0, 0)

    def add(self, loaded: LoadedVersion) -> None:
        """A version is ready."""
        loaded.use = Use(self._clock())
        self.loaded[loaded.key] = loaded
        self._loads += 1

    def drop(self, key: Key) -> None:
        """Nobody wants a version any more."""
        self.leaving.discard(key)
        self.at_start.discard(key)
        if key in self.loaded:
            self._going.append([self.loaded.pop(key)])

    def let_go(self) -> None:
        """Give back what is dropped or leaves, and is not in use any more."""
        if self._going:
            running = {id(loaded) for loaded in self.users.running()}
            # No variable may hold what is in a box: the loader's thread is the last to let go of it.
            self._going, gone = (
                [box for box in self._going if id(box[0]) in running],
                [box for box in self._going if id(box[0]) not in running],
            )
            for box in gone:
                self._give_back(box[0].key, box, "model unloaded")
        if self.leaving:
            self.evict(self.leaving.difference(self.users.busy()))

    def evict(self, keys: Collection[Key]) -> list[Key]:
        """Give versions up, which must be idle; returns those of them that no gateway has heard of yet."""
        news = [key for key in keys if key not in self.leaving]
        for key in keys:
            self.leaving.discard(key)
            self._evictions += 1
            self._give_back(key, [self.loaded.pop(key)], "model evicted")
        return news

    def room_for(self, key: Key, nbytes: int) -> Room:
        """See `workers.memory`."""
        return room_for(key, nbytes, self._held(), self._budget_bytes, self._clock())

    def send_away(self, nbytes: int) -> Sequence[Key]:
        """Let versions in use leave, so that there will be room for so much. Returns them."""
        if self.leaving:  # there may be room when these are gone
            return ()
        goes = next_to_go(nbytes, self._held(), self._budget_bytes, self._clock())
        leaving = [key for key in goes if key in self.loaded]  # the others are dropped, with a batch under way
        self.leaving.update(leaving)
        return leaving

    def measured(self, key: Key) -> int | None:
        """What a version needed when it was loaded last."""
        return self._measured.get(key)

    def remember(self, key: Key, nbytes: int) -> None:
        """A version was measured."""
        self._measured.pop(key, None)
        self._measured[key] = nbytes
        if len(self._measured) > REMEMBERED:
            del self._measured[next(iter(self._measured))]

    def gone(self, gave_back: GaveBack) -> MemoryNote:
        """The memory of a version is back."""
        self._last_gone = gave_back
        return self.note(gave_back.process_bytes)

    def note(self, process_bytes: int) -> MemoryNote:
        """For the gateways."""
        now_s, pinned = self._clock(), self._pinned()
        return MemoryNote(
            self._budget_bytes,
            sum(loaded.memory_bytes for loaded in self.loaded.values()),
            process_bytes,
            self._last_gone.freed_bytes,
            self._last_gone.expected_bytes,
            self._loads,
            self._evictions,
            [_use(loaded, key in pinned, now_s) for key, loaded in self.loaded.items()],
        )

    def _pinned(self) -> set[Key]:
        return {*self.users.pinned(), *self.at_start.difference(self.users.wanted())}

    def _held(self) -> list[Held]:
        busy, pinned = self.users.busy(), self._pinned()
        going = [Held(box[0].key, box[0].memory_bytes, box[0].use.last_s, busy=True) for box in self._going]
        return going + [
            Held(
                key,
                loaded.memory_bytes,
                loaded.use.last_s,
                key in pinned,
                key in busy,
                kept_until_s(loaded.use.since_s, loaded.use.batches, loaded.use.last_s),
            )
            for key, loaded in self.loaded.items()
        ]

    def __repr__(self) -> str:
        return f"<Holdings {[key.name for key in self.loaded]} leaving={[key.name for key in self.leaving]}>"


def _use(loaded: LoadedVersion, pinned: bool, now_s: float) -> ModelUse:  # noqa: FBT001 - a field of it
    use = loaded.use
    return ModelUse(
        loaded.key.name,
        loaded.key.version,
        loaded.memory_bytes,
        pinned,
        use.batches,
        use.rows,
        use.per_minute(now_s),
        max(0.0, now_s - use.last_s),
    )
