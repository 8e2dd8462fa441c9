import asyncio
from pathlib import Path

import pytest

from gateway import versions as module
from gateway.orders import StartCanary, Switch
from shared.errors import NotReady, UnknownVersion
from shared.messages import ModelLoaded
from shared.model_config import config_bytes
from shared.traffic import Canary
from tests.support.lives_parts import NAME, World, add, given_up, world


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


def traces(w: World, number: int) -> list[str]:
    """Where something of a version is kept."""
    kept = {
        "routing": w.routing.get(number) is not None,
        "workers": number in w.workers._models,
        "worker": any(number in worker.loaded | worker.asked | set(worker.failed) for worker in w.workers.workers()),
        "pool": number in {message.model for message in w.processes.opened} - set(w.processes.closed),
        "dispatch": number in w.dispatch._models,
        "batcher": number in w.dispatch._batcher._limits,
        "cost": any(key.model == number for key in w.cost._fits),
        "row caps": number in w.row_caps._caps or number in w.row_caps._whole,
        "readiness": any(
            number in kept
            for kept in (
                w.readiness._pipelines_open,
                w.readiness._failures,
                w.readiness._failed_s,
                w.readiness._refused,
                w.readiness._proving,
            )
        ),
        "held": number in w.control._preparer._held,
        "leaving": bool(w.versions._leaving),
    }
    return [where for where, is_kept in kept.items() if is_kept]


async def test_a_version_that_serves_is_known_everywhere(root: Path) -> None:
    add(root, b"old")
    async with world(root) as w:
        await w.answer()
        found = traces(w, w.current().number)
        assert {"routing", "workers", "worker", "pool", "dispatch", "batcher", "cost", "row caps", "readiness"} <= set(
            found
        )


@pytest.mark.parametrize("fault", ["load", "pipeline", "proof", "cancelled"])
async def test_a_version_that_could_not_be_brought_up_leaves_nothing_behind(root: Path, fault: str) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        number = w.versions._next_number
        if fault == "load":
            w.router.bad[new] = "no memory"
        elif fault == "pipeline":
            w.processes.refused.add(new)
        elif fault == "proof":
            w.router.answers = lambda batch: given_up(batch, "internal", "it raised") if batch.model == number else None
        else:
            w.router.holds.add(new)
        coming = asyncio.create_task(w.versions.bring_up(NAME, new, config_bytes(root / NAME)))
        if fault == "cancelled":
            await w.until("its load", lambda: w.router.held)
            assert traces(w, number) != []
            coming.cancel()
        await asyncio.wait((coming,))
        assert coming.cancelled() or isinstance(coming.exception(), NotReady)
        await asyncio.sleep(0)
        assert traces(w, number) == []
        for identity, message in w.router.held:  # the load was under way: its answer comes late
            w.router.load(identity, message)
        assert traces(w, number) == []
        assert w.phases() == {old: ("current", "ready")}


