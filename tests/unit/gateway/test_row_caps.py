from collections.abc import Callable

import pytest

from gateway.batcher import Batcher, BatchLimits, QueuedItem, QueueKey
from gateway.row_caps import RowCaps
from gateway.served import ServedModel
from gateway.worker_client import Worker
from shared.clock import FOREVER_S
from shared.messages import ModelLoaded, ModelNote
from tests.support.dispatch_bench import Bench
from tests.support.gateway_parts import connect_worker, served


def note(bench: Bench, worker: Worker, rows: int | None, model: int = 1) -> None:
    bench.workers.on_message(worker.identity, ModelNote(model, "fp16", rows))


def with_caps(bench: Bench, *models: ServedModel) -> RowCaps:
    caps = RowCaps(lambda: models, bench.dispatch.configure)
    bench.workers.connect([caps, bench.dispatch])
    return caps


def limits(model: ServedModel) -> tuple[int, tuple[int, ...]]:
    return model.limits.max_rows, model.limits.sizes


async def test_batches_are_no_larger_than_what_the_worker_has_learned(bench: Callable[..., Bench]) -> None:
    model = served(max_rows=8, max_wait_s=10.0)
    b = bench(model)
    with_caps(b, model)
    worker = connect_worker(b.workers, 1)
    note(b, worker, 2)
    assert limits(model) == (2, (1, 2))
    futures = [await b.submit(model) for _ in range(6)]
    answered: list[int] = []
    while len(answered) < len(b.router.batches()):
        batch = b.router.batches()[len(answered)]
        answered.append(len(batch.items))
        b.answer(worker, batch)
    assert (sum(answered), max(answered)) == (6, 2)
    assert all(future.done() for future in futures)


async def test_the_smallest_cap_counts_and_leaves_with_its_worker(bench: Callable[..., Bench]) -> None:
    model, other = served(max_rows=8), served(2, name="other", max_rows=8)
    b = bench(model, other)
    with_caps(b, model, other)
    small, large = connect_worker(b.workers, 1, 2), connect_worker(b.workers, 1, 2, name="worker-1")
    note(b, large, 6)
    note(b, small, 3)
    assert limits(model) == (3, (1, 2, 3))
    assert limits(other) == (8, (1, 2, 8))
    b.workers.on_lost(small.identity)
    assert limits(model) == (6, (1, 2, 6))
    b.workers.on_message(large.identity, ModelLoaded(1, [], 0, "fp16", 0.0, pads=True))
    assert limits(model) == (8, (1, 2, 8)), "loaded anew, it has met no limit"


async def test_a_cap_learned_before_this_gateway_came_counts_from_the_start(bench: Callable[..., Bench]) -> None:
    model = served(max_rows=8)
    b = bench(model)
    with_caps(b, model)
    worker = connect_worker(b.workers)
    b.workers.on_message(worker.identity, ModelLoaded(1, [], 0, "fp16", 0.0, pads=True, row_cap=4))
    assert limits(model) == (4, (1, 2, 4))


async def test_a_model_that_was_unloaded_meanwhile_is_forgotten(bench: Callable[..., Bench]) -> None:
    b = bench(served())
    caps = with_caps(b)
    note(b, connect_worker(b.workers, 1), 1)
    assert (caps._caps, caps._whole) == ({}, {})


def test_an_item_made_before_the_limit_was_lowered_is_still_taken() -> None:
    batcher = Batcher(lambda _key, _rows: 0.0)
    whole = BatchLimits(8, 0.0, (1, 2, 8))
    batcher.configure(1, whole.capped(2).capped(1))
    batcher.add(QueuedItem(1, QueueKey(1, ()), 8, FOREVER_S, 0.0))
    batcher.add(QueuedItem(2, QueueKey(1, ()), 1, FOREVER_S, 0.0))
    with pytest.raises(ValueError, match=r"1\.\.8"):
        batcher.add(QueuedItem(3, QueueKey(1, ()), 9, FOREVER_S, 0.0))
    taken = []
    while (batch := batcher.next_batch(0.0, worker_idle=True, expected_rows=lambda _: 0)) is not None:
        taken.append([item.item for item in batch.items])
    assert taken == [[1], [2]]


def test_a_cap_above_the_limits_changes_nothing() -> None:
    whole = BatchLimits(8, 0.0, (1, 2, 8))
    assert whole.capped(8) is whole
    assert whole.capped(5) == BatchLimits(5, 0.0, (1, 2, 5), item_rows=8)
