"""A canary's whole life in one gateway, by requests."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.orders import DropStandby, RollBack, StartCanary, Switch
from gateway.proof import NOT_FINITE
from gateway.request import Answer, Request
from gateway.split import point
from shared.errors import DeadlineExceeded, HeadraceError, LostTwice
from shared.messages import BatchDone, RunBatch
from shared.traffic import Canary
from tests.support.gateway_parts import done
from tests.support.lives_parts import NAME, World, add, given_up, not_finite, world

SHARE = 25.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


def slow(batch: RunBatch) -> BatchDone:
    """It took ten times as long."""
    answer = done(batch)
    assert isinstance(answer, BatchDone)
    answer.run_s = 0.010
    return answer


BAD: dict[str, Callable[[RunBatch], BatchDone]] = {
    "error rate": lambda batch: given_up(batch, "internal", "it raised"),
    "non-finite rate": not_finite,
    "slow batches": slow,
}


async def callers(w: World, at_most: int) -> dict[str, int]:
    """Callers one after another until the canary is gone; failures by version."""
    failed: dict[str, int] = {}
    for each in range(at_most):
        key = str(each)
        split = w.routing.split(NAME)
        assert split is not None
        version = split.answers(key).version
        try:
            assert (await w.answer(routing_key=key)).version == version
        except HeadraceError:
            failed[version] = failed.get(version, 0) + 1
        if w.lives.judge._ordered:
            await w.until("the rollback", lambda: not w.lives.judge._ordered)
            return failed
    return failed


async def test_requests_that_name_a_version_say_nothing_about_how_fast_it_is(root: Path) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(StartCanary(Canary(version=new, percent=SHARE)))
        for version in w.roles():
            w.router.answers = slow
            await asyncio.gather(*(w.answer(version=version) for _ in range(8)))
        assert {each.version: each.batches for each in w.lives.judge.figures(NAME)} == dict.fromkeys(w.roles(), 0)
        await w.answer(routing_key="somebody")
        assert sum(each.batches for each in w.lives.judge.figures(NAME)) == 1


@pytest.mark.parametrize("measure", list(BAD))
async def test_a_bad_canary_is_rolled_back_by_itself_while_the_current_version_sees_no_error(
    root: Path, measure: str
) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(StartCanary(Canary(version=new, percent=SHARE)))
        number = w.model(new).number
        w.router.answers = lambda batch: BAD[measure](batch) if batch.model == number else None
        failed = await callers(w, 1000)
        assert w.roles() == {old: "current"}
        assert set(failed) <= {new}
        entry = w.on_disk().history[-1]
        assert (entry["action"], entry["by"], entry["to"]) == ("rollback", "guard", old)
        assert entry["figures"]["measure"] == measure
        assert entry["reason"].startswith(measure)
        assert entry["figures"]["canary_total"] <= 60
        figures = {each.version: each for each in w.control.figures(NAME)}
        assert figures[new].requests >= 20, "told after its end, too"
        assert await callers(w, 20) == {}


@pytest.mark.parametrize("shadow", [False, True])
async def test_a_version_whose_proof_gives_nan_is_taken_with_a_warning_and_its_canary_is_judged_as_any(
    root: Path, shadow: bool
) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        number = w.model(old).number
        w.router.answers = lambda batch: None if batch.model == number else not_finite(batch)
        canary = StartCanary(Canary(version=new, percent=SHARE, shadow=shadow))
        for order, action in ((Switch(new), "switch"), (RollBack(ends=new), "rollback"), (canary, canary_word(shadow))):
            entry = (await w.order(order)).history[-1]
            assert (entry["action"], entry.get("reason")) == (action, None if action == "rollback" else NOT_FINITE)
        assert (w.model(new).state.phase, w.model(new).state.doubt) == ("ready", NOT_FINITE)
        assert w.model(old).state.doubt == ""
        if not shadow:
            await callers(w, 200)
            assert w.on_disk().history[-1]["figures"]["measure"] == "non-finite rate"
        assert "reason" not in (await w.order(DropStandby())).history[-1], "nobody gets callers by it"


def canary_word(shadow: bool) -> str:
    return "shadow" if shadow else "canary"


async def test_a_canary_that_is_as_good_stays(root: Path) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(StartCanary(Canary(version=new, percent=SHARE)))
        assert await callers(w, 300) == {}
        assert w.roles()[new] == "canary"
        current, canary = w.control.figures(NAME)
        assert current.requests + canary.requests == 300
        assert canary.batches > 0


async def test_callers_mistakes_say_nothing_about_a_canary(root: Path) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(StartCanary(Canary(version=new, percent=100.0)))
        for _ in range(100):
            with pytest.raises(HeadraceError):
                await w.answer(b"too long a word")
        assert (w.roles()[new], w.control.figures(NAME)[1].requests) == ("canary", 0)


async def test_a_rollback_under_load_loses_no_request_and_needs_no_load(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(StartCanary(Canary(version=new, percent=50.0)))
        loads, answered = w.router.loads(), []
        stop = asyncio.Event()

        async def caller(name: int) -> None:
            for each in itertools.count():
                answered.append((await w.answer(routing_key=f"{name}-{each}")).version)
                await asyncio.sleep(0.001)  # a loop that never waits leaves no turn to the thread that reads the disk
                if stop.is_set():
                    return

        under_way = [asyncio.create_task(caller(each)) for each in range(8)]
        await w.until("both to answer", lambda: {old, new} <= set(answered))
        await w.order(RollBack("by hand"))
        before = len(answered)
        await w.until("more answers", lambda: len(answered) > before + 100)
        stop.set()
        await asyncio.gather(*under_way)
        assert answered[before:].count(new) <= len(under_way), "what was under way may still end"
        w.versions.tidy()
        assert (w.roles(), w.router.loads()) == ({old: "current"}, loads)


async def test_a_version_that_goes_is_forgotten_by_whoever_kept_something_of_it(root: Path) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        for _ in range(5):
            await w.order(StartCanary(Canary(version=new, percent=100.0)))
            await w.answer()
            await w.order(RollBack())
            w.versions.tidy()
        assert len(w.row_caps._caps) == len(w.row_caps._whole) == 1
        assert len(w.cost._fits) == 1
        assert len(w.metrics._versions) <= 1
        assert len(w.workers._models) == 1
        assert len(w.readiness._pipelines_open) == 1


async def test_a_batch_that_comes_back_after_its_callers_and_its_version_have_gone_leaves_nothing(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(StartCanary(Canary(version=new, percent=100.0)))
        w.router.holds_batches = True
        caller = asyncio.create_task(w.answer())
        await w.until("the batch", lambda: w.router.held_batches)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        await w.order(RollBack())
        w.versions.tidy()
        assert w.roles() == {old: "current"}
        assert not w.metrics.statistics.has(NAME, new)
        w.router.run()
        assert not w.metrics.statistics.has(NAME, new)
        assert w.metrics.drops.rows_for_nobody[NAME] == 1


@pytest.mark.parametrize("partial", [False, True])
async def test_inputs_of_one_batch_that_end_their_worker_twice_each_roll_a_canary_back_at_the_third(
    root: Path, partial: bool
) -> None:
    """With partial results the failures come as results: the requests themselves are answered."""
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(StartCanary(Canary(version=new, percent=SHARE)))
        w.router.ends = lambda batch: any(bytes(item.tensors[0].data)[:3] == b"bad" for item in batch.items)
        asked = w.request(b"bad0", routing_key=keys_of(new, 1)[0], partial_results=partial)
        for word in (b"bad1", b"bad2", b"fine"):
            asked.inputs.append(w.request(word).inputs[0])
        caller = asyncio.create_task(w.flow.answer(asked))
        for _ in range(4):
            assert w.routing.split(NAME).canary is not None, "not before"  # type: ignore[union-attr]  # it is served
            await w.until("the worker to be gone", lambda: caller.done() or not list(w.workers.workers()))
            if caller.done():
                break
            w.greet()
        (ended,) = await asyncio.gather(caller, return_exceptions=True)
        assert isinstance(ended.results[0] if isinstance(ended, Answer) else ended, LostTwice)
        if partial:
            await rolled_back(w, old)
            assert w.on_disk().history[-1]["figures"]["measure"] == "ended workers"


def keys_of(canary: str, number: int) -> list[str]:
    """Of so many callers in its share."""
    return [key for key in map(str, range(1000)) if point(NAME, canary, key) < SHARE / 100][:number]


async def rolled_back(w: World, old: str) -> None:
    """By the guard, and written."""
    await w.until("the rollback", lambda: not w.lives.judge._ordered and w.control.traffic(NAME).canary is None)
    w.versions.tidy()
    assert w.roles() == {old: "current"}
    assert w.on_disk().history[-1]["by"] == "guard"


async def test_a_canary_whose_inputs_end_workers_is_rolled_back_at_the_second_one(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(StartCanary(Canary(version=new, percent=SHARE)))
        canary = w.model(new)
        w.router.ends = lambda batch: any(bytes(item.tensors[0].data)[:3] == b"bad" for item in batch.items)
        for number, key in enumerate(keys_of(new, 2)):
            assert w.roles()[new] == "canary", "one input is not enough, though it ended two workers"
            caller = asyncio.create_task(w.answer(b"bad%d" % number, routing_key=key))
            for _ in range(2):
                await w.until("the worker to be gone", lambda: not list(w.workers.workers()))
                w.greet()
            (ended,) = await asyncio.gather(caller, return_exceptions=True)
            assert isinstance(ended, LostTwice)
            await w.until("the canary", lambda: canary.state.phase in {"ready", "unloaded"})
        await rolled_back(w, old)
        entry = w.on_disk().history[-1]
        assert (entry["figures"]["measure"], entry["figures"]["canary_batches"]) == ("lost workers", 2)
        assert entry["reason"] == "a worker died or hung with 2 of its batches, with 0 of the current version's"


async def test_a_canary_that_its_worker_s_successor_can_not_load_is_rolled_back_once_the_current_version_is_there(
    root: Path,
) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(StartCanary(Canary(version=new, percent=SHARE)))
        w.router.bad[new] = "its weights are gone"
        w.router.holds.add(old)
        w.workers.on_lost(next(iter(w.workers.workers())).identity)
        w.greet()
        await w.until("it to fail", lambda: w.model(new).state.phase == "failed")
        assert w.lives.judge._ordered == {}, "nobody else could answer"
        w.router.finish()
        await rolled_back(w, old)
        entry = w.on_disk().history[-1]
        assert (entry["reason"], entry["figures"]["measure"]) == ("can't be loaded: its weights are gone", "load")
        assert (await w.answer(routing_key=keys_of(new, 1)[0])).version == old


async def test_a_canary_that_hangs_is_rolled_back_at_the_second_time_and_the_late_answers_are_not_the_other_ones(
    root: Path,
) -> None:
    """Its callers' deadlines are shorter than it takes to find that it hangs."""
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(StartCanary(Canary(version=new, percent=SHARE)))
        canary, key = w.model(new), keys_of(new, 1)[0]
        others = [each for each in map(str, range(100)) if point(NAME, new, each) >= SHARE / 100]
        for hang in range(2):
            assert w.roles()[new] == "canary", "not at the first time"
            w.router.holds_batches = True
            late = [asyncio.create_task(w.flow.answer(short(w, key)))]
            await w.until("its batch", lambda: w.router.held_batches)
            assert w.router.held_batches[0][1].model == canary.number
            late += [asyncio.create_task(w.flow.answer(short(w, each))) for each in others[hang * 20 :][:20]]
            outcomes = await asyncio.gather(*late, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {DeadlineExceeded}
            w.router.holds_batches, w.router.held_batches = False, []
            waits = asyncio.create_task(w.flow.answer(short(w, others[0])))  # while no worker is there
            await asyncio.sleep(0)
            w.workers.on_lost(next(iter(w.workers.workers())).identity)  # it is killed at worker.hang_limit_ms
            assert isinstance((await asyncio.gather(waits, return_exceptions=True))[0], DeadlineExceeded)
            w.greet()
            await w.until(
                "them to be back", lambda: w.current().state.phase == "ready" and canary.state.phase != "loading"
            )
            await w.answer(routing_key=others[0])
        await rolled_back(w, old)
        assert w.on_disk().history[-1]["figures"]["measure"] == "lost workers"
        figures = {each.version: each for each in w.control.figures(NAME)}
        assert (figures[old].requests, figures[old].errors) == (1, 0)
        assert figures[new].errors == 2


def short(w: World, key: str) -> Request:
    """One with hardly any time."""
    asked = w.request(routing_key=key)
    asked.deadline_s = asked.arrived_s + 0.05
    return asked


async def test_a_bug_in_judging_fails_no_request_that_is_answered(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(root, b"old")
    async with world(root) as w:
        monkeypatch.setattr(w.lives.judge, "saw", None)  # can't be called
        monkeypatch.setattr(w.lives.judge, "_watched", {NAME: None})
        assert (await w.answer()).version == w.current().version
