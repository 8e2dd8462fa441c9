"""The waiting items of one queue, by deadline and by age. Part of the batcher's pure policy in the gateway process.

Removal is lazy: the entry of an item that has left is skipped when it comes to the top of its heap, and a heap that is
mostly such entries is rebuilt, so everything is O(log n) on average and memory follows the items that really wait.
"""

from heapq import heapify, heappop, heappush

import msgspec

from gateway.cost_model import QueueKey
from gateway.fair_share import Share
from gateway.request import DEFAULT_PRIORITY
from shared.lengths import rows_within, sizes_within

NOT_WAITING = 0
LATE = -1
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
    priority: int = DEFAULT_PRIORITY
    """Smaller goes first. Items of different priority never share a queue."""
    chosen: bool = False
    """Whether its caller chose the version: a batch that holds one says nothing about a canary."""
    ticket: int = NOT_WAITING
    """The batcher's own mark: its order of arrival while it waits."""


class BatchLimits(msgspec.Struct, frozen=True):
    """One model's batching, as in the settings group `batching`."""

    max_rows: int
    max_wait_s: float
    sizes: tuple[int, ...]
    """Rising, the last one is `max_rows`."""
    weight: float = 1.0
    """Share of the worker's time, in relation to the other models that have something to run."""
    item_rows: int = 0
    """Rows that an item may have, where that is more than `max_rows`: it was made before the limit was lowered, or is
    of a bucket whose batches have fewer rows."""
    max_tokens: int | None = None
    """Rows times the longest free dimension of a batch; an item that has more by itself runs alone."""

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] < 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes {self.sizes} must be positive and rise")
        if self.sizes[-1] != self.max_rows:
            raise ValueError(f"sizes {self.sizes} must end with max_rows ({self.max_rows})")
        if not 0 <= self.max_wait_s < float("inf"):
            raise ValueError(f"max_wait_s ({self.max_wait_s}) must be at least 0 and finite")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight ({self.weight}) must be above 0 and finite")

    def capped(self, rows: int) -> "BatchLimits":
        """The same for a worker whose memory holds `rows` at once."""
        if rows >= self.max_rows:
            return self
        sizes = sizes_within(self.sizes, rows)
        return msgspec.structs.replace(self, max_rows=rows, sizes=sizes, item_rows=max(self.max_rows, self.item_rows))

    def of(self, bucket: tuple[int, ...]) -> "BatchLimits":
        """The same for the queue of one bucket."""
        return self.capped(rows_within(self.max_tokens, bucket, self.max_rows))

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
    charged_s: float = 0.0
    """Seconds of worker time that its model has been charged for."""
    cost_rows: int = 0
    """Rows that the device computed for it, padding included; known once it is back."""


Place = tuple[QueueKey, int, bool]
"""Whose queue: key, priority, and whether it is for suspects, who travel alone."""

Entry = tuple[float, int, QueuedItem]
"""(deadline or waiting since, ticket, item); of an item that still waits as long as the tickets agree."""


class Queue:
    """The waiting items of one key. Both heaps start with the entry of an item that still waits."""

    __slots__ = ("ages", "deadlines", "items", "key", "limits", "place", "priority", "rows", "share", "solo")

    def __init__(self, place: Place, limits: BatchLimits, share: Share) -> None:
        self.place = place
        self.share = share
        self.key, self.priority, self.solo = place
        self.limits = limits
        self.items = 0
        self.rows = 0
        self.deadlines: list[Entry] = []
        self.ages: list[Entry] = []

    def rank(self) -> tuple[int, float, Entry]:
        """The smallest goes first: by priority, then the model that has used the least, then the oldest item."""
        return self.priority, self.share.start_s, self.ages[0]

    def whole(self) -> int:
        """The size of the next batch when all who wait get in, as far as a batch can be: a suspect is alone."""
        rows = self.deadlines[0][2].rows if self.solo else min(self.rows, self.limits.max_rows)
        return self.limits.padded(rows)

    def push(self, item: QueuedItem, ticket: int) -> None:
        """Let an item wait; tickets rise."""
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

    def urgent(self, before_s: float, most_rows: int) -> tuple[list[QueuedItem], float]:
        """Look at the items with deadlines before `before_s`, the earliest first, but at no more than `most_rows`.

        Also returns the earliest deadline of all others.
        """
        deadlines = self.deadlines
        seen: list[Entry] = []
        rows = 0
        while deadlines and deadlines[0][0] < before_s and rows < most_rows:
            entry = heappop(deadlines)
            if entry[2].ticket == entry[1]:
                seen.append(entry)
                rows += entry[2].rows
        while deadlines and deadlines[0][2].ticket != deadlines[0][1]:
            heappop(deadlines)
        next_s = deadlines[0][0] if deadlines else float("inf")
        for entry in seen:
            heappush(deadlines, entry)
        return [entry[2] for entry in seen], next_s

    def leave(self, item: QueuedItem) -> None:
        """Its entries are left behind; `tidy` must follow."""
        item.ticket = NOT_WAITING
        self.items -= 1
        self.rows -= item.rows

    def __repr__(self) -> str:
        alone = " alone" if self.solo else ""
        return f"{self.key.model}{self.key.bucket or ''}{alone}: {self.items} items {self.rows} rows"

    def tidy(self) -> None:
        """Bring a waiting item to the top of each heap again."""
        for heap in (self.deadlines, self.ages):
            while heap and heap[0][2].ticket != heap[0][1]:
                heappop(heap)
            if len(heap) > 2 * self.items + SPARE_ENTRIES:
                heap[:] = [entry for entry in heap if entry[2].ticket == entry[1]]
                heapify(heap)
