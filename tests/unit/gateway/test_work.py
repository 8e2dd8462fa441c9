from collections.abc import Callable

import pytest

from gateway.work import Work, was_given_up
from shared.errors import NotReady
from shared.messages import BatchDone, Failure, ItemAnswer, ModelEvicted, UnloadModel
from tests.support.dispatch_bench import Bench
from tests.support.gateway_parts import connect_worker, served


async def work_of(b: Bench, *, pinned: bool = False) -> Work:
    model = served()
    model.state.on_demand = not pinned
    b.dispatch.configure(model)
    await b.submit(model)
    (found,) = b.dispatch.parked.take(1)
    return found


@pytest.mark.parametrize(
    ("code", "pinned", "left", "expected"),
    [
        ("not_ready", False, False, True),
        ("not_ready", True, False, False),
        ("not_ready", False, True, False),
        ("internal", False, False, False),
        ("", False, False, False),
    ],
)
async def test_only_a_version_that_may_be_given_up_is_waited_for_again(
    bench: Callable[..., Bench], code: str, pinned: bool, left: bool, expected: bool
) -> None:
    work = await work_of(bench(), pinned=pinned)
    if left:
        work.future.cancel()
    answer = ItemAnswer(1, [], Failure(code, "it was given up") if code else None)
    assert was_given_up(work, answer) is expected


async def test_what_a_worker_had_given_up_is_queued_again_and_neither_dropped_nor_answered(
    bench: Callable[..., Bench],
) -> None:
    model = served()
    model.state.on_demand = True
    b = bench(model)
    worker = connect_worker(b.workers, 1)
    future = await b.submit(model)
    (batch,) = b.router.batches()
    b.workers.on_message(worker.identity, ModelEvicted(1))
    answers = [ItemAnswer(item.item, [], Failure("not_ready", "it was given up")) for item in batch.items]
    b.workers.on_message(worker.identity, BatchDone(batch.batch, answers, 0.0, 0.0, 0.0, 0))
    assert (len(b.dispatch.parked), future.done(), list(b.dispatch.drops.rows())) == (1, False, [])
    connect_worker(b.workers, 1, name="worker-1")
    again = b.router.batches()[1]
    assert [item.item for item in again.items] == [item.item for item in batch.items]
    future.cancel()


async def test_a_pinned_version_that_is_not_there_is_answered_so(bench: Callable[..., Bench]) -> None:
    model = served()
    b = bench(model)
    worker = connect_worker(b.workers, 1)
    future = await b.submit(model)
    (batch,) = b.router.batches()
    answers = [ItemAnswer(item.item, [], Failure("not_ready", "it is not loaded")) for item in batch.items]
    b.workers.on_message(worker.identity, BatchDone(batch.batch, answers, 0.0, 0.0, 0.0, 0))
    with pytest.raises(NotReady, match="it is not loaded"):
        await future
    assert not any(isinstance(message, UnloadModel) for _, message in b.router.sent)
