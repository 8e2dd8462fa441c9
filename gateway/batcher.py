"""Which items run next, and when: the batcher. Pure policy of the gateway process; time is passed in.

One queue per `QueueKey` and priority, plus one for its suspects, which travel alone. Inside a queue the earliest
deadline that can still be met goes first (ties in order of arrival); among queues that are ready, the one of the
smallest priority number, then the one whose model has used the least worker time for its weight, then the one whose
oldest item has waited longest.

Cost: `add` and `remove` are O(log n) in the waiting items of one queue, `next_batch` O(k log n) for a batch of k items
plus one look at each queue that is not empty.
"""

from collections.abc import Callable, Container, Iterable
from itertools import count

from gateway.batch_queue import LATE, NOT_WAITING, Batch, BatchLimits, Place, Queue, QueuedItem
from gateway.batch_size import best_size
from gateway.cost_model import QueueKey
from gateway.fair_share import Shares

__all__ = ["Batch", "BatchLimits", "Batcher", "QueueKey", "QueuedItem"]

ALWAYS_S = float("-inf")
NEVER_S = float("inf")


class Batcher:
    """Collects items and says which of them run together, and when. One thread: the gateway's event loop.

    Whoever drives it calls `expired` and `next_batch` after each event (an item came or left, the worker has room, a
    batch was observed) and again at `due`.
    """

    __slots__ = (
        "_caution", "_late", "_lead_s", "_limits", "_margin_s", "_predict", "_queues", "_shares", "_tickets",
        "_waiting",
    )  # fmt: skip

    def __init__(
        self,
        predict: Callable[[QueueKey, int], float],
        *,
        caution: float = 1.1,
        margin_s: float = 0.002,
        lead_s: float = 0.002,
    ) -> None:
        """A batch must be done in time by `caution` times the prediction and `margin_s` on top.

        `predict` is the cost model's. Under overload every batch holds items at the edge of their deadline, so a batch
        that takes a little longer than predicted would be late as a whole. `margin_s` also covers the way from the
        worker to the caller. A batch that waits goes `lead_s` before it must: timers fire late.
        """
        self._predict = predict
        self._caution = caution
        self._margin_s = margin_s
        self._lead_s = lead_s
        self._limits: dict[int, BatchLimits] = {}
        self._queues: dict[Place, Queue] = {}  # only those that are not empty
        self._shares = Shares()
        self._waiting: dict[int, QueuedItem] = {}
        self._late: list[QueuedItem] = []
        self._tickets = count(1)

    def configure(self, model: int, limits: BatchLimits) -> None:
        """Set a model's limits, before its first item or at any later time; items that wait follow the new ones."""
        self._limits[model] = limits
        for queue in self._queues.values():
            if queue.key.model == model:
                queue.limits = limits.of(queue.key.bucket)

    def forget(self, model: int) -> list[QueuedItem]:
        """Drop a model's limits and queues; returns the items that were still waiting, which have left now."""
        self._limits.pop(model, None)
        left = [item for item in self._waiting.values() if item.key.model == model]
        for item in left:
            item.ticket = NOT_WAITING
            del self._waiting[item.item]
        for place in [place for place in self._queues if place[0].model == model]:
            del self._queues[place]
        self._shares.forget(model)
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
        most = max(limits.max_rows, limits.item_rows)
        if not 1 <= item.rows <= most:
            raise ValueError(f"item {item.item} has {item.rows} rows; allowed are 1..{most}")
        if item.item in self._waiting:
            raise ValueError(f"item {item.item} waits already")
        place = (key, item.priority, item.alone)
        queue = self._queues.get(place)
        if queue is None:
            share = self._shares.join(key.model, item.priority)
            queue = self._queues[place] = Queue(place, limits.of(key.bucket), share)
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
        queue = self._queues[found.key, found.priority, found.alone]
        queue.leave(found)
        self._settle(queue)
        return True

    def next_batch(
        self,
        now_s: float,
        *,
        worker_idle: bool,
        expected_rows: Callable[[int], int],
        start_s: float | None = None,
        models: Container[int] | None = None,
    ) -> Batch | None:
        """Take out the batch that should go to the worker now, or None. Call again until None while there is room.

        `worker_idle`: nothing runs or is staged. `expected_rows(model)`: rows that will be added soon (being
        prepared). `start_s`: when the worker would start this batch, behind what it holds; by default now. `models`:
        what it has loaded; by default all.

        No item is run for nobody: whose deadline has come, or would come before the batch is done, leaves through
        `expired` instead. An idle worker is given a queue's last item all the same, so that a cost that was
        overestimated can be learned anew.
        """
        self._set_late_aside(now_s)
        idle = int(worker_idle)
        if start_s is None:
            start_s = now_s
        while (queue := self._choose(now_s, idle, expected_rows, models)) is not None:
            if len(self._queues) > 1:
                queue = self._not_held_up(queue, start_s, models)
            room = self._room(queue, start_s, keep=idle)
            if room:
                return self._take(queue, room)
        return None

    def ran(self, batch: Batch, seconds: float) -> None:
        """Tell how long the worker really took for a batch: its model was charged as predicted."""
        limits = self._limits.get(batch.key.model)
        if limits is not None:
            more_s, batch.charged_s = seconds - batch.charged_s, seconds
            self._shares.correct(batch.key.model, batch.items[0].priority, more_s, limits.weight)

    def expired(self, now_s: float) -> list[QueuedItem]:
        """Take out and return the items whose deadline has come or, as `next_batch` found, can't be met any more."""
        self._set_late_aside(now_s)
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
        if self._late:
            return now_s
        due_s = NEVER_S
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

    def has_full(self, model: int) -> bool:
        """Whether enough waits for a whole batch of the model."""
        return any(queue.rows >= queue.limits.max_rows for queue in self._queues.values() if queue.key.model == model)

    def __len__(self) -> int:
        """Items that have not left yet."""
        return len(self._waiting)

    def __repr__(self) -> str:
        return f"<Batcher {', '.join(map(repr, self._queues.values())) or 'empty'}>"

    def _of(self, models: Container[int] | None) -> Iterable[Queue]:
        queues = self._queues.values()
        return queues if models is None else [queue for queue in queues if queue.key.model in models]

    def _choose(
        self, now_s: float, idle: int, expected_rows: Callable[[int], int], models: Container[int] | None
    ) -> Queue | None:
        chosen: Queue | None = None
        for queue in self._of(models):
            if chosen is not None and chosen.rank() < queue.rank():
                continue
            if self._ready_s(queue) <= now_s or (idle and expected_rows(queue.key.model) == 0):
                chosen = queue
        return chosen

    def _not_held_up(self, chosen: Queue, start_s: float, models: Container[int] | None) -> Queue:
        """The queue that goes instead: one of another model that comes first and only waits for company.

        It would be ready before the chosen batch is done, and then be held up by it.
        """
        done_s = start_s + self._predict(chosen.key, chosen.whole())
        first = chosen
        for queue in self._of(models):
            if queue.key.model != chosen.key.model and queue.rank() < first.rank() and self._ready_s(queue) < done_s:
                first = queue
        return first

    def _ready_s(self, queue: Queue) -> float:
        """From when on the queue goes whether or not the worker is idle."""
        limits = queue.limits
        if queue.solo or queue.rows >= limits.max_rows:  # full, or the next item would not fit
            return ALWAYS_S
        patience_s = queue.ages[0][0] + limits.max_wait_s
        needs_s = self._needs_s(queue.key, limits.padded(queue.rows))
        return min(patience_s, queue.deadlines[0][0] - needs_s - self._lead_s)

    def _needs_s(self, key: QueueKey, rows: int) -> float:
        """Seconds from the start of a batch until its answers are surely with the callers."""
        return self._predict(key, rows) * self._caution + self._margin_s

    def _room(self, queue: Queue, start_s: float, keep: int) -> int:
        """Rows of the queue's next batch: all that wait, where their deadlines allow.

        Where not, a smaller batch goes first if the rest can still be met after it; else the size that answers most
        rows in time per second, and who can't be met with it is set aside. (Always saving the tightest would shrink
        batches until everybody is late.) 0: none was left in time, so the queue is to be chosen again. An idle worker
        keeps one item in any case.
        """
        before = queue.items
        while queue.items > keep:  # those who could not even run alone
            head = queue.deadlines[0][2]
            if start_s + self._needs_s(queue.key, queue.limits.padded(head.rows)) <= head.deadline_s:
                break
            self._set_aside(queue)
        if queue.items < before:
            self._settle(queue)
            return 0
        head = queue.deadlines[0][2]
        room = queue.whole()
        if start_s + self._needs_s(queue.key, room) <= head.deadline_s or queue.items <= keep:
            return room
        room = best_size(queue, start_s, room, self._needs_s)
        done_s = start_s + self._needs_s(queue.key, room)
        while queue.deadlines[0][0] < done_s:
            self._set_aside(queue)
        return room

    def _take(self, queue: Queue, room: int) -> Batch:
        deadlines = queue.deadlines
        items: list[QueuedItem] = []
        rows = 0
        while deadlines and (not items or rows + deadlines[0][2].rows <= room):
            item = queue.pop()
            del self._waiting[item.item]
            items.append(item)
            rows += item.rows
            if queue.solo:
                break
        padded = queue.limits.padded(rows)
        seconds = self._predict(queue.key, padded)
        queue.share.charge(seconds, queue.limits.weight)
        self._settle(queue)
        return Batch(queue.key, items, rows, padded, seconds)

    def _set_late_aside(self, now_s: float) -> None:
        for queue in [queue for queue in self._queues.values() if queue.deadlines[0][0] <= now_s]:
            while queue.deadlines and queue.deadlines[0][0] <= now_s:
                self._set_aside(queue)
            self._settle(queue)

    def _set_aside(self, queue: Queue) -> None:
        item = queue.pop()
        item.ticket = LATE
        self._late.append(item)

    def _settle(self, queue: Queue) -> None:
        if queue.items:
            queue.tidy()
        else:
            del self._queues[queue.place]
            queue.share.queues -= 1
