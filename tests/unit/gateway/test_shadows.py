import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from gateway import shadows as module
from gateway.agreement import agree
from gateway.orders import RollBack, StartCanary
from gateway.request import SHADOW_PRIORITY, Request
from gateway.served import ServedModel
from gateway.shadows import Results, _again
from shared.errors import Draining, InvalidInput
from shared.messages import BatchDone, ItemAnswer, RunBatch
from shared.pipeline import RawInput
from shared.tensors import Tensor
from shared.traffic import Canary
from tests.support.lives_parts import World, add, given_up, world


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


async def shadowed(w: World, version: str, percent: float = 100.0) -> int:
    """Start a shadow; returns its number."""
    await w.order(StartCanary(Canary(version=version, percent=percent, shadow=True)))
    return w.model(version).number


async def over(w: World) -> None:
    """All copies have been compared."""
    await w.until("all copies", lambda: not w.lives.shadows._copies)


def figures(w: World, version: str) -> tuple[int, int, int, int]:
    """Requests, errors, compared, disagreed."""
    (found,) = (each for each in w.control.figures("words") if each.version == version)
    return found.requests, found.errors, found.compared, found.disagreed


async def test_a_shadow_computes_copies_and_never_answers(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        number = await shadowed(w, new)
        for word in (b"abcd", b"efgh"):
            assert (await w.answer(word)).version == old
        await over(w)
        assert figures(w, new) == (2, 0, 2, 0)
        assert (w.lives.shadows.begun, w.lives.shadows.left_out) == (2, 0)
        assert w.model(new).requests == 0
        assert w.admission.in_flight_requests == 0
        assert {batch.model for batch in w.router.batches()} == {w.current().number, number}
        assert w.metrics.statistics.of("words", new).success.count == 0, "no caller's"


async def test_only_a_share_is_copied_and_nothing_of_what_names_its_version(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await shadowed(w, new, percent=50.0)
        for each in range(40):
            await w.answer(routing_key=str(each), version=old)
        assert w.lives.shadows.begun == 0
        for _ in range(2):
            for each in range(40):
                await w.answer(routing_key=str(each))
        await over(w)
        assert 20 <= w.lives.shadows.begun <= 60
        assert w.lives.shadows.begun % 2 == 0, "the same keys both times"


async def test_an_answer_that_differs_is_counted(root: Path) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        number = await shadowed(w, new)

        def other(batch: RunBatch) -> BatchDone | None:
            if batch.model != number:
                return None
            answers = [ItemAnswer(item.item, [Tensor("x", "UINT8", (1, 4), b"none")]) for item in batch.items]
            return BatchDone(batch.batch, answers, 0.0, 0.0, 0.001, 1)

        w.router.answers = other
        await w.answer()
        await over(w)
        assert figures(w, new) == (1, 0, 1, 1)


async def test_a_copy_s_failure_counts_against_the_shadow_and_reaches_no_caller(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        number = await shadowed(w, new)
        w.router.answers = lambda batch: given_up(batch, "internal", "it raised") if batch.model == number else None
        assert (await w.answer()).version == old
        await over(w)
        assert figures(w, new) == (1, 1, 1, 1)
        w.router.answers = lambda _batch: None

        async def bug(*_: object) -> None:
            raise KeyError("a bug")

        w.lives.shadows._compute = bug  # type: ignore[assignment]  # raises
        assert (await w.answer()).version == old
        await over(w)
        assert figures(w, new) == (2, 2, 2, 2)
        assert w.model(new).requests == 0


async def test_a_copy_that_is_late_counts_as_late_and_not_as_otherwise(root: Path) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await shadowed(w, new)
        request = w.request()
        request.deadline_s = request.arrived_s + 0.02
        w.router.holds_batches = True
        w.lives.shadows.copy(w.model(new), request, [])
        await over(w)
        assert figures(w, new) == (1, 1, 0, 0)
        assert (w.model(new).requests, w.dispatch.waiting_items()) == (0, 0)
        w.router.run()


async def test_copies_under_way_are_bounded_and_the_rest_is_left_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        monkeypatch.setattr(module, "MOST", 2)
        await shadowed(w, new)
        computed, compute = asyncio.Event(), w.lives.shadows._compute

        async def slow(*asked: Any) -> Results:  # noqa: ANN401 - as the flow's
            await computed.wait()
            return await compute(*asked)

        w.lives.shadows._compute = slow
        for _ in range(5):
            await w.answer()
        assert (w.lives.shadows.begun, w.lives.shadows.left_out, len(w.lives.shadows._copies)) == (2, 3, 2)
        assert w.model(new).requests == 2
        computed.set()
        await over(w)
        assert (w.model(new).requests, figures(w, new)) == (0, (2, 0, 2, 0))
        await w.answer()
        assert w.lives.shadows.begun == 3
        await over(w)


async def test_where_there_is_no_room_copies_are_left_out_and_nothing_is_learned(root: Path) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root, admission={"max_requests": 1}) as w:
        await shadowed(w, new)
        request = w.request()
        with w.admission.admit(1, 4, request.arrived_s):
            w.lives.shadows.copy(w.model(new), request, [])
            await over(w)
        assert (w.lives.shadows.left_out, w.model(new).requests) == (1, 0)
        assert figures(w, new) == (0, 0, 0, 0)
        w.admission.close_doors()
        with pytest.raises(Draining):
            await w.answer()


async def test_bytes_that_are_kept_for_copies_are_bounded_but_one_copy_is_always_made(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        monkeypatch.setattr(module, "MOST_BYTES", 20)  # each holds 4 bytes of a word, and 4 of its answer
        await shadowed(w, new)
        compute, go_on = w.lives.shadows._compute, asyncio.Event()

        async def slow(*asked: Any) -> Results:  # noqa: ANN401 - as the flow's
            await go_on.wait()
            return await compute(*asked)

        w.lives.shadows._compute = slow
        for _ in range(4):
            await w.answer()
        assert (w.lives.shadows.begun, w.lives.shadows.left_out, w.lives.shadows._held_bytes) == (2, 2, 16)
        go_on.set()
        await over(w)
        assert (w.lives.shadows._held_bytes, w.model(new).requests) == (0, 0)
        monkeypatch.setattr(module, "MOST_BYTES", 1)
        await w.answer()
        assert w.lives.shadows.begun == 3
        await over(w)


async def test_nothing_is_copied_while_the_caller_waits(root: Path) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await shadowed(w, new)
        asked = w.request()
        seen: list[Request] = []
        compute = w.lives.shadows._compute

        async def noted(model: ServedModel, pieces: Any, request: Request, *rest: Any) -> Results:  # noqa: ANN401 - as the flow's
            seen.append(request)
            return await compute(model, pieces, request, *rest)

        w.lives.shadows._compute = noted
        await w.flow.answer(asked)
        await over(w)
        (copy,) = seen
        assert all(ours is theirs for ours, theirs in zip(copy.inputs, asked.inputs, strict=True))


async def test_large_answers_are_compared_beside_the_loop(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await shadowed(w, new)
        threads: list[bool] = []

        def noted(*answers: Results) -> bool:
            threads.append(threading.current_thread() is threading.main_thread())
            return agree(*answers)

        monkeypatch.setattr(module, "agree", noted)
        for large in (4, 3):  # four bytes are not over four
            monkeypatch.setattr(module, "LARGE", large)
            await w.answer()
            await over(w)
        assert threads == [True, False]
        assert figures(w, new) == (2, 0, 2, 0)


async def test_a_copy_has_as_much_time_again_and_stages_of_its_own(root: Path) -> None:
    add(root, b"old")
    async with world(root) as w:
        request = w.request()
        request.inputs.append(RawInput(kind="tensors"))
        request.unreadable = {1: InvalidInput("what is this?")}
        request.partial_results = True
        request.arrived_s -= 10.0
        request.times.reused = "kept"
        copy = _again(request)
        assert copy.deadline_s - copy.arrived_s == pytest.approx(request.deadline_s - request.arrived_s)
        assert copy.arrived_s > request.arrived_s + 9.0
        assert (copy.priority, copy.times.reused, copy.partial_results) == (SHADOW_PRIORITY, "", True)
        assert (copy.inputs, copy.unreadable) == (request.inputs, request.unreadable)


async def test_a_shadow_that_is_rolled_back_goes_when_its_last_copy_is_done(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await shadowed(w, new)
        shadow = w.model(new)
        await w.answer()
        assert shadow.requests == 1
        w.router.holds_batches = True
        await w.order(RollBack())
        if shadow.requests:
            assert w.roles() == {old: "current", new: "retiring"}
        w.router.run()
        await over(w)
        w.versions.tidy()
        assert w.roles() == {old: "current"}
