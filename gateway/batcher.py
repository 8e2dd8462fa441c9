"""Which items run next, and when: the batcher. Pure policy of the gateway process; time is passed in.

One queue per `QueueKey`, plus one for its suspects, which travel alone. Inside a queue the earliest deadline goes
first (ties in order of arrival); among queues that are ready, the one whose oldest item has waited longest.

Cost: `add` and `remove` are O(log n) in the waiting items of one queue, `next_batch` O(k log n) for a batch of k items
plus one look at each queue that is not empty. Removal is lazy: an entry whose item has left is skipped when it comes
to the top, and a heap that is mostly such entries is rebuilt.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count

import msgspec

from gateway.cost_model import QueueKey

__all__ = ["Batch", "BatchLimits", "Batcher", "QueueKey", "QueuedItem"]

NOT_WAITING = 0
LATE = -1
ALWAYS_S = float("-inf")
NEVER_S = float("inf")
SPARE_ENTRIES = 64
"""A heap may hold this many left entries beyond the live ones before it is rebuilt."""


class QueuedItem(msgspec.Struct, eq=False, gc=False):
    """One item that waits for company. May be added again (a second try) once it has left the batcher.

    Nothing in it may be changed while it waits.
    """

    item: int
    """Unique among waiting items."""
    key: QueueKey
    rows: int
    deadline_s: float
    """Absolute; once reached, the item leaves through `expired`."""
    queued_s: float
    """Since when it waits. A second try may carry its first time."""
    alone: bool = False
    """A suspect after a process death: runs without company, and so never waits for any."""
    ticket: int = NOT_WAITING
    """The batcher's own mark: its order of arrival while it waits."""


class BatchLimits(msgspec.Struct, frozen=True):
    """One model's batching, as in the settings group `batching`."""

    max_rows: int
    max_wait_s: float
    sizes: tuple[int, ...]
    """Rising, the last one is `max_rows`."""

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] < 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes {self.sizes} must be positive and rise")
        if self.sizes[-1] != self.max_rows:
            raise ValueError(f"sizes {self.sizes} must end with max_rows ({self.max_rows})")
        if not 0 <= self.max_wait_s < NEVER_S:
            raise ValueError(f"max_wait_s ({self.max_wait_s}) must be at least 0 and finite")

    def padded(self, rows: int) -> int:
        """The smallest allowed size that holds `rows`; `rows` itself above the largest one."""
        for size in self.sizes:
            if size >= rows:
                return size
        return rows


class Batch(msgspec.Struct, eq=False, gc=False):
    """What runs as one forward pass, in order of deadline."""

    key: QueueKey
    items: list[QueuedItem]
    rows: int
    padded_rows: int


_Entry = tuple[float, int, QueuedItem]
"""(deadline or waiting since, ticket, item); of an item that still waits as long as the tickets agree."""


class _Queue:
    """The waiting items of one key. Both heaps start with the entry of an item that still waits."""

    __slots__ = ("ages", "deadlines", "items", "key", "limits", "rows", "solo")

    def __init__(self, key: QueueKey, limits: BatchLimits, *, solo: bool) -> None:
        self.key = key
        self.limits = limits
        self.solo = solo
        self.items = 0
        self.rows = 0
        self.deadlines: list[_Entry] = []
        self.ages: list[_Entry] = []

    def push(self, item: QueuedItem, ticket: int) -> None:
        item.ticket = ticket
        self.items += 1
        self.rows += item.rows
        heappush(self.deadlines, (item.deadline_s, ticket, item))
        heappush(self.ages, (item.queued_s, ticket, item))

    def pop(self) -> QueuedItem:
        """Take out the item with the earliest deadline; `tidy` must follow."""
        item = heappop(self.deadlines)[2]
        self.leave(item)
        deadlines = self.deadlines
        while deadlines and deadlines[0][2].ticket != deadlines[0][1]:
            heappop(deadlines)
        return item

    def leave(self, item: QueuedItem) -> None:
        """Its entries are left behind; `tidy` must follow."""
        item.ticket = NOT_WAITING
        self.items -= 1
        self.rows -= item.rows

    def tidy(self) -> None:
        """Bring a waiting item to the top of each heap again."""
        for heap in (self.deadlines, self.ages):
            while heap and heap[0][2].ticket != heap[0][1]:
                heappop(heap)
            if len(heap) > 2 * self.items + SPARE_ENTRIES:
                heap[:] = [entry for entry in heap if entry[2].ticket == entry[1]]
                heapify(heap)


