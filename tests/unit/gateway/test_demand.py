import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.orders import StartCanary
from gateway.request import Answer
from gateway.served import ServedModel
from gateway.split import Split
from shared.errors import DeadlineExceeded, NotReady
from shared.messages import PipelineOpened, RunBatch
from shared.traffic import Canary
from tests.support.lives_parts import NAME, World, add, given_up, world

LAZY = "load: on_demand\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


def ask(w: World, **fields: Any) -> "asyncio.Task[Answer]":  # noqa: ANN401 - of a request
    return asyncio.create_task(w.answer(**fields))


async def test_a_version_is_loaded_by_the_first_request_and_asked_for_once_by_many(root: Path) -> None:
    version = add(root, b"one", more=LAZY)
    async with world(root) as w:
        assert (w.current().state.phase, w.router.loads()) == ("on_demand", [])
        assert w.readiness.not_ready_reason() is None
        w.router.holds.add(version)
        asked = [ask(w) for _ in range(5)]
        await w.until("all to wait", lambda: w.lives.demand.waiting() == 5)
        assert (w.current().state.phase, w.router.loads()) == ("loading", [version])
        w.router.finish()
        assert {(await each).version for each in asked} == {version}
        assert w.lives.demand.waiting() == 0
        await w.answer()
        assert w.router.loads() == [version]


async def test_those_who_wait_are_told_when_it_can_not_be_loaded_and_the_next_one_is_refused_at_once(
    root: Path,
) -> None:
    version = add(root, b"one", more=LAZY)
    async with world(root) as w:
        w.router.holds.add(version)
        asked = [ask(w) for _ in range(3)]
        await w.until("all to wait", lambda: w.lives.demand.waiting() == 3)
        w.router.bad[version] = "it needs 9 GB, and the budget is 8 GB"
        w.router.finish()
        for each in asked:
            with pytest.raises(NotReady, match="model 'words' can't be loaded: it needs 9 GB"):
                await each
        assert w.lives.demand.waiting() == 0
        with pytest.raises(NotReady, match="it needs 9 GB"):
            await w.answer()
        assert w.router.loads() == [version]


