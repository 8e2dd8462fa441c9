"""The batcher against a plain reading of its rules, over random sequences of events."""

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.batcher import Batch, Batcher, BatchLimits, QueuedItem, QueueKey
from tests.support.batching import LIMITS, numbers, somebody

# All times are multiples of 0.5, so that sums are exact.

PATIENCE = st.integers(0, 60).map(lambda half: 8 + half / 2 if half < 40 else (half - 40) / 2)  # mostly patient
KEYS = st.sampled_from([QueueKey(0), QueueKey(0, (64,)), QueueKey(1)])
COST = {0: (1.0, 0.5), 1: (0.5, 0.0)}


def cost(key: QueueKey, rows: int) -> float:
    fixed, row = COST[key.model]
    return fixed + row * rows


class PlainBatcher:
    """The rules in the fewest words: one list in order of arrival, sorted whenever something is asked."""

    def __init__(self) -> None:
        self.limits = {0: LIMITS, 1: BatchLimits(max_rows=3, max_wait_s=2.5, sizes=(2, 3), weight=2.0)}
        self.items: list[QueuedItem] = []
        self.late: list[int] = []
        self.start_s = {0: 0.0, 1: 0.0}
        self.virtual_s = 0.0

    def add(self, new: QueuedItem) -> None:
        model = new.key.model
        if not any(i.key.model == model and i.item not in self.late for i in self.items):
            self.start_s[model] = max(self.start_s[model], self.virtual_s)
        self.items.append(new)

    def expired(self, now_s: float) -> list[int]:
        late = [i.item for i in self.items if i.deadline_s <= now_s or i.item in self.late]
        self.items = [i for i in self.items if i.item not in late]
        return late

    def next_batch(self, now_s: float, idle: bool, expected: int) -> list[int]:
        self.late += [i.item for i in self.items if i.deadline_s <= now_s and i.item not in self.late]
        while queue := self.chosen(now_s, idle, expected):
            before = len(queue)
            while len(queue) > idle and queue[0].deadline_s < now_s + self.cost(queue[:1]):
                self.late.append(queue.pop(0).item)
            if len(queue) < before:
                continue
            room = self.padded(queue[:1] if queue[0].alone else queue)
            if len(queue) > idle and queue[0].deadline_s < now_s + cost(queue[0].key, room):
                room = self.most_in_time(queue, now_s, room)
                while queue[0].deadline_s < now_s + cost(queue[0].key, room):
                    self.late.append(queue.pop(0).item)
            batch = [queue[0]]
            for candidate in queue[1:]:
                if candidate.alone or sum(i.rows for i in batch) + candidate.rows > room:
                    break
                batch.append(candidate)
            self.items = [i for i in self.items if i not in batch]
            self.charge(batch)
            return [i.item for i in batch]
        return []

    def chosen(self, now_s: float, idle: bool, expected: int) -> list[QueuedItem]:
        """The queue that goes, by deadline."""
        alive = [i for i in self.items if i.item not in self.late]
        queues = [
            sorted((i for i in alive if (i.key, i.alone) == place), key=lambda i: i.deadline_s)
            for place in {(i.key, i.alone) for i in alive}
        ]
        ready = [queue for queue in queues if self.ready_s(queue) <= now_s or (idle and expected == 0)]
        if not ready:
            return []
        first = min(ready, key=self.rank)
        done_s = now_s + self.cost(first[:1] if first[0].alone else first)
        others = [queue for queue in queues if queue[0].key.model != first[0].key.model]
        return min([first, *(queue for queue in others if self.ready_s(queue) < done_s)], key=self.rank)

    def ready_s(self, queue: list[QueuedItem]) -> float:
        """When the queue goes although the worker is busy."""
        limits = self.limits[queue[0].key.model]
        if queue[0].alone or sum(i.rows for i in queue) >= limits.max_rows:
            return -math.inf
        return min(min(i.queued_s for i in queue) + limits.max_wait_s, queue[0].deadline_s - self.cost(queue))

    def rank(self, queue: list[QueuedItem]) -> tuple[float, float, int]:
        return self.start_s[queue[0].key.model], *min((i.queued_s, self.items.index(i)) for i in queue)

    def charge(self, batch: list[QueuedItem]) -> None:
        model, cost_s = batch[0].key.model, self.cost(batch) / self.limits[batch[0].key.model].weight
        start_s = max(self.start_s[model], self.virtual_s - cost_s)
        self.virtual_s = max(self.virtual_s, start_s)
        self.start_s[model] = start_s + cost_s

    def ran(self, model: int, more_s: float) -> None:
        self.start_s[model] += more_s / self.limits[model].weight

    def padded(self, queue: list[QueuedItem]) -> int:
        limits = self.limits[queue[0].key.model]
        rows = min(sum(i.rows for i in queue), limits.max_rows)
        return min(size for size in limits.sizes if size >= rows)

    def cost(self, queue: list[QueuedItem]) -> float:
        return cost(queue[0].key, self.padded(queue))

    def most_in_time(self, queue: list[QueuedItem], now_s: float, whole: int) -> int:
        key = queue[0].key
        limits = self.limits[key.model]
        whole_s = cost(key, whole)
        most = [number for number in range(len(queue)) if sum(i.rows for i in queue[:number]) < 4 * limits.max_rows][-1]
        seen = [i for i in queue[: most + 1] if i.deadline_s < now_s + whole_s]
        others = queue[len(seen) :]
        others_s = others[0].deadline_s if others else math.inf
        spare = max(size for size in limits.sizes if size <= whole and now_s + cost(key, size) <= queue[0].deadline_s)
        unlucky = [i for number, i in enumerate(seen) if sum(j.rows for j in seen[: number + 1]) > spare]
        if now_s + cost(key, spare) + whole_s <= (unlucky[0].deadline_s if unlucky else others_s):
            return spare

        def rate(size: int) -> float:
            done_s = now_s + cost(key, size)
            in_time = sum(i.rows for i in seen if i.deadline_s >= done_s)
            in_time += sum(i.rows for i in others) if others_s >= done_s else 0
            return min(in_time, size) / cost(key, size)

        return max((size for size in reversed(limits.sizes) if size <= whole), key=rate)