async def test_a_hundred_failed_loads_leave_nothing(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        w.router.bad[new] = "no memory"
        for _ in range(100):
            with pytest.raises(NotReady, match="no memory"):
                await w.versions.bring_up(NAME, new, config_bytes(root / NAME))
        assert w.phases() == {old: ("current", "ready")}
        assert len(w.dispatch._models) == len(w.workers._models) == 1


async def test_what_can_not_be_read_is_told_without_a_trace(root: Path) -> None:
    add(root, b"old")
    async with world(root) as w:
        number = w.versions._next_number
        with pytest.raises(UnknownVersion):
            await w.versions.bring_up(NAME, "f" * 16, config_bytes(root / NAME))
        with pytest.raises(NotReady, match=r"can't be loaded: words/model\.yaml") as caught:
            await w.versions.bring_up(NAME, "", b"pipeline: [")
        assert str(root) not in caught.value.text
        assert traces(w, number) == traces(w, number + 1) == []


async def test_a_load_that_takes_too_long_is_given_up(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        monkeypatch.setattr(module, "LOAD_LIMIT_S", 0.02)
        w.router.holds.add(new)
        number, told = w.versions._next_number, list(w.readiness._changed)
        with pytest.raises(NotReady, match="is still loading"):
            await w.versions.bring_up(NAME, new, config_bytes(root / NAME))
        assert traces(w, number) == []
        assert w.readiness._changed == told, "nobody who waited is told any more"


async def test_a_version_on_demand_whose_worker_dies_before_the_proof_is_not_taken_for_proven(root: Path) -> None:
    _, new = add(root, b"old", more="load: on_demand\n"), add(root, b"new")
    async with world(root) as w:
        await w.answer()
        w.router.holds.add(new)
        ordered = asyncio.create_task(w.order(Switch(new)))
        await w.until("its load", lambda: w.router.held)
        (worker,) = w.workers.workers()
        w.workers.on_lost(worker.identity)
        w.router.held.clear()
        w.greet()
        await w.until("it to be asked for again", lambda: w.router.held)
        assert not ordered.done()
        w.router.bad[new] = "it ends the worker"
        w.router.finish()
        with pytest.raises(NotReady, match="it ends the worker"):
            await ordered
        assert new not in w.roles()


async def test_one_that_was_proven_and_given_up_again_has_settled(root: Path) -> None:
    add(root, b"old", more="load: on_demand\n")
    async with world(root) as w:
        await w.answer()
        (worker,) = w.workers.workers()
        w.router.evict(worker, w.current().number)
        loads = w.router.loads()
        await w.versions.settled(w.current())
        assert w.router.loads() == loads


async def test_a_retired_version_stays_until_its_last_request_is_answered(root: Path) -> None:
    old, new, third = add(root, b"old"), add(root, b"new"), add(root, b"third")
    async with world(root) as w:
        await w.order(Switch(new))
        await w.order(Switch(third))  # `old` is nothing to anybody now
        assert w.roles() == {new: "standby", third: "current"}
        await w.order(StartCanary(Canary(version=old, percent=100.0)))
        w.router.holds_batches = True
        asked = asyncio.create_task(w.answer())
        await w.until("its batch", lambda: w.router.held_batches)
        leaving = w.model(old)
        w.router.holds_batches = False
        await w.order(Switch(new))
        w.versions.tidy()
        assert (w.roles()[old], leaving.requests) == ("retiring", 1)
        w.router.run()
        assert (await asked).version == old
        w.versions.tidy()
        assert old not in w.roles()
        assert traces(w, leaving.number) == []


def series(w: World, version: str) -> float | None:
    labels = {"model": NAME, "version": version, "outcome": "ok"}
    return w.metrics.registry.get_sample_value("headrace_version_requests_total", labels)


async def test_a_version_s_series_end_with_it_and_not_with_one_content_of_model_yaml(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(StartCanary(Canary(version=new, percent=100.0)))
        await w.answer()
        path = root / NAME / "model.yaml"
        path.write_text(path.read_text() + "batching: {max_rows: 2}\n")
        await w.control.reconcile(NAME)
        await w.answer()
        assert series(w, new) == 2
        await w.order(Switch(old))  # ends the canary
        assert (new in w.roles(), series(w, new)) == (False, None)
        await w.answer()
        assert series(w, old) == 1


async def test_the_last_request_of_a_version_that_was_let_go_leaves_no_series_behind(root: Path) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(StartCanary(Canary(version=new, percent=100.0)))
        w.router.holds_batches = True
        asked = asyncio.create_task(w.answer())
        await w.until("its batch", lambda: w.router.held_batches)
        await w.control.unload(NAME)
        assert new not in w.roles()
        w.router.run()
        await asyncio.wait((asked,))
        w.versions.tidy()
        assert (NAME, new) not in w.metrics._versions
        assert (NAME, new) not in w.metrics.statistics._versions
        assert w.versions._leaving == []


async def test_a_number_is_never_given_twice(root: Path) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        numbers = set()
        for _ in range(3):
            await w.order(StartCanary(Canary(version=new, percent=1.0)))
            numbers.add(w.model(new).number)
            await w.order(Switch(w.current().version))
        assert len(numbers | {w.current().number}) == 4


async def test_a_worker_s_word_about_a_version_that_is_gone_changes_nothing(root: Path) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(StartCanary(Canary(version=new, percent=1.0)))
        gone = w.model(new)
        await w.order(Switch(w.current().version))
        (worker,) = w.workers.workers()
        loaded = ModelLoaded(gone.number, [(1, 0.1)], 10, "fp32", 0.1, pads=True, row_cap=3)
        w.workers.on_message(worker.identity, loaded)
        assert traces(w, gone.number) == []
        assert (worker.pads, w.current().max_rows > 3) == (set(), True)
