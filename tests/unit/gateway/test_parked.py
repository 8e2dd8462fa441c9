import asyncio
from collections.abc import Callable

import pytest

from gateway.parked import Parked
from gateway.served import ServedModel
from shared.errors import ProcessLost
from shared.settings import WorkerSettings
from tests.support.dispatch_bench import Bench
from tests.support.gateway_parts import connect_worker, served

LIMIT_S = 5.0


async def test_what_no_worker_has_waits_in_order_and_wants_its_version(bench: Callable[..., Bench]) -> None:
    one, two = served(1), served(2, name="two")
    b = bench(one, two)
    wanted: list[ServedModel] = []
    b.dispatch.parked.wanted = wanted.append
    futures = [await b.submit(model, word) for model, word in ((one, b"1111"), (two, b"2222"), (one, b"3333"))]
    parked = b.dispatch.parked
    assert wanted == [one, two, one]
    assert (len(parked), parked.rows(1), parked.rows(2), parked.models()) == (3, 2, 1, {one, two})
    worker = connect_worker(b.workers, 1)
    (batch,) = b.router.batches()
    assert [item.tensors[0].data for item in batch.items] == [b"1111", b"3333"]
    assert parked.models() == {two}
    b.answer(worker, batch)
    await asyncio.gather(futures[0], futures[2])
    futures[1].cancel()
    await asyncio.sleep(0)
    assert (len(parked), b.dispatch.waiting_items()) == (0, 0)


@pytest.mark.parametrize("pinned", [True, False])
async def test_a_lost_worker_is_waited_for_up_to_the_limit(bench: Callable[..., Bench], pinned: bool) -> None:
    model = served()
    model.state.on_demand, model.state.phase = not pinned, "no_worker"
    b = bench(model, limits=WorkerSettings(return_limit_ms=10))
    future = await b.submit(model)
    with pytest.raises(ProcessLost, match=r"worker\.return_limit_ms"):
        await asyncio.wait_for(future, LIMIT_S)
    assert len(b.dispatch.parked) == 0


async def test_a_load_that_takes_longer_is_no_lost_worker() -> None:
    model = served()
    model.state.on_demand, model.state.phase = True, "loading"
    b = Bench(model)
    parked = Parked(1000.0)
    b.dispatch.parked = parked
    future = await b.submit(model)
    number = next(iter(parked._works))
    for _ in range(3):
        parked._expire(number)  # as its timer does
    assert (len(parked), future.done()) == (1, False)
    model.state.phase = "no_worker"
    parked._expire(number)
    with pytest.raises(ProcessLost):
        await future
    parked._expire(number)
    assert len(parked) == 0
    b.arena.close()


async def test_what_is_taken_out_leaves_no_timer(bench: Callable[..., Bench]) -> None:
    model = served()
    b = bench(model)
    await b.submit(model)
    ((number, (_, timer)),) = b.dispatch.parked._works.items()
    work = b.dispatch.parked.pop(number)
    assert work is not None
    assert timer.cancelled()
    assert b.dispatch.parked.pop(number) is None
    assert b.dispatch.parked.take(1) == []
    work.future.cancel()
