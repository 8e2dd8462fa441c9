import asyncio
from collections.abc import Callable

import msgspec
import pytest

from gateway import dispatch as dispatch_module
from gateway import work as work_module
from gateway.pauses import Pauses
from gateway.request import PROOF_PRIORITY
from gateway.served import Terms
from gateway.worker_client import Worker, WorkerClient
from shared.clock import FOREVER_S
from shared.errors import DeadlineExceeded, InvalidInput, NotReady, ProcessLost, TooLarge
from shared.messages import BatchDone, CancelItems, Failure, ItemAnswer, ModelFailed, RunBatch
from shared.pipeline import RawInput
from shared.settings import WorkerSettings
from shared.transport import FrameTooBig
from tests.support.dispatch_bench import Bench
from tests.support.gateway_parts import FakeRouter, connect_worker, done, served, welcome

LIMIT_S = 5.0


async def test_one_caller_never_waits(bench: Callable[..., Bench]) -> None:
    model = served(max_wait_s=10.0)
    b = bench(model)
    worker = connect_worker(b.workers, 1)
    future = await b.submit(model)
    (batch,) = b.router.batches()
    b.answer(worker, batch)
    assert (await future).tensors[0].data == b"word"


async def test_what_one_turn_of_the_loop_brings_shares_a_batch(bench: Callable[..., Bench]) -> None:
    model = served(max_wait_s=10.0)
    b = bench(model)
    connect_worker(b.workers, 1)
    for lease in [await b.lease(model) for _ in range(3)]:
        b.dispatch.submit(model, [], lease, FOREVER_S)
    await asyncio.sleep(0)
    assert [len(batch.items) for batch in b.router.batches()] == [3]


async def test_a_proof_runs_beside_the_others_until_its_version_is_proven(bench: Callable[..., Bench]) -> None:
    new, serves = served(number=1), served(number=2)
    b = bench(new, serves)
    worker = connect_worker(b.workers, 1, 2)
    for proven in (False, True):
        proof = await b.leases.acquire(new, RawInput(kind="text"), Terms(FOREVER_S, PROOF_PRIORITY))
        proof.prepared()
        await b.queue(new, [], proof)
        (batch,) = b.router.batches()
        assert (batch.model, batch.aside) == (1, not proven)
        assert b.dispatch.outstanding(worker) == (1 if proven else 0)
        before_s = new.batch_s(1)
        b.workers.on_message(worker.identity, msgspec.structs.replace(done(batch), run_s=9.0))
        assert (new.batch_s(1) > before_s) == proven, "how long it takes aside says nothing of its row"
        b.router.sent.clear()
        await b.submit(serves)
        assert not b.router.batches()[0].aside
        b.answer(worker, b.router.batches()[0])
        b.router.sent.clear()


async def test_company_that_is_being_prepared_is_waited_for(bench: Callable[..., Bench]) -> None:
    model = served(max_wait_s=10.0)
    b = bench(model)
    connect_worker(b.workers, 1)
    coming = await b.lease(model, prepared=False)
    await b.submit(model)
    assert b.router.batches() == []
    coming.prepared()
    await b.queue(model, [], coming)
    (batch,) = b.router.batches()
    assert len(batch.items) == 2


async def test_company_that_failed_to_come_is_not_waited_for(bench: Callable[..., Bench]) -> None:
    model = served(max_wait_s=10.0)
    b = bench(model)
    connect_worker(b.workers, 1)
    with await b.lease(model, prepared=False):
        await b.submit(model)
        assert b.router.batches() == []
    assert len(b.router.batches()) == 1


async def test_the_wait_for_company_ends(bench: Callable[..., Bench]) -> None:
    model = served(max_wait_s=0.001)
    b = bench(model)
    worker = connect_worker(b.workers, 1)
    await b.lease(model, prepared=False)  # never comes
    b.router.was_sent.clear()
    future = await b.submit(model)
    await asyncio.wait_for(b.router.was_sent.wait(), LIMIT_S)
    b.answer(worker, b.router.batches()[0])
    await future


async def test_a_batch_is_staged_behind_a_running_one_only_when_full(bench: Callable[..., Bench]) -> None:
    model = served(max_rows=4, max_wait_s=0.0)
    b = bench(model)
    worker = connect_worker(b.workers, 1)
    worker_batches = b.router.batches
    b.dispatch._cost.seed(dispatch_module.QueueKey(1, ()), [(1, 10.0), (4, 10.0)])
    await b.submit(model)
    assert len(worker_batches()) == 1
    for _ in range(3):
        await b.submit(model)
    assert len(worker_batches()) == 1  # three wait: a staged batch could not grow any more
    await b.submit(model)
    assert [len(batch.items) for batch in worker_batches()] == [1, 4]
    for _ in range(9):
        await b.submit(model)
    assert len(worker_batches()) == 2  # one running, one staged: never more
    b.answer(worker, worker_batches()[0])
    assert [len(batch.items) for batch in worker_batches()] == [1, 4, 4]


