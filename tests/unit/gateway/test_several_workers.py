"""The dispatcher with more than one worker: who gets what, and what the loss of one costs."""

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from gateway import dispatch as dispatch_module
from gateway.batcher import QueueKey
from gateway.pauses import Pauses
from gateway.work import Outcome
from gateway.worker_client import Worker
from shared.clock import FOREVER_S
from shared.errors import NotReady, ProcessLost
from shared.messages import Failure, LoadModel, ModelFailed, ModelLoaded, RunBatch
from shared.settings import WorkerSettings
from tests.support.dispatch_bench import Bench
from tests.support.gateway_parts import connect_worker, done, served

LIMIT_S = 5.0

Made = Callable[..., Bench]


def two(b: Bench, *models: int) -> tuple[Worker, Worker]:
    """Two workers that have loaded these models."""
    return connect_worker(b.workers, *models, name="worker-0"), connect_worker(b.workers, *models, name="worker-1")


def sent(b: Bench, worker: Worker) -> list[RunBatch]:
    return [m for identity, m in b.router.sent if identity == worker.identity and isinstance(m, RunBatch)]


def costs(b: Bench, model: int, seconds: float) -> None:
    b.dispatch._cost.seed(QueueKey(model, ()), [(1, seconds), (4, seconds)])


async def answered(*futures: "asyncio.Future[Outcome]") -> list[Outcome]:
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.gather(*futures)


class Playing:
    """Answers batches in turn, each worker's in order."""

    def __init__(self, b: Bench) -> None:
        self.b = b
        self.answered: set[int] = set()

    def next(self, worker: Worker) -> None:
        batch = next(batch for batch in sent(self.b, worker) if batch.batch not in self.answered)
        self.answered.add(batch.batch)
        self.b.answer(worker, batch)

    def all(self, *workers: Worker) -> None:
        while left := [w for w in workers if any(batch.batch not in self.answered for batch in sent(self.b, w))]:
            for worker in left:
                self.next(worker)


async def test_a_batch_goes_only_to_a_worker_that_has_its_model(bench: Made) -> None:
    first, second = served(1, max_wait_s=0.0), served(2, name="other", max_wait_s=0.0)
    b = bench(first, second)
    both = connect_worker(b.workers, 1, 2, name="worker-0")
    one = connect_worker(b.workers, 1, name="worker-1")
    costs(b, 2, 10.0)
    for _ in range(3):
        await b.submit(second)
    assert len(sent(b, both)) == 1  # the others wait for it, although the second worker is idle
    assert sent(b, one) == []
    assert b.dispatch.waiting_items() == 2
    await b.submit(first)
    assert [batch.model for batch in sent(b, one)] == [1]


async def test_a_model_that_loads_later_brings_its_worker_in(bench: Made) -> None:
    model = served(max_rows=1)
    b = bench(model)
    one, late = connect_worker(b.workers, 1, name="worker-0"), connect_worker(b.workers, name="worker-1")
    costs(b, 1, 10.0)
    for _ in range(4):
        await b.submit(model)
    assert (len(sent(b, one)), len(sent(b, late))) == (2, 0)
    assert model.workers == 1
    b.workers.on_message(late.identity, ModelLoaded(1, [(1, 0.5)], 10, "fp32", 0.1, pads=False))
    assert len(sent(b, late)) == 2
    assert model.workers == 2
    assert b.dispatch._cost.predict(QueueKey(1, ()), 1) == pytest.approx(10.0)  # learned; a warm-up says no more


async def test_the_load_is_shared_evenly(bench: Made) -> None:
    model = served(max_rows=1)
    b = bench(model)
    workers, playing = two(b, 1), Playing(b)
    futures = [await b.submit(model) for _ in range(100)]
    playing.all(*workers)
    await answered(*futures)
    assert Counter(len(sent(b, worker)) for worker in workers) == {50: 2}
    assert {name: ran.batches for name, ran in b.dispatch.running.ran.items()} == {"worker-0": 50, "worker-1": 50}


async def test_single_calls_go_to_the_workers_in_turn(bench: Made) -> None:
    """So that one that hangs while few call is noticed."""
    model = served()
    b = bench(model)
    workers, playing = two(b, 1), Playing(b)
    for _ in range(4):
        future = await b.submit(model)
        playing.all(*workers)
        await answered(future)
    assert [len(sent(b, worker)) for worker in workers] == [2, 2]