class Batcher:
    """Collects items and says which of them run together, and when. One thread: the gateway's event loop.

    Whoever drives it calls `expired` and `next_batch` after each event (an item came or left, the worker has room, a
    batch was observed) and again at `due`.
    """

    __slots__ = ("_late", "_limits", "_margin_s", "_predict", "_queues", "_tickets", "_waiting")

    def __init__(self, predict: Callable[[QueueKey, int], float], *, margin_s: float = 0.002) -> None:
        """`predict` is the cost model's; `margin_s` is what a result needs on top, from the worker to the caller."""
        self._predict = predict
        self._margin_s = margin_s
        self._limits: dict[int, BatchLimits] = {}
        self._queues: dict[tuple[QueueKey, bool], _Queue] = {}  # only those that are not empty
        self._waiting: dict[int, QueuedItem] = {}
        self._late: list[QueuedItem] = []
        self._tickets = count(1)

    def configure(self, model: int, limits: BatchLimits) -> None:
        """Set a model's limits, before its first item or at any later time; items that wait follow the new ones."""
        self._limits[model] = limits
        for queue in self._queues.values():
            if queue.key.model == model:
                queue.limits = limits

    def forget(self, model: int) -> list[QueuedItem]:
        """Drop a model's limits and queues; returns the items that were still waiting, which have left now."""
        self._limits.pop(model, None)
        left = [item for item in self._waiting.values() if item.key.model == model]
        for item in left:
            item.ticket = NOT_WAITING
            del self._waiting[item.item]
        for place in [place for place in self._queues if place[0].model == model]:
            del self._queues[place]
        return left

    def add(self, item: QueuedItem) -> None:
        """Let an item wait.

        Raises:
            ValueError: a bug of the caller: unknown model, rows outside 1..max_rows, or it waits already.
        """
        key = item.key
        limits = self._limits.get(key.model)
        if limits is None:
            raise ValueError(f"model {key.model} is not configured")
        if not 1 <= item.rows <= limits.max_rows:
            raise ValueError(f"item {item.item} has {item.rows} rows; allowed are 1..{limits.max_rows}")
        if item.item in self._waiting:
            raise ValueError(f"item {item.item} waits already")
        place = (key, item.alone)
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues[place] = _Queue(key, limits, solo=item.alone)
        queue.push(item, next(self._tickets))
        self._waiting[item.item] = item

    def remove(self, item: int) -> bool:
        """Take an item out, since its caller has left; False when it doesn't wait (any more)."""
        found = self._waiting.pop(item, None)
        if found is None:
            return False
        if found.ticket == LATE:
            found.ticket = NOT_WAITING
            return True
        queue = self._queues[found.key, found.alone]
        queue.leave(found)
        self._settle(queue)
        return True

    def next_batch(self, now_s: float, *, worker_idle: bool, expected_rows: Callable[[int], int]) -> Batch | None:
        """Take out the batch that should go to the worker now, or None. Call again until None while there is room.

        `worker_idle`: nothing runs or is staged. `expected_rows(model)`: rows that will be added soon (being
        prepared). Items whose deadline has come are never in a batch; they leave through `expired`.
        """
        self._set_late_aside(now_s)
        chosen: _Queue | None = None
        for queue in self._queues.values():
            if chosen is not None and chosen.ages[0] < queue.ages[0]:
                continue
            if self._ready_s(queue) <= now_s or (worker_idle and expected_rows(queue.key.model) == 0):
                chosen = queue
        return self._take(chosen) if chosen is not None else None

    def expired(self, now_s: float) -> list[QueuedItem]:
        """Take out and return the items whose deadline has come."""
        self._set_late_aside(now_s)
        if not self._late:
            return []
        late, self._late = self._late, []
        expired = []
        for item in late:
            if item.ticket == LATE:  # not removed since
                item.ticket = NOT_WAITING
                del self._waiting[item.item]
                expired.append(item)
        return expired

    def due(self, now_s: float) -> float | None:
        """The earliest time from `now_s` on at which `next_batch` or `expired` can change without a new event.

        None when there is none. Later than `now_s` unless items wait to be taken by `expired`; a batch that is
        ready already but has no worker gives no time, since only a worker with room changes that.
        """
        due_s = NEVER_S
        if self._late:
            return now_s
        for queue in self._queues.values():
            deadline_s = queue.deadlines[0][0]
            if deadline_s <= now_s:
                return now_s
            ready_s = self._ready_s(queue)
            due_s = min(due_s, deadline_s, ready_s if ready_s > now_s else NEVER_S)
        return due_s if due_s < NEVER_S else None

    def waiting_rows(self, model: int) -> int:
        """Rows of a model that wait for a batch."""
        return sum(queue.rows for queue in self._queues.values() if queue.key.model == model)

    def __len__(self) -> int:
        """Items that have not left yet."""
        return len(self._waiting)

    def __repr__(self) -> str:
        queues = (
            f"{queue.key.model}{queue.key.bucket or ''}{' alone' if queue.solo else ''}: "
            f"{queue.items} items {queue.rows} rows"
            for queue in self._queues.values()
        )
        return f"<Batcher {', '.join(queues) or 'empty'}>"

    def _ready_s(self, queue: _Queue) -> float:
        """From when on the queue goes whether or not the worker is idle."""
        limits = queue.limits
        if queue.solo or queue.rows >= limits.max_rows:  # full, or the next item would not fit
            return ALWAYS_S
        patience_s = queue.ages[0][0] + limits.max_wait_s
        cost_s = self._predict(queue.key, limits.padded(queue.rows))
        return min(patience_s, queue.deadlines[0][0] - cost_s - self._margin_s)

    def _take(self, queue: _Queue) -> Batch:
        limits = queue.limits
        deadlines = queue.deadlines
        items: list[QueuedItem] = []
        rows = 0
        while deadlines and (not items or rows + deadlines[0][2].rows <= limits.max_rows):
            item = queue.pop()
            del self._waiting[item.item]
            items.append(item)
            rows += item.rows
            if queue.solo:
                break
        self._settle(queue)
        return Batch(queue.key, items, rows, limits.padded(rows))

    def _set_late_aside(self, now_s: float) -> None:
        for queue in [queue for queue in self._queues.values() if queue.deadlines[0][0] <= now_s]:
            while queue.deadlines and queue.deadlines[0][0] <= now_s:
                item = queue.pop()
                item.ticket = LATE
                self._late.append(item)
            self._settle(queue)

    def _settle(self, queue: _Queue) -> None:
        if queue.items:
            queue.tidy()
        else:
            del self._queues[queue.key, queue.solo]