async def test_answers_match_their_questions(bench: Callable[..., Bench]) -> None:
    model = served(max_rows=4)
    b = bench(model)
    worker = connect_worker(b.workers, 1)
    futures = [await b.submit(model, f"{n:04}".encode()) for n in range(100)]
    answered = 0
    while answered < len(b.router.batches()):
        b.answer(worker, b.router.batches()[answered])
        answered += 1
    for number, future in enumerate(futures):
        assert (await asyncio.wait_for(future, LIMIT_S)).tensors[0].data == f"{number:04}".encode()


async def test_a_bad_item_fails_alone(bench: Callable[..., Bench]) -> None:
    model = served(max_rows=2, max_wait_s=LIMIT_S)
    b = bench(model)
    worker = connect_worker(b.workers, 1)
    coming = await b.lease(model, prepared=False)
    good = await b.submit(model)
    coming.prepared()
    bad = await b.queue(model, [], coming)
    (batch,) = b.router.batches()
    first, second = batch.items
    answers = [
        ItemAnswer(first.item, first.tensors),
        ItemAnswer(second.item, [], Failure("invalid_input", "no")),
    ]
    b.workers.on_message(worker.identity, BatchDone(batch.batch, answers, 0.0, 0.0, 0.0, 2))
    assert (await good).batch_rows == 2
    with pytest.raises(InvalidInput, match="no"):
        await bad


async def test_cancelled_while_waiting_leaves_at_once(bench: Callable[..., Bench]) -> None:
    model = served(max_wait_s=10.0)
    b = bench(model)
    connect_worker(b.workers, 1)
    await b.lease(model, prepared=False)
    future = await b.submit(model)
    assert b.dispatch.waiting_items() == 1
    future.cancel()
    await asyncio.sleep(0)
    assert b.dispatch.waiting_items() == 0
    assert len(b.dispatch._batcher) == 0  # and is in no batch later
    assert b.router.batches() == []


async def test_cancelled_at_the_worker_tells_it_and_counts_rows_for_nobody(bench: Callable[..., Bench]) -> None:
    model = served()
    b = bench(model)
    counted: list[int] = []
    b.dispatch.on_batch = lambda _model, _batch, _done, nobody: counted.append(nobody)
    worker = connect_worker(b.workers, 1)
    future = await b.submit(model)
    future.cancel()
    await asyncio.sleep(0)
    (batch,) = b.router.batches()
    assert b.router.sent[-1] == (worker.identity, CancelItems([batch.items[0].item]))
    b.answer(worker, batch)  # it was too late
    assert counted == [1]