async def test_the_next_batch_is_staged_where_it_starts_first_and_not_where_fewer_are_held(bench: Made) -> None:
    long, short = served(1, name="long", max_rows=1), served(2, name="short", max_rows=1)
    b = bench(long, short, limits=WorkerSettings(staged_batches=3))
    busy, quick = two(b, 1, 2)
    costs(b, 1, 60.0)
    costs(b, 2, 0.001)
    await b.submit(long)
    for _ in range(3):
        await b.submit(short)
    assert [batch.model for batch in sent(b, busy)] == [1]  # one batch, and a minute to go
    assert [batch.model for batch in sent(b, quick)] == [2, 2, 2]
    assert b.dispatch.outstanding(quick) == 3
    await b.submit(short)  # the quick one has no credit left, and is worth waiting for
    assert len(sent(b, busy)) == 1
    assert b.dispatch.waiting_items() == 1


async def test_a_deadline_counts_as_missed_only_with_the_worker_that_is_free_first(bench: Made) -> None:
    model, other = served(1, max_rows=1), served(2, name="long", max_rows=1)
    b = bench(model, other)
    busy, quick = two(b, 1, 2)
    costs(b, 2, 60.0)
    costs(b, 1, 0.001)
    await b.submit(other)
    first = [await b.submit(model) for _ in range(2)]
    future = await b.submit(model, deadline_s=dispatch_module.now_s() + 5)  # the busy one could never meet it
    playing = Playing(b)
    playing.all(quick)
    await answered(*first, future)
    assert len(sent(b, busy)) == 1


