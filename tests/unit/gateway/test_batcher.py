"""The batcher's rules, one example each; time is a number here."""

import math

import pytest

from gateway.batcher import BatchLimits, QueueKey
from tests.support.batching import KEY, batcher, item, nobody, numbers, somebody, waiting_for_company

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


def test_the_smaller_priority_number_goes_first_and_levels_never_share_a_batch() -> None:
    queue = batcher()
    for number, priority in ((1, 100), (2, 1), (3, 100), (4, 7)):
        waiting = item(number, queued_s=float(number))
        waiting.priority = priority
        queue.add(waiting)
    order = [numbers(queue.next_batch(9.0, worker_idle=True, expected_rows=nobody)) for _ in range(3)]
    assert order == [[2], [4], [1, 3]]
    assert len(queue) == 0


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
