"""How much work the batcher has with 10,000 waiting items: comparisons are counted, not seconds."""

import math
from collections.abc import Callable

from gateway.batch_queue import SPARE_ENTRIES
from gateway.batcher import Batch, Batcher, QueueKey
from tests.support.batching import batcher, free, item, somebody, waiting_for_company


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