async def test_a_worker_that_is_late_gets_nothing_more_while_another_one_answers(
    bench: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served(max_rows=1)
    b = bench(model)
    hung, good = two(b, 1)
    costs(b, 1, 0.1)
    start_s = dispatch_module.now_s()
    monkeypatch.setattr(dispatch_module, "now_s", lambda: start_s)
    await b.submit(model)
    assert len(sent(b, hung)) == 1
    monkeypatch.setattr(dispatch_module, "now_s", lambda: start_s + 1.0)  # nine tenths late
    futures = [await b.submit(model) for _ in range(20)]
    Playing(b).all(good)
    await answered(*futures)
    assert len(sent(b, hung)) == 1


async def test_the_death_of_one_loses_nothing(bench: Made) -> None:
    model = served(max_rows=1)
    b = bench(model)
    first, second = two(b, 1)
    futures = [await b.submit(model) for _ in range(8)]
    assert {len(sent(b, first)), len(sent(b, second))} == {2}
    b.workers.on_lost(first.identity)
    assert model.workers == 1
    Playing(b).all(second)
    assert len(await answered(*futures)) == 8
    assert b.dispatch.lost_workers == 1


async def test_only_what_ran_is_suspected_of_a_death(bench: Made) -> None:
    model = served(max_rows=4)
    b = bench(model)
    worker = connect_worker(b.workers, 1, name="worker-0")
    costs(b, 1, 10.0)
    futures = [await b.submit(model) for _ in range(5)]
    assert [len(batch.items) for batch in sent(b, worker)] == [1, 4]  # the second one was only staged
    b.workers.on_lost(worker.identity)
    other = connect_worker(b.workers, 1, name="worker-1")
    playing = Playing(b)
    playing.all(other)
    assert [len(batch.items) for batch in sent(b, other)] == [1, 4]
    await answered(*futures)


async def test_an_item_that_was_never_run_is_not_lost_twice(bench: Made) -> None:
    model = served(max_rows=1)
    b = bench(model)
    costs(b, 1, 10.0)
    futures = [await b.submit(model) for _ in range(2)]
    for life in range(2):
        worker = connect_worker(b.workers, 1, name=f"worker-{life}")
        b.workers.on_lost(worker.identity)
    with pytest.raises(ProcessLost, match="lost twice"):
        await futures[0]
    Playing(b).all(connect_worker(b.workers, 1))
    await answered(futures[1])


async def test_a_worker_that_can_not_be_reached_leaves_its_batch_to_the_other(bench: Made) -> None:
    model = served(max_rows=1)
    b = bench(model)
    dying, good = two(b, 1)
    send = b.router.send
    b.router.send = lambda identity, message: identity != dying.identity and send(identity, message)  # type: ignore[method-assign]  # a queue that is full
    futures = [await b.submit(model) for _ in range(3)]
    Playing(b).all(good)
    await answered(*futures)
    b.router.send = send  # type: ignore[method-assign]  # it was only busy
    b.dispatch.tick(Pauses())
    futures = [await b.submit(model) for _ in range(2)]
    assert len(sent(b, dying)) == 1
    b.answer(dying, sent(b, dying)[-1])
    b.answer(good, sent(b, good)[-1])
    await answered(*futures)


async def test_a_model_that_one_worker_can_not_load_is_run_by_the_other(bench: Made) -> None:
    model = served()
    b = bench(model)
    poor, rich = connect_worker(b.workers, name="worker-0"), connect_worker(b.workers, name="worker-1")
    future = await b.submit(model)
    b.workers.on_message(poor.identity, ModelFailed(1, Failure("not_ready", "does not fit")))
    assert not future.done()  # the other one may still load it
    assert poor.failed == {1: "does not fit"}
    b.workers.on_message(rich.identity, ModelLoaded(1, [(1, 0.001)], 10, "fp32", 0.1, pads=False))
    Playing(b).all(rich)
    await answered(future)


async def test_a_model_that_no_worker_can_load_answers_what_waits(bench: Made) -> None:
    model = served()
    b = bench(model)
    workers = connect_worker(b.workers, name="worker-0"), connect_worker(b.workers, name="worker-1")
    future = await b.submit(model)
    for worker in workers:
        b.workers.on_message(worker.identity, ModelFailed(1, Failure("not_ready", "does not fit")))
    with pytest.raises(NotReady, match="does not fit"):
        await answered(future)


async def test_what_waits_for_an_unloaded_model_is_answered(bench: Made) -> None:
    model = served(max_rows=1)
    b = bench(model)
    workers = two(b, 1)
    costs(b, 1, 10.0)
    b.workers.serve(LoadModel(1, "words", model.version))
    futures = [await b.submit(model) for _ in range(5)]
    b.workers.forget(1)
    b.dispatch.withdraw(model)
    with pytest.raises(NotReady, match="model 'words' was unloaded"):
        await answered(futures[4])
    crossed = ModelLoaded(1, [], 10, "fp32", 0.1, pads=False)  # was on its way when the model was unloaded
    b.workers.on_message(workers[0].identity, crossed)
    assert b.workers.with_model(1) == []
    for worker in workers:
        for batch in sent(b, worker):
            b.workers.on_message(worker.identity, done(batch))
    await answered(*futures[:4])


async def test_what_comes_out_of_the_pool_after_an_unload_is_answered_at_once(bench: Callable[..., Bench]) -> None:
    model = served()
    b = bench(model)
    connect_worker(b.workers, 1)
    coming = await b.lease(model, prepared=False)
    model.state.phase = "unloaded"
    b.workers.forget(1)
    b.dispatch.withdraw(model)
    coming.prepared()
    with pytest.raises(NotReady, match="was unloaded"):
        await asyncio.wait_for(b.dispatch.submit(model, [], coming, FOREVER_S), LIMIT_S)
    assert b.dispatch.waiting_items() == 0


async def test_nothing_is_left_of_models_that_were_unloaded(bench: Made) -> None:
    b = bench()
    worker = connect_worker(b.workers)
    for number in range(1, 51):
        model = served(number, max_rows=1)
        b.dispatch.configure(model)
        b.workers.serve(LoadModel(number, model.name, model.version))
        loaded = ModelLoaded(number, [(1, 10.0)], 10, "fp32", 0.1, pads=False)
        b.workers.on_message(worker.identity, loaded)
        futures = [await b.submit(model) for _ in range(3)]
        batches = [batch for batch in b.router.batches() if batch.model == number]
        assert len(batches) == 2
        model.state.phase = "unloaded"
        b.workers.forget(number)
        b.dispatch.withdraw(model)
        b.dispatch.tick(Pauses())
        assert b.dispatch._cost.keys(), "a batch that is out may still hang"
        for batch in batches:
            b.workers.on_message(worker.identity, done(batch))
        await answered(*futures[:2])
        with pytest.raises(NotReady, match="was unloaded"):
            await answered(futures[2])
    b.dispatch.tick(Pauses())
    assert b.dispatch._cost.keys() == []
    assert not b.dispatch._models
    assert not b.dispatch._batcher._limits
    assert not b.dispatch._batcher._shares._levels[100].shares


async def test_a_model_that_is_served_again_is_not_forgotten(bench: Made) -> None:
    model = served()
    b = bench(model)
    worker = connect_worker(b.workers, 1)
    await b.submit(model)
    b.dispatch.withdraw(model)
    b.dispatch.configure(model)
    b.answer(worker, b.router.batches()[0])
    b.dispatch.tick(Pauses())
    assert b.dispatch._cost.keys()
    future = await b.submit(model)
    b.answer(worker, b.router.batches()[1])
    await answered(future)
