"""A model that is loaded beside those that answer, and what becomes of the server when it can't be."""

import asyncio
from pathlib import Path

import pytest

from shared.errors import InvalidInput, NotReady
from tests.support.lives_parts import MODEL_YAML, add, world


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


async def test_a_new_model_that_can_not_be_loaded_changes_nothing_for_the_others(root: Path) -> None:
    old = add(root, b"old")
    async with world(root) as w:
        version = add(root, b"other", "other")
        w.router.holds.add(version)
        w.router.bad[version] = "no memory"
        loading = asyncio.create_task(w.control.load("other"))
        await w.until("its load", lambda: w.router.held)
        assert w.readiness.not_ready_reason() is None
        w.router.finish()
        with pytest.raises(NotReady, match="no memory"):
            await loading
        state = w.current("other").state
        assert (w.readiness.not_ready_reason(), state.phase, state.reason) == (None, "failed", "no memory")
        assert (await w.answer(model="")).version == old, "the only one for callers who name none"
        w.router.bad.clear()
        await w.control.load("other")
        with pytest.raises(InvalidInput, match="several take"):
            await w.answer(model="")
        for worker in list(w.workers.workers()):
            w.workers.on_lost(worker.identity)
        assert w.readiness.not_ready_reason() is not None
        w.router.bad[version] = "no memory any more"
        w.greet()
        states = [w.current().state, w.current("other").state]
        await w.until("them to be settled", lambda: [each.phase for each in states] == ["ready", "failed"])
        assert "'other' is not ready" in (w.readiness.not_ready_reason() or ""), "it has been ready: callers rely on it"


async def test_a_model_that_could_not_be_served_at_the_start_is_missed_until_it_is(root: Path) -> None:
    add(root, b"old")
    version = add(root, b"other", "other")
    (root / "other" / "model.yaml").write_text("colour: red\n")
    async with world(root) as w:
        assert "'other' is not ready" in (w.readiness.not_ready_reason() or "")
        (root / "other" / "model.yaml").write_text(MODEL_YAML)
        w.router.bad[version] = "no memory"
        with pytest.raises(NotReady, match="no memory"):
            await w.control.load("other")
        assert "'other' is not ready" in (w.readiness.not_ready_reason() or "")
        w.router.bad.clear()
        await w.control.load("other")
        assert w.readiness.not_ready_reason() is None