async def test_expired_items_are_answered_and_never_sent(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served(max_wait_s=10.0)
    b = bench(model)
    connect_worker(b.workers, 1)
    await b.lease(model, prepared=False)
    future = await b.submit(model, deadline_s=dispatch_module.now_s() + 1000)
    late_s = dispatch_module.now_s() + 2000
    monkeypatch.setattr(dispatch_module, "now_s", lambda: late_s)
    b.dispatch.kick()
    with pytest.raises(DeadlineExceeded):
        await future
    assert b.router.batches() == []


async def test_a_lost_worker_costs_one_more_try_alone(bench: Callable[..., Bench]) -> None:
    model = served(max_rows=4)
    b = bench(model)
    worker = connect_worker(b.workers, 1)
    coming = await b.lease(model, prepared=False)
    futures = [await b.submit(model)]
    coming.prepared()
    futures.append(await b.queue(model, [], coming))
    assert [len(batch.items) for batch in b.router.batches()] == [2]
    b.workers.on_lost(worker.identity)
    assert not any(future.done() for future in futures)
    worker = connect_worker(b.workers, 1)
    retried = b.router.batches()[1:]
    assert [len(batch.items) for batch in retried] == [1, 1]  # suspects travel alone
    for batch in retried:
        b.answer(worker, batch)
    await asyncio.gather(*futures)


async def test_lost_twice_is_unavailable(bench: Callable[..., Bench]) -> None:
    model = served()
    b = bench(model)
    worker = connect_worker(b.workers, 1)
    future = await b.submit(model)
    b.workers.on_lost(worker.identity)
    b.workers.on_lost(connect_worker(b.workers, 1).identity)
    with pytest.raises(ProcessLost, match="lost twice"):
        await future


async def test_waiting_items_are_kept_for_the_next_worker(bench: Callable[..., Bench]) -> None:
    model = served(max_wait_s=10.0)
    b = bench(model)
    worker = connect_worker(b.workers, 1)
    await b.lease(model, prepared=False)
    future = await b.submit(model)
    b.workers.on_lost(worker.identity)
    assert b.dispatch.waiting_items() == 1
    worker = connect_worker(b.workers, 1)
    model.preparing_rows = 0
    b.dispatch.kick()
    b.answer(worker, b.router.batches()[-1])
    await asyncio.wait_for(future, LIMIT_S)


async def test_a_worker_that_does_not_come_back_in_time_is_unavailable(bench: Callable[..., Bench]) -> None:
    model = served()
    b = bench(model, limits=WorkerSettings(return_limit_ms=1))
    future = await b.submit(model)
    with pytest.raises(ProcessLost, match=r"worker\.return_limit_ms"):
        await asyncio.wait_for(future, LIMIT_S)


async def test_what_waits_for_a_load_is_limited_by_its_own_deadline(bench: Callable[..., Bench]) -> None:
    model = served()
    model.state.on_demand, model.state.phase = True, "loading"
    b = bench(model, limits=WorkerSettings(return_limit_ms=1))
    connect_worker(b.workers)
    wanted: list[str] = []
    b.dispatch.parked.wanted = lambda model: wanted.append(model.name)
    future = await b.submit(model)
    assert b.dispatch.parked.models() == {model}
    done, _ = await asyncio.wait([future], timeout=0.05)
    assert (done, len(b.dispatch.parked)) == (set(), 1), "the worker is there, and loads it"
    assert wanted == ["words"], "asked for once"
    model.state.phase = "no_worker"
    with pytest.raises(ProcessLost, match="return_limit_ms"):
        await asyncio.wait_for(future, LIMIT_S)


async def test_a_model_that_fails_to_load_answers_what_waits_for_it(bench: Callable[..., Bench]) -> None:
    model = served()
    b = bench(model)
    worker = connect_worker(b.workers)
    future = await b.submit(model)
    b.workers.on_message(worker.identity, ModelFailed(1, Failure("not_ready", "weights do not fit")))
    with pytest.raises(NotReady, match="weights do not fit"):
        await asyncio.wait_for(future, LIMIT_S)


async def test_a_hung_worker_is_killed_once(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    model = served()
    b = bench(model, limits=WorkerSettings(hang_limit_ms=2000))
    worker = connect_worker(b.workers, 1)
    killed: list[Worker] = []
    monkeypatch.setattr(b.workers, "kill", killed.append)
    await b.submit(model)
    b.dispatch.tick(Pauses())
    assert killed == []
    late_s = dispatch_module.now_s() + 2.5
    monkeypatch.setattr(dispatch_module, "now_s", lambda: late_s)
    b.dispatch.tick(Pauses())
    b.dispatch.tick(Pauses())
    assert killed == [worker]


async def test_what_could_not_be_sent_is_kept(bench: Callable[..., Bench]) -> None:
    model = served()
    b = bench(model)
    worker = connect_worker(b.workers, 1)
    b.router.full = True
    future = await b.submit(model)
    assert b.dispatch.waiting_items() == 1
    b.workers.on_lost(worker.identity)
    b.router.full = False
    b.answer(connect_worker(b.workers, 1), b.router.batches()[0])
    await asyncio.wait_for(future, LIMIT_S)


def test_padding_counts_where_the_device_computes_it() -> None:
    router = FakeRouter()
    workers = WorkerClient(router, welcome)  # type: ignore[arg-type]  # a fake with the port's names
    worker = connect_worker(workers)
    batch = dispatch_module.Batch(dispatch_module.QueueKey(1, ()), [], 3, 4)
    assert work_module.cost_rows(batch, worker) == 3
    worker.pads.add(1)
    assert work_module.cost_rows(batch, worker) == 4


async def test_a_batch_too_large_for_one_message_travels_in_parts(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served(max_rows=4)
    b = bench(model)
    worker = connect_worker(b.workers, 1)
    send = b.router.send

    def narrow(identity: bytes, message: object) -> bool:
        if isinstance(message, RunBatch) and len(message.items) > 1:
            raise FrameTooBig("over the limit")
        return send(identity, message)  # type: ignore[arg-type]  # whatever the dispatcher sends

    monkeypatch.setattr(b.router, "send", narrow)
    coming = await b.lease(model, prepared=False)
    futures = [await b.submit(model)]
    coming.prepared()
    futures.append(await b.queue(model, [], coming))
    answered = 0
    while answered < len(b.router.batches()):
        b.answer(worker, b.router.batches()[answered])
        answered += 1
    assert [(await asyncio.wait_for(future, LIMIT_S)).batch_rows for future in futures] == [1, 1]


async def test_an_item_too_large_for_any_message_is_answered(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served()
    b = bench(model)
    connect_worker(b.workers, 1)

    def closed(_identity: bytes, _message: object) -> bool:
        raise FrameTooBig("over the limit")

    monkeypatch.setattr(b.router, "send", closed)
    with pytest.raises(TooLarge, match="one message between"):
        await asyncio.wait_for(await b.submit(model), LIMIT_S)


async def test_two_deaths_while_alone_mark_the_input_as_poison(bench: Callable[..., Bench]) -> None:
    model = served()
    b = bench(model)
    worker = connect_worker(b.workers, 1)
    future = await b.submit(model)
    b.workers.on_lost(worker.identity)
    b.workers.on_lost(connect_worker(b.workers, 1).identity)
    with pytest.raises(ProcessLost) as caught:
        await future
    assert caught.value.poison