async def test_one_that_failed_may_be_asked_for_again_after_a_while(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = add(root, b"one", more=LAZY)
    async with world(root) as w:
        w.router.bad[version] = "no memory"
        with pytest.raises(NotReady):
            await w.answer()
        w.router.bad.clear()
        w.readiness.tick()
        assert w.current().state.phase == "failed", "not at once"
        monkeypatch.setattr("gateway.readiness.TRY_AGAIN_S", -1.0)
        w.readiness.tick()
        assert (await w.answer()).version == version


async def test_who_leaves_while_it_waits_leaves_nothing_and_the_load_goes_on(root: Path) -> None:
    version = add(root, b"one", more=LAZY)
    async with world(root) as w:
        w.router.holds.add(version)
        leaving, staying = ask(w), ask(w)
        await w.until("both to wait", lambda: w.lives.demand.waiting() == 2)
        leaving.cancel()
        await asyncio.wait((leaving,))
        assert (w.lives.demand.waiting(), w.current().requests) == (1, 1)
        staying.cancel()
        await asyncio.wait((staying,))
        assert (w.lives.demand._waiting, w.current().requests, w.admission.in_flight_requests) == ({}, 0, 0)
        w.router.finish()
        await w.until("it to be ready", lambda: w.current().state.phase == "ready")


async def test_a_deadline_ends_the_wait(root: Path) -> None:
    version = add(root, b"one", more=LAZY)
    async with world(root) as w:
        w.router.holds.add(version)
        request = w.request()
        request.deadline_s = request.arrived_s + 0.03
        with pytest.raises(DeadlineExceeded):
            await w.flow.answer(request)
        assert w.lives.demand._waiting == {}


async def test_a_worker_that_is_lost_while_it_loads_is_followed_by_one_that_is_asked_again(root: Path) -> None:
    version = add(root, b"one", more=LAZY)
    async with world(root) as w:
        w.router.holds.add(version)
        asked = ask(w)
        await w.until("it to wait", lambda: w.lives.demand.waiting() == 1)
        (worker,) = w.workers.workers()
        w.workers.on_lost(worker.identity)
        await asyncio.sleep(0)
        assert w.current().state.phase == "no_worker"
        w.router.holds.clear()
        w.greet()
        assert (await asked).version == version
        assert w.router.loads() == [version, version]
        assert w.lives.demand._waiting == {}


async def test_no_worker_for_longer_than_the_limit_is_the_end_of_the_wait(root: Path) -> None:
    version = add(root, b"one", more=LAZY)
    async with world(root, worker={"return_limit_ms": 20}) as w:
        w.router.holds.add(version)
        asked = ask(w)
        await w.until("it to wait", lambda: w.lives.demand.waiting() == 1)
        (worker,) = w.workers.workers()
        w.workers.on_lost(worker.identity)
        with pytest.raises(NotReady, match="no worker is connected"):
            await asked
        assert w.lives.demand._waiting == {}


async def test_the_second_of_two_workers_goes_on_loading_when_the_first_is_lost(root: Path) -> None:
    version = add(root, b"one", more=LAZY)
    async with world(root) as w:
        w.greet("worker-1")
        w.router.holds.add(version)
        asked = ask(w)
        await w.until("both to be asked", lambda: len(w.router.held) == 2)
        identity, _ = w.router.held.pop(0)
        w.workers.on_lost(identity)
        w.router.finish()
        assert (await asked).version == version
        assert w.router.loads() == [version, version], "one each"


async def test_what_is_given_up_before_it_was_proven_is_loaded_again_for_those_who_wait(root: Path) -> None:
    version = add(root, b"one", more=LAZY)
    async with world(root) as w:
        await w.until("its pipeline", lambda: w.readiness._pipelines_open)
        w.readiness._pipelines_open.clear()  # as if the pool were still at it
        asked = ask(w)
        await w.until("it to be loaded", lambda: w.current().state.phase == "proving")
        (worker,) = w.workers.workers()
        w.router.evict(worker, w.current().number)
        await w.until("it to be loaded again", lambda: w.current().state.phase == "proving")
        assert w.router.loads() == [version, version]
        w.processes.answer(b"pool-0.1", PipelineOpened(w.current().number))
        assert (await asked).version == version


async def test_what_waits_for_an_evicted_version_is_loaded_again(root: Path) -> None:
    version = add(root, b"one", more=LAZY)
    async with world(root) as w:
        await w.answer()
        (worker,) = w.workers.workers()
        w.router.holds.add(version)
        model = w.current()
        w.router.evict(worker, model.number)
        assert (model.state.phase, worker.loaded, w.router.held) == ("on_demand", set(), [])
        asked = ask(w)
        await w.until("it to be asked for", lambda: w.router.held)
        w.router.finish()
        await asked


async def test_a_batch_that_crossed_an_eviction_is_loaded_for_and_answered(root: Path) -> None:
    version = add(root, b"one", more=LAZY)
    async with world(root) as w:
        await w.answer()
        (worker,) = w.workers.workers()
        w.router.holds_batches = True
        asked = ask(w)
        await w.until("its batch to be on its way", lambda: w.router.held_batches)
        ((_, batch),) = w.router.held_batches
        w.router.held_batches.clear()
        w.router.holds.add(version)
        w.router.evict(worker, batch.model)
        w.workers.on_message(worker.identity, given_up(batch))
        assert (len(w.dispatch.parked), asked.done()) == (1, False)
        await w.until("it to be asked for", lambda: w.router.held)
        w.router.holds_batches = False
        w.router.finish()
        assert (await asked).version == version
        assert w.router.loads() == [version, version]


async def test_a_pinned_version_that_is_not_ready_is_refused_and_never_asked_for(root: Path) -> None:
    version = add(root, b"one")
    async with world(root) as w:
        w.lives.demand.load(w.current())
        w.current().state.phase = "loading"
        with pytest.raises(NotReady, match="is not ready"):
            await w.answer()
        assert w.router.loads() == [version]


async def test_an_unpinned_batch_is_answered_not_ready_when_the_version_was_unloaded(root: Path) -> None:
    add(root, b"one", more=LAZY)
    async with world(root) as w:
        await w.answer()
        (worker,) = w.workers.workers()
        w.router.holds_batches = True
        asked = ask(w)
        await w.until("its batch", lambda: w.router.held_batches)
        batch: RunBatch = w.router.held_batches[0][1]
        await w.control.unload(NAME)
        w.workers.on_message(worker.identity, given_up(batch))
        with pytest.raises(NotReady, match="was unloaded"):
            await asked


# ------------------------------------------------------------ canaries


async def canary(w: World, version: str, *, shadow: bool = False) -> ServedModel:
    """All callers are its, or are copied to it; it was given up for another version's sake since it was proven."""
    await w.order(StartCanary(Canary(version=version, percent=100.0, shadow=shadow)))
    model = w.model(version)
    (worker,) = w.workers.workers()
    w.router.evict(worker, model.number)
    assert model.state.phase == "on_demand"
    return model


async def test_the_current_version_answers_for_a_canary_that_can_not_be_loaded_and_it_is_rolled_back(
    root: Path,
) -> None:
    old, new = add(root, b"old", more=LAZY), add(root, b"new")
    async with world(root) as w:
        model = await canary(w, new)
        w.router.holds.add(new)
        asked = ask(w)
        named = ask(w, version=new)
        await w.until("both to wait", lambda: w.lives.demand.waiting() == 2)
        w.router.bad[new] = "it needs 9 GB, and the budget is 8 GB"
        w.router.finish()
        assert (await asked).version == old
        with pytest.raises(NotReady, match="it needs 9 GB"):  # who chose it gets no other one
            await named
        await w.until(
            "the rollback", lambda: w.routing.split(NAME) == Split(w.current()) and not w.lives.judge._ordered
        )
        entry = w.on_disk().history[-1]
        assert (entry["action"], entry["by"], entry["from"]) == ("rollback", "guard", new)
        assert entry["reason"] == "can't be loaded: it needs 9 GB, and the budget is 8 GB"
        assert (await w.answer()).version == old
        assert (model.requests, w.current().requests, w.admission.in_flight_requests) == (0, 0, 0)
        assert w.router.loads().count(new) == 2, "at its start, and once since"


async def test_without_a_guard_a_canary_that_can_not_be_loaded_stays_and_costs_nobody_an_answer(root: Path) -> None:
    old, new = add(root, b"old", more=LAZY), add(root, b"new")
    async with world(root, guard={"enabled": False}) as w:
        model = await canary(w, new)
        w.router.bad[new] = "it needs 9 GB"
        assert (await w.answer()).version == old
        assert (model.state.phase, w.roles()[new]) == ("failed", "canary")
        assert (await w.answer()).version == old
        del w.router.bad[new]
        w.readiness._without_worker(model)  # as after a while
        assert (await w.answer()).version == new


async def test_where_neither_can_be_loaded_the_canary_is_not_to_blame(root: Path) -> None:
    old, new = add(root, b"old", more=LAZY), add(root, b"new")
    async with world(root) as w:
        await canary(w, new)
        w.current().state.phase, w.current().state.reason = "failed", "the device is gone"
        w.router.bad[new] = "the device is gone"
        with pytest.raises(NotReady, match="the device is gone"):
            await w.answer()
        assert w.roles() == {old: "current", new: "canary"}
        assert w.lives.judge._ordered == {}


async def test_a_shadow_that_can_not_be_loaded_is_ended_for_that_and_not_for_disagreeing(root: Path) -> None:
    old, new = add(root, b"old", more=LAZY), add(root, b"new")
    async with world(root) as w:
        await canary(w, new, shadow=True)
        w.router.bad[new] = "it needs 9 GB"
        assert (await w.answer()).version == old
        await w.until(
            "the rollback", lambda: w.routing.split(NAME) == Split(w.current()) and not w.lives.judge._ordered
        )
        assert w.on_disk().history[-1]["reason"] == "can't be loaded: it needs 9 GB"
        assert w.control.figures(NAME)[1].disagreed == 0