NEW = st.tuples(st.integers(1, 3), PATIENCE, st.sampled_from([False, False, False, True]))
ADD = st.tuples(st.just("add"), KEYS, st.lists(NEW, min_size=1, max_size=6))
STEP = st.tuples(st.just("step"), st.sampled_from([0.0, 0.5, 1.0, 3.0]))
BATCH = st.tuples(st.just("batch"), st.booleans(), st.integers(0, 1))
REMOVE = st.tuples(st.just("remove"), st.integers(0, 30))
EXPIRED = st.tuples(st.just("expired"))
RAN = st.tuples(st.just("ran"), st.sampled_from([0.0, 0.5, 1.0, 4.0]))
STEPS: st.SearchStrategy[list[tuple[Any, ...]]] = st.lists(
    st.one_of(ADD, STEP, BATCH, REMOVE, EXPIRED, RAN), max_size=40
)


class Play:
    """One sequence of events on both batchers, compared after each one."""

    def __init__(self) -> None:
        self.plain = PlainBatcher()
        self.real = Batcher(cost, caution=1.0, margin_s=0.0, lead_s=0.0)
        for model, limits in self.plain.limits.items():
            self.real.configure(model, limits)
        self.now_s = 0.0
        self.added: list[int] = []
        self.left: list[int] = []
        self.late: list[int] = []
        self.sent: list[Batch] = []

    def add(self, key: QueueKey, together: list[tuple[int, float, bool]]) -> None:
        for rows, patience_s, alone in together:
            new = QueuedItem(len(self.added), key, rows, self.now_s + patience_s, self.now_s, alone=alone)
            self.added.append(new.item)
            self.real.add(new)
            self.plain.add(new)

    def step(self, seconds: float) -> None:
        self.now_s += seconds

    def batch(self, idle: bool, expected: int) -> None:
        batch = self.real.next_batch(self.now_s, worker_idle=idle, expected_rows=lambda _: expected)
        assert numbers(batch) == self.plain.next_batch(self.now_s, idle, expected)
        if batch is None:
            return
        self.left += numbers(batch)
        self.sent.append(batch)
        limits = self.plain.limits[batch.key.model]
        assert batch.rows == sum(i.rows for i in batch.items) <= limits.max_rows
        assert batch.padded_rows == min(size for size in limits.sizes if size >= batch.rows)
        assert len(batch.items) == 1 or not any(i.alone for i in batch.items)
        assert {i.key for i in batch.items} == {batch.key}
        order = [(i.deadline_s, i.item) for i in batch.items]
        assert order == sorted(order)
        assert all(i.deadline_s > self.now_s for i in batch.items)

    def remove(self, number: int) -> None:
        waits = any(i.item == number for i in self.plain.items)
        self.plain.items = [i for i in self.plain.items if i.item != number]
        assert self.real.remove(number) == waits
        if waits:
            self.left.append(number)

    def ran(self, part: float) -> None:
        """The oldest batch is done, and took `part` of what was predicted."""
        if self.sent:
            batch = self.sent.pop(0)
            real_s = part * batch.charged_s
            self.plain.ran(batch.key.model, real_s - batch.charged_s)
            self.real.ran(batch, real_s)

    def expired(self) -> None:
        late = [i.item for i in self.real.expired(self.now_s)]
        assert sorted(late) == self.plain.expired(self.now_s)
        self.left += late

    def check(self) -> None:
        assert len(self.real) == len(self.plain.items)
        assert len(self.left) == len(set(self.left))
        assert sorted(self.left + [i.item for i in self.plain.items]) == self.added


