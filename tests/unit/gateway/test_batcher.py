"""The batcher against a plain reading of its rules, by properties and by examples; time is a number here."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.batch_queue import SPARE_ENTRIES
from gateway.batcher import Batch, Batcher, BatchLimits, QueuedItem, QueueKey

KEY = QueueKey(0)
LIMITS = BatchLimits(max_rows=8, max_wait_s=4.0, sizes=(1, 2, 4, 8))


def free(key: QueueKey, rows: int) -> float:
    return 0.0


def nobody(model: int) -> int:
    return 0


def somebody(model: int) -> int:
    return 1


def batcher(limits: BatchLimits = LIMITS, predict: Callable[[QueueKey, int], float] = free, **spare: float) -> Batcher:
    made = Batcher(predict, **({"caution": 1.0, "margin_s": 0.0, "lead_s": 0.0} | spare))
    made.configure(0, limits)
    made.configure(1, limits)
    return made


def item(
    number: int,
    rows: int = 1,
    deadline_s: float = 100.0,
    queued_s: float = 0.0,
    key: QueueKey = KEY,
    alone: bool = False,
) -> QueuedItem:
    return QueuedItem(number, key, rows, deadline_s, queued_s, alone=alone)


def numbers(batch: Batch | None) -> list[int]:
    return [] if batch is None else [found.item for found in batch.items]


def waiting_for_company(queue: Batcher, now_s: float) -> list[int]:
    return numbers(queue.next_batch(now_s, worker_idle=True, expected_rows=somebody))


# ------------------------------------------------------------------ when a batch goes


def test_an_idle_worker_with_nobody_expected_takes_a_single_item_at_once() -> None:
    queue = batcher()
    queue.add(item(1))
    batch = queue.next_batch(0.0, worker_idle=True, expected_rows=nobody)
    assert batch is not None
    assert (numbers(batch), batch.rows, batch.padded_rows, batch.key) == ([1], 1, 1, KEY)
    assert len(queue) == 0


def test_a_single_item_waits_for_those_who_are_expected_but_not_past_max_wait() -> None:
    queue = batcher()
    queue.add(item(1, queued_s=1.0))
    assert waiting_for_company(queue, 1.0) == []
    assert queue.due(1.0) == 5.0
    assert waiting_for_company(queue, math.nextafter(5.0, 0)) == []
    assert waiting_for_company(queue, 5.0) == [1]


def test_a_busy_worker_lets_items_wait_for_company_even_when_nobody_is_expected() -> None:
    queue = batcher()
    queue.add(item(1))
    assert queue.next_batch(0.0, worker_idle=False, expected_rows=nobody) is None
    assert numbers(queue.next_batch(4.0, worker_idle=False, expected_rows=nobody)) == [1]


def test_a_full_batch_goes_at_once() -> None:
    queue = batcher()
    for number in range(8):
        assert waiting_for_company(queue, 0.0) == []
        queue.add(item(number))
    assert waiting_for_company(queue, 0.0) == list(range(8))


def test_a_batch_goes_when_the_next_item_would_not_fit() -> None:
    queue = batcher()
    queue.add(item(1, rows=5))
    assert waiting_for_company(queue, 0.0) == []
    queue.add(item(2, rows=4))
    batch = queue.next_batch(0.0, worker_idle=False, expected_rows=somebody)
    assert batch is not None
    assert (numbers(batch), batch.rows, batch.padded_rows) == ([1], 5, 8)
    assert waiting_for_company(queue, 0.0) == []
    assert len(queue) == 1


def test_a_batch_goes_when_its_tightest_deadline_leaves_just_its_own_time() -> None:
    queue = batcher(predict=lambda _, rows: 0.25 + 0.125 * rows, caution=2.0, margin_s=0.125, lead_s=0.125)
    queue.add(item(1, rows=2, deadline_s=50.0))
    queue.add(item(2, rows=1, deadline_s=3.5))
    assert queue.due(0.0) == 3.5 - (0.5 + 0.25 * 4) - 0.25  # three rows run as four
    assert waiting_for_company(queue, 1.74) == []
    assert waiting_for_company(queue, 1.75) == [2, 1]


def test_a_deadline_that_can_not_be_met_any_more_leaves_through_expired_and_is_not_run() -> None:
    queue = batcher(predict=lambda _, rows: 4.0 + 0.5 * rows)
    for number in range(8):
        queue.add(item(number, deadline_s=5.5 + number))
    batch = queue.next_batch(0.0, worker_idle=False, expected_rows=somebody, start_s=1.0)
    assert numbers(batch) == [2, 3, 4, 5]  # all eight would be done at 9.0, too late for half of them; four at 7.0
    assert queue.due(0.0) == 0.0
    assert [late.item for late in queue.expired(0.0)] == [0, 1]


def test_a_tight_deadline_goes_first_in_a_small_batch_when_the_rest_can_wait() -> None:
    queue = batcher(predict=lambda _, rows: 1.0 * rows)
    for number in range(7):
        queue.add(item(number, deadline_s=15.0 + number))  # done at 7.0, then all of them at 15.0
    queue.add(item(7, deadline_s=7.0))
    batch = queue.next_batch(3.0, worker_idle=True, expected_rows=nobody)
    assert batch is not None
    assert (numbers(batch), batch.padded_rows) == ([7, 0, 1, 2], 4)
    assert queue.expired(3.0) == []


def test_a_batch_that_is_not_full_is_made_smaller_when_that_answers_more_in_time() -> None:
    queue = batcher(predict=lambda _, rows: 1.0 * rows)
    for number in range(5):
        queue.add(item(number, deadline_s=9.0))
    batch = queue.next_batch(5.0, worker_idle=True, expected_rows=nobody)
    assert batch is not None
    assert (numbers(batch), batch.padded_rows) == ([0, 1, 2, 3], 4)
    assert numbers(queue.next_batch(5.0, worker_idle=False, expected_rows=somebody, start_s=9.0)) == []
    assert [late.item for late in queue.expired(5.0)] == [4]


def test_a_queue_that_was_full_of_hopeless_items_waits_for_company_again() -> None:
    queue = batcher(predict=lambda *_: 5.0)
    for number in range(8):
        queue.add(item(number, deadline_s=4.0 if number < 6 else 50.0))
    assert waiting_for_company(queue, 0.0) == []
    assert [late.item for late in queue.expired(0.0)] == [0, 1, 2, 3, 4, 5]
    assert waiting_for_company(queue, 4.0) == [6, 7]


def test_an_idle_worker_tries_the_last_item_whatever_the_prediction_says() -> None:
    queue = batcher(predict=lambda *_: 10.0)
    queue.add(item(1, deadline_s=2.0))
    queue.add(item(2, deadline_s=3.0))
    assert waiting_for_company(queue, 0.0) == [2]
    assert [late.item for late in queue.expired(0.0)] == [1]


# ------------------------------------------------------------------ who gets in


def test_the_earliest_deadline_gets_in_first_and_ties_keep_their_order_of_arrival() -> None:
    queue = batcher()
    for number, deadline_s in enumerate([9.0, 7.0, 9.0, 8.0, 7.0, 9.0, 7.0, 9.0, 9.0, 9.0]):
        queue.add(item(number, deadline_s=deadline_s))
    assert waiting_for_company(queue, 0.0) == [1, 4, 6, 3, 0, 2, 5, 7]
    assert waiting_for_company(queue, 4.0) == [8, 9]


def test_queues_that_are_ready_are_served_by_their_oldest_item() -> None:
    queue = batcher()
    for number, (model, queued_s) in enumerate([(1, 2.0), (0, 1.0), (1, 0.5)]):
        queue.add(item(number, key=QueueKey(model), queued_s=queued_s))
    assert waiting_for_company(queue, 10.0) == [0, 2]  # deadlines tie: order of arrival
    assert waiting_for_company(queue, 10.0) == [1]


def test_an_older_queue_that_is_not_ready_does_not_hold_up_a_full_one() -> None:
    queue = batcher()
    queue.add(item(99, key=QueueKey(1), queued_s=0.0))
    for number in range(8):
        queue.add(item(number, queued_s=1.0))
    assert waiting_for_company(queue, 1.0) == list(range(8))
    assert waiting_for_company(queue, 1.0) == []


def test_shape_buckets_never_share_a_batch() -> None:
    queue = batcher()
    for number in range(6):
        queue.add(item(number, key=QueueKey(0, (64 * (number % 2),))))
    assert waiting_for_company(queue, 4.0) == [0, 2, 4]
    assert waiting_for_company(queue, 4.0) == [1, 3, 5]


def test_a_suspect_travels_alone_and_does_not_wait() -> None:
    queue = batcher()
    queue.add(item(1))
    queue.add(item(2, rows=3, alone=True, queued_s=1.0))
    queue.add(item(3, alone=True, queued_s=1.0, deadline_s=50.0))
    assert waiting_for_company(queue, 1.0) == [3]
    batch = queue.next_batch(1.0, worker_idle=False, expected_rows=somebody)
    assert batch is not None
    assert (numbers(batch), batch.rows, batch.padded_rows) == ([2], 3, 4)
    assert waiting_for_company(queue, 1.0) == []


def test_a_served_item_may_come_back_as_a_suspect() -> None:
    queue = batcher()
    queue.add(again := item(1))
    assert waiting_for_company(queue, 4.0) == [1]
    again.alone = True
    queue.add(again)
    assert waiting_for_company(queue, 4.0) == [1]
    assert len(queue) == 0


def test_learned_smaller_limits_hold_for_items_that_wait_already() -> None:
    queue = batcher()
    for number, rows in enumerate([1, 2, 4]):
        queue.add(item(number, rows=rows))
    queue.configure(0, BatchLimits(max_rows=2, max_wait_s=4.0, sizes=(1, 2)))
    batches = [queue.next_batch(0.0, worker_idle=False, expected_rows=somebody) for _ in range(3)]
    assert [numbers(batch) for batch in batches] == [[0], [1], [2]]
    assert [batch.padded_rows for batch in batches if batch] == [1, 2, 4]  # too big by now, but never stuck


# ------------------------------------------------------------------ leaving


def test_a_removed_item_is_in_no_batch_and_its_rows_do_not_count() -> None:
    queue = batcher()
    for number in range(3):
        queue.add(item(number, rows=2))
    assert queue.remove(0)
    assert not queue.remove(0)
    assert not queue.remove(77)
    assert queue.waiting_rows(0) == 4
    assert waiting_for_company(queue, 4.0) == [1, 2]
    assert not queue.remove(1)


def test_removing_the_oldest_or_the_most_urgent_item_moves_due() -> None:
    queue = batcher()
    queue.add(item(1, queued_s=0.0))
    queue.add(item(2, queued_s=1.0, deadline_s=2.5))
    queue.add(item(3, queued_s=2.0))
    assert queue.due(2.0) == 2.5
    queue.remove(2)
    assert queue.due(2.0) == 4.0
    queue.remove(1)
    assert queue.due(2.0) == 6.0
    queue.remove(3)
    assert queue.due(2.0) is None


def test_an_item_whose_deadline_has_come_leaves_through_expired_and_through_nothing_else() -> None:
    queue = batcher()
    queue.add(item(1, deadline_s=2.0))
    queue.add(item(2, deadline_s=9.0))
    assert queue.expired(1.9) == []
    assert numbers(queue.next_batch(2.0, worker_idle=True, expected_rows=nobody)) == [2]
    assert queue.due(2.0) == 2.0
    assert len(queue) == 1
    assert [late.item for late in queue.expired(2.0)] == [1]
    assert queue.expired(2.0) == []
    assert queue.due(2.0) is None


def test_an_item_found_late_can_still_be_removed_and_added_again() -> None:
    queue = batcher()
    queue.add(late := item(1, deadline_s=2.0))
    assert waiting_for_company(queue, 3.0) == []
    assert queue.remove(1)
    late.deadline_s = 9.0
    queue.add(late)
    assert queue.expired(3.0) == []
    assert waiting_for_company(queue, 4.0) == [1]


def test_forgetting_a_model_hands_back_its_items_and_no_others() -> None:
    queue = batcher()
    queue.add(item(1))
    queue.add(item(2, alone=True))
    queue.add(item(3, key=QueueKey(1)))
    queue.add(item(4, deadline_s=1.0))
    assert waiting_for_company(queue, 1.0) == [2]
    assert [left.item for left in queue.forget(0)] == [1, 4]
    assert queue.expired(1.0) == []
    assert (len(queue), queue.waiting_rows(0), queue.waiting_rows(1)) == (1, 0, 1)
    with pytest.raises(ValueError, match="model 0 is not configured"):
        queue.add(item(5))


def test_bugs_of_the_caller_are_refused() -> None:
    queue = batcher()
    queue.add(item(1))
    with pytest.raises(ValueError, match="waits already"):
        queue.add(item(1))
    with pytest.raises(ValueError, match=r"has 9 rows; allowed are 1\.\.8"):
        queue.add(item(2, rows=9))
    with pytest.raises(ValueError, match="has 0 rows"):
        queue.add(item(2, rows=0))
    assert repr(queue) == "<Batcher 0: 1 items 1 rows>"


@pytest.mark.parametrize(
    ("max_rows", "max_wait_s", "sizes"),
    [(8, 1.0, ()), (8, 1.0, (1, 4)), (8, 1.0, (4, 1, 8)), (8, 1.0, (1, 8, 8)), (8, 1.0, (0, 8)), (8, -1.0, (8,)),
     (8, math.inf, (8,)), (8, math.nan, (8,))],
)  # fmt: skip
def test_limits_that_contradict_themselves_are_refused(
    max_rows: int, max_wait_s: float, sizes: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"sizes|max_wait_s"):
        BatchLimits(max_rows=max_rows, max_wait_s=max_wait_s, sizes=sizes)


def test_a_repr_shows_the_queues() -> None:
    queue = batcher()
    assert repr(queue) == "<Batcher empty>"
    queue.add(item(1, rows=3, key=QueueKey(0, (64,))))
    queue.add(item(2, alone=True, key=QueueKey(1)))
    assert repr(queue) == "<Batcher 0(64,): 1 items 3 rows, 1 alone: 1 items 1 rows>"


# ------------------------------------------------------------------ against a plain reading of the rules
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
        self.limits = {0: LIMITS, 1: BatchLimits(max_rows=3, max_wait_s=2.5, sizes=(2, 3))}
        self.items: list[QueuedItem] = []
        self.late: list[int] = []

    def expired(self, now_s: float) -> list[int]:
        late = [i.item for i in self.items if i.deadline_s <= now_s or i.item in self.late]
        self.items = [i for i in self.items if i.item not in late]
        return late

    def next_batch(self, now_s: float, idle: bool, expected: int) -> list[int]:
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
            return [i.item for i in batch]
        return []

    def chosen(self, now_s: float, idle: bool, expected: int) -> list[QueuedItem]:
        """The queue that goes, by deadline."""
        alive = [i for i in self.items if i.deadline_s > now_s and i.item not in self.late]
        ready: list[tuple[float, int, list[QueuedItem]]] = []
        for place in {(i.key, i.alone) for i in alive}:
            queue = sorted((i for i in alive if (i.key, i.alone) == place), key=lambda i: i.deadline_s)
            limits = self.limits[place[0].model]
            if (
                place[1]
                or sum(i.rows for i in queue) >= limits.max_rows
                or now_s >= min(i.queued_s for i in queue) + limits.max_wait_s
                or now_s >= queue[0].deadline_s - self.cost(queue)
                or (idle and expected == 0)
            ):
                ready.append((*min((i.queued_s, self.items.index(i)) for i in queue), queue))
        return min(ready)[2] if ready else []

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
STEPS: st.SearchStrategy[list[tuple[Any, ...]]] = st.lists(st.one_of(ADD, STEP, BATCH, REMOVE, EXPIRED), max_size=40)


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

    def add(self, key: QueueKey, together: list[tuple[int, float, bool]]) -> None:
        for rows, patience_s, alone in together:
            new = QueuedItem(len(self.added), key, rows, self.now_s + patience_s, self.now_s, alone=alone)
            self.added.append(new.item)
            self.real.add(new)
            self.plain.items.append(new)

    def step(self, seconds: float) -> None:
        self.now_s += seconds

    def batch(self, idle: bool, expected: int) -> None:
        batch = self.real.next_batch(self.now_s, worker_idle=idle, expected_rows=lambda _: expected)
        assert numbers(batch) == self.plain.next_batch(self.now_s, idle, expected)
        if batch is None:
            return
        self.left += numbers(batch)
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


# ------------------------------------------------------------------ cost


class Counted(float):
    """A time that counts how often it is compared: the work of a heap."""

    compared = 0

    def __lt__(self, other: float) -> bool:
        Counted.compared += 1
        return float(self) < float(other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and float(self) == float(other)

    __hash__ = float.__hash__


WAITING = 10_000
LOG = math.ceil(math.log2(WAITING))


def comparisons(work: Callable[[], object]) -> int:
    before = Counted.compared
    work()
    return Counted.compared - before


def crowded(predict: Callable[[QueueKey, int], float] = free) -> Batcher:
    """10,000 items in an unhelpful order of deadlines and ages."""
    queue = batcher(predict=predict)
    for number in range(WAITING):
        shuffled = number * 7919 % WAITING
        queue.add(item(number, deadline_s=Counted(1e6 + shuffled), queued_s=Counted(WAITING - shuffled)))
    return queue


def test_an_add_with_10000_waiting_costs_the_logarithm() -> None:
    queue = crowded()
    urgent = item(WAITING, deadline_s=Counted(1e5), queued_s=Counted(0.0))  # to the top of both heaps
    assert comparisons(lambda: queue.add(urgent)) <= 2 * (LOG + 1)


def test_a_batch_with_10000_waiting_costs_the_logarithm_per_item() -> None:
    queue = crowded()
    spent = comparisons(lambda: [waiting_for_company(queue, 0.0) for _ in range(100)])
    assert spent <= 800 * 2 * 2 * (LOG + 1)


def test_a_batch_that_can_not_meet_10000_deadlines_looks_at_a_few_of_them_only() -> None:
    queue = crowded(lambda _, rows: 2e4 if rows == 8 else 0.0)
    batches: list[Batch | None] = []
    spent = comparisons(
        lambda: batches.append(queue.next_batch(0.0, worker_idle=False, expected_rows=somebody, start_s=1e6 - 1))
    )
    assert [len(batch.items) for batch in batches if batch] == [4]
    assert spent <= 4 * 8 * 4 * (LOG + 1)


def test_removing_with_10000_waiting_costs_the_logarithm_on_average() -> None:
    queue = crowded()
    spent = comparisons(lambda: [queue.remove(number) for number in range(WAITING)])
    assert spent <= WAITING * 2 * 2 * (LOG + 1)
    assert len(queue) == 0


def test_due_and_expired_look_only_at_the_first_of_each_queue() -> None:
    queue = crowded()
    assert comparisons(lambda: (queue.due(0.0), queue.expired(0.0))) <= 10


def test_items_that_left_do_not_pile_up_behind_one_that_stays() -> None:
    queue = batcher()
    queue.add(item(0, queued_s=-1.0, deadline_s=1.0))
    for number in range(1, 2000):
        queue.add(item(number))
        queue.remove(number)
    (only,) = queue._queues.values()
    assert max(len(only.deadlines), len(only.ages)) <= SPARE_ENTRIES + 4
