"""Rows of different lengths: who shares a batch, and how many rows it may have."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batcher import Batcher, BatchLimits, QueuedItem, QueueKey
from tests.support.batching import LIMITS, batcher, item, nobody, numbers, waiting_for_company

BUDGET = msgspec.structs.replace(LIMITS, max_tokens=128)
"""Eight rows of 16, two of 64, one of 256."""


def of_length(number: int, length: int, rows: int = 1) -> QueuedItem:
    return item(number, rows, key=QueueKey(0, (length,)))


def test_a_queue_is_full_when_its_rows_times_its_length_are_the_budget() -> None:
    queue = batcher(BUDGET)
    queue.add(of_length(1, 64))
    assert waiting_for_company(queue, 0.0) == []
    assert not queue.has_full(0)
    queue.add(of_length(2, 64))
    assert queue.has_full(0)
    assert waiting_for_company(queue, 0.0) == [1, 2]


def test_other_lengths_do_not_fill_a_queue() -> None:
    queue = batcher(BUDGET)
    for number in range(7):
        queue.add(of_length(number, 16))
    queue.add(of_length(7, 64))
    assert not queue.has_full(0)
    assert waiting_for_company(queue, 0.0) == []
    assert waiting_for_company(queue, 4.0) == list(range(7))
    assert waiting_for_company(queue, 4.0) == [7]


def test_one_row_may_be_longer_than_the_budget() -> None:
    queue = batcher(BUDGET)
    queue.add(of_length(1, 256))
    batch = queue.next_batch(0.0, worker_idle=False, expected_rows=nobody)
    assert batch is not None
    assert (numbers(batch), batch.padded_rows) == ([1], 1)


def test_rows_that_stay_together_may_be_more_than_the_budget() -> None:
    queue = batcher(BUDGET)
    queue.add(of_length(1, 64, rows=5))
    queue.add(of_length(2, 64))
    assert waiting_for_company(queue, 0.0) == [1]
    with pytest.raises(ValueError, match=r"allowed are 1\.\.8"):
        queue.add(of_length(3, 64, rows=9))


def test_a_batch_of_a_budget_is_padded_to_sizes_within_it() -> None:
    limits = BatchLimits(max_rows=32, max_wait_s=1.0, sizes=(1, 2, 4, 8, 16, 32), max_tokens=1000)
    assert limits.of((16,)).sizes == limits.sizes
    assert limits.of((64,)).sizes == (1, 2, 4, 8, 15)
    assert (limits.of((64,)).max_rows, limits.of((64,)).padded(9)) == (15, 15)
    assert limits.of((4096,)).sizes == (1,)
    assert limits.of(()) == limits


def test_new_limits_count_for_what_waits_already() -> None:
    queue = batcher()
    for number in range(3):
        queue.add(of_length(number, 64))
    assert waiting_for_company(queue, 0.0) == []
    queue.configure(0, BUDGET)
    assert waiting_for_company(queue, 0.0) == [0, 1]


@given(st.lists(st.sampled_from([16, 32, 64, 128]), min_size=1, max_size=60), st.integers(16, 512))
def test_no_batch_is_over_the_budget_or_of_two_lengths_and_all_are_served(lengths: list[int], budget: int) -> None:
    queue: Batcher = batcher(msgspec.structs.replace(LIMITS, max_tokens=budget))
    for number, length in enumerate(lengths):
        queue.add(of_length(number, length))
    served: list[int] = []
    while (batch := queue.next_batch(100.0 - 1, worker_idle=True, expected_rows=nobody)) is not None:
        (length,) = batch.key.bucket
        assert {lengths[number] for number in numbers(batch)} == {length}
        assert batch.padded_rows == 1 or batch.padded_rows * length <= budget
        served += numbers(batch)
    assert sorted(served) == list(range(len(lengths)))