def play(steps: list[tuple[Any, ...]]) -> Play:
    game = Play()
    for name, *values in steps:
        getattr(game, name)(*values)
        game.check()
    return game


@settings(deadline=None)
@given(STEPS)
def test_it_agrees_with_the_plain_reading_and_every_item_leaves_exactly_once(steps: list[tuple[Any, ...]]) -> None:
    game = play(steps)
    game.step(1000.0)
    game.expired()
    game.check()
    assert sorted(game.left) == game.added
    assert repr(game.real) == "<Batcher empty>"
    assert game.real.due(game.now_s) is None


def drained(steps: list[tuple[Any, ...]]) -> Play:
    """As its driver leaves the batcher while the worker has room for more."""
    game = play(steps)
    game.expired()
    before = -1
    while len(game.left) != before:
        before = len(game.left)
        game.batch(False, 1)
        game.expired()
    return game


@settings(deadline=None)
@given(STEPS)
def test_due_is_never_later_than_the_true_next_change(steps: list[tuple[Any, ...]]) -> None:
    def outcome(at_s: float) -> tuple[list[int], list[int]]:
        fresh = drained(steps).real
        late = [i.item for i in fresh.expired(at_s)]
        return late, numbers(fresh.next_batch(at_s, worker_idle=False, expected_rows=somebody))

    game = drained(steps)
    due_s = game.real.due(game.now_s)
    assert outcome(game.now_s) == ([], [])
    end_s = max((i.deadline_s for i in game.plain.items), default=game.now_s)
    times = (game.now_s + half / 2 for half in range(1, int((end_s - game.now_s) * 2) + 1))
    assert due_s == next((at_s for at_s in times if outcome(at_s) != ([], [])), None)


@settings(deadline=None)
@given(STEPS)
def test_due_tells_a_driver_without_room_the_next_deadline_in_time_and_never_makes_it_spin(
    steps: list[tuple[Any, ...]],
) -> None:
    game = play(steps)
    for _ in range(3 * len(game.added) + 1):
        game.expired()
        due_s = game.real.due(game.now_s)
        if due_s is None:
            break
        assert game.now_s < due_s <= min(i.deadline_s for i in game.plain.items)
        game.now_s = due_s
    assert len(game.real) == 0


@settings(deadline=None)
@given(STEPS)
def test_nothing_waits_past_max_wait_while_the_worker_has_room(steps: list[tuple[Any, ...]]) -> None:
    game = drained(steps)
    for found in game.plain.items:
        assert game.now_s < found.queued_s + game.plain.limits[found.key.model].max_wait_s
