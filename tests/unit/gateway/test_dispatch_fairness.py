"""Several models on one worker, as far as the dispatcher has a part in their fair shares."""

from collections.abc import Callable

import msgspec
import pytest

from gateway import dispatch as dispatch_module
from gateway.batcher import QueueKey
from shared.clock import now_s
from shared.messages import BatchDone
from shared.settings import WorkerSettings
from tests.support.dispatch_bench import Bench
from tests.support.gateway_parts import connect_worker, done, served

ONE_AT_A_TIME = WorkerSettings(staged_batches=1)


async def test_a_model_is_charged_for_what_its_batch_really_took(bench: Callable[..., Bench]) -> None:
    slow, fast = served(1, name="slow", max_rows=1), served(2, name="fast", max_rows=1)
    b = bench(slow, fast, limits=ONE_AT_A_TIME)
    worker = connect_worker(b.workers, 1, 2)
    for model in (slow, fast, slow, fast, slow, fast):
        await b.submit(model)
    for _ in range(6):
        batch = b.router.batches()[-1]
        answer = done(batch)
        assert isinstance(answer, BatchDone)
        took_s = 5.0 if batch.model == 1 else 0.001  # both were said to take a millisecond
        b.workers.on_message(worker.identity, msgspec.structs.replace(answer, run_s=took_s))
    assert [batch.model for batch in b.router.batches()] == [1, 2, 2, 2, 1, 1]


@pytest.mark.parametrize(("loaded", "sent"), [((1,), 2), ((1, 2), 1)])
async def test_a_full_batch_is_staged_early_only_where_no_other_model_may_come_meanwhile(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, loaded: tuple[int, ...], sent: int
) -> None:
    slow, fast = served(1, name="slow", max_rows=4, max_wait_s=0.0), served(2, name="fast", max_rows=4)
    b = bench(slow, fast)
    connect_worker(b.workers, *loaded)
    b.dispatch._cost.seed(QueueKey(1), [(1, 1000.0), (4, 1000.0)])
    for _ in range(5):
        await b.submit(slow)
    assert len(b.router.batches()) == sent
    before_s = now_s() + 1000.0 - 0.001
    monkeypatch.setattr(dispatch_module, "now_s", lambda: before_s)
    b.dispatch.kick()
    assert [len(batch.items) for batch in b.router.batches()] == [1, 4]


async def test_who_came_while_a_slow_batch_ran_is_next(bench: Callable[..., Bench]) -> None:
    slow, fast = served(1, name="slow", max_rows=4), served(2, name="fast", max_rows=4, max_wait_s=10.0)
    b = bench(slow, fast)
    worker = connect_worker(b.workers, 1, 2)
    b.dispatch._cost.seed(QueueKey(1), [(1, 1000.0), (4, 1000.0)])
    for _ in range(9):
        await b.submit(slow)
    await b.submit(fast)
    b.answer(worker, b.router.batches()[0])
    assert [batch.model for batch in b.router.batches()] == [1, 2, 1]  # and behind its millisecond, the slow one again
