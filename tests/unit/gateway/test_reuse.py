import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway import cache
from gateway.leases import Lease, Leases
from gateway.orders import StartCanary, Switch
from gateway.request import Request
from gateway.reuse import BEFORE_THE_DOOR, IN_A_THREAD, Question, Reuse
from gateway.served import ServedModel, Terms
from shared.arena import Arena
from shared.clock import FOREVER_S, now_s
from shared.errors import DeadlineExceeded, InternalFault, InvalidInput, NonfiniteOutput, Overloaded
from shared.messages import Prepared
from shared.pipeline import Options, RawInput
from shared.results import Text
from shared.settings_base import CacheSettings
from shared.tensors import SlotRef, Tensor
from shared.traffic import Canary
from tests.support.gateway_parts import served
from tests.support.lives_parts import NAME, add, given_up, not_finite, world

ON: dict[str, Any] = {"results_budget_bytes": 1 << 20, "single_flight": True}


class Asked(Options, frozen=True):
    """Options with something to tell apart."""

    top_k: int = 5


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


def request(*words: bytes, **fields: Any) -> Request:  # noqa: ANN401 - of a request
    now = now_s()
    inputs = [RawInput(kind="text", data=word) for word in words or (b"word",)]
    return Request(NAME, "", "id", inputs, {}, now + 1, now, 4, **fields)


def model(number: int = 1, **changes: str) -> ServedModel:
    made = served(number, name=changes.get("name", NAME))
    made.state.version = changes.get("version", "a" * 16)
    made.config = changes.get("config", "").encode()
    return made


async def key(reuse: Reuse, of: ServedModel, asked: Request, options: Options | None = None) -> bytes | None:
    question = Question(of, asked, options or Asked())
    await reuse.look(question)
    return question.key


async def test_each_thing_that_an_answer_depends_on_makes_another_key() -> None:
    reuse = Reuse(CacheSettings(**ON))
    keys = [
        await key(reuse, model(), request()),
        await key(reuse, model(name="other"), request()),
        await key(reuse, model(version="b" * 16), request()),
        await key(reuse, model(config="colour: red"), request()),
        await key(reuse, model(2), request()),
        await key(reuse, model(), request(), Asked(top_k=4)),
        await key(reuse, model(), request(b"worD")),
        await key(reuse, model(), request(b"word", b"word")),
        await key(reuse, model(), request(b"wordword")),
        await key(reuse, model(), request(partial_results=True)),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)


async def test_what_a_caller_claims_makes_no_other_key() -> None:
    reuse = Reuse(CacheSettings(**ON))
    usual = await key(reuse, model(), request())
    assert await key(reuse, model(), request(routing_key="somebody", priority=7), Asked(top_k=5)) == usual
    other = request()
    other.request_id = "another"
    assert await key(reuse, model(), other) == usual


async def test_what_is_to_be_computed_has_no_key() -> None:
    reuse = Reuse(CacheSettings(**ON))
    assert await key(reuse, model(), request(reuse=False)) is None
    unreadable: dict[int, Any] = {0: InvalidInput("no picture")}
    assert await key(reuse, model(), request(partial_results=True, unreadable=unreadable)) is None
    uncached = model()
    uncached.cached = False
    assert await key(reuse, uncached, request()) is None
    off = Reuse(CacheSettings())
    assert await key(off, model(), request()) is None
    assert (off.stores(), off.joined()) == ([], 0)


async def test_an_answer_is_computed_once_and_then_kept(root: Path) -> None:
    version = add(root, b"old")
    async with world(root, cache=ON) as w:
        batches = len(w.router.batches())
        first = await w.answer()
        again = w.request()
        second = await w.flow.answer(again)
        assert len(w.router.batches()) == batches + 1
        assert (first.results, first.version) == (second.results, second.version)
        assert second.version == version
        assert (again.times.reused, again.times.version) == ("kept", version)
        assert 'cache;desc="kept"' in again.times.server_timing()
        await w.answer(b"WORD")
        await w.answer(reuse=False)
        assert len(w.router.batches()) == batches + 3
        ((name, store),) = w.lives.reuse.stores()
        assert (name, store.hits, store.misses, len(store)) == ("results", 1, 2, 2)


async def test_no_answer_crosses_versions_or_a_changed_model_yaml(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root, cache=ON) as w:
        assert [(await w.answer()).version for _ in range(2)] == [old, old]
        await w.order(StartCanary(Canary(version=new, percent=100.0)))
        batches = len(w.router.batches())
        assert [(await w.answer()).version for _ in range(2)] == [new, new]
        assert (await w.answer(version=old)).version == old
        assert len(w.router.batches()) == batches + 1
        await w.order(Switch(new))
        assert (await w.answer()).version == new
        path = root / NAME / "model.yaml"
        path.write_text(path.read_text() + "batching: {max_rows: 2}\n")
        await w.control.reconcile(NAME)
        batches = len(w.router.batches())
        await w.answer()
        assert len(w.router.batches()) == batches + 1, "whatever was kept is of another model.yaml"


async def test_a_hundred_who_ask_the_same_at_once_cost_one_pass(root: Path) -> None:
    add(root, b"old")
    async with world(root, cache={"single_flight": True}) as w:
        batches = len(w.router.batches())
        w.router.holds_batches = True
        requests = [w.request() for _ in range(100)]
        asked = [asyncio.create_task(w.flow.answer(each)) for each in requests]
        await w.until("the batch", lambda: w.router.held_batches)
        w.router.run()
        answers = await asyncio.gather(*asked)
        assert len(w.router.batches()) == batches + 1
        assert len({id(answer.results) for answer in answers}) == 100, "each has a list of its own"
        assert all(answer.results == answers[0].results for answer in answers)
        assert sorted(each.times.reused for each in requests) == [""] + ["shared"] * 99
        assert w.lives.reuse.joined() == 99
        await w.answer()
        assert len(w.router.batches()) == batches + 2, "nothing is kept"


async def test_one_who_leaves_takes_nobody_with_it(root: Path) -> None:
    add(root, b"old")
    async with world(root, cache={"single_flight": True}) as w:
        w.router.holds_batches = True
        asked = [asyncio.create_task(w.answer()) for _ in range(3)]
        await w.until("the batch", lambda: w.router.held_batches)
        asked[0].cancel()
        await w.until("another batch", lambda: len(w.router.held_batches) == 2)
        w.router.run()
        assert len([await each for each in asked[1:]]) == 2


async def test_a_failure_that_is_shared_counts_once_against_a_canary_and_as_refused_for_nobody(root: Path) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root, cache={"single_flight": True}) as w:
        await w.order(StartCanary(Canary(version=new, percent=100.0)))
        w.router.answers = lambda batch: given_up(batch, "internal", "it raised")
        asked = [asyncio.create_task(w.answer()) for _ in range(60)]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {InternalFault}
        assert w.lives.reuse.joined() == 59
        _, canary = w.control.figures(NAME)
        assert (canary.requests, canary.errors) == (1, 1)
        assert w.roles()[new] == "canary"
        assert not [labels for labels, _ in w.metrics.drops.rows() if "admission" in labels]


async def test_who_waits_for_another_one_too_long_has_shared_nothing(root: Path) -> None:
    add(root, b"old")
    async with world(root, cache={"single_flight": True}) as w:
        w.router.holds_batches = True
        leader = asyncio.create_task(w.answer())
        await w.until("the batch", lambda: w.router.held_batches)
        late = w.request()
        late.deadline_s = now_s() + 0.01
        with pytest.raises(DeadlineExceeded):
            await w.flow.answer(late)
        assert late.times.reused == ""
        w.router.run()
        await leader


async def test_answers_that_hold_nan_are_not_kept_and_those_who_share_them_are_told(root: Path) -> None:
    add(root, b"old")
    async with world(root, cache=ON) as w:
        w.router.holds_batches = True
        requests = [w.request() for _ in range(2)]
        asked = [asyncio.create_task(w.flow.answer(each)) for each in requests]
        await w.until("the batch", lambda: w.router.held_batches)
        ((identity, batch),) = w.router.held_batches
        w.router.held_batches.clear()
        w.router.holds_batches = False
        w.workers.on_message(identity, not_finite(batch))
        await asyncio.gather(*asked)
        assert [each.times.nonfinite_rows for each in requests] == [1, 1]
        ((_, store),) = w.lives.reuse.stores()
        assert len(store) == 0


@pytest.mark.parametrize("error", [NonfiniteOutput("NaN"), InternalFault()])
async def test_failures_are_shared_and_not_kept(error: Exception) -> None:
    reuse = Reuse(CacheSettings(**ON))
    asked = [Question(model(), request(), Asked()) for _ in range(3)]
    assert [await reuse.look(each) for each in asked] == [None] * 3
    calls = []

    async def compute() -> Any:  # noqa: ANN401 - nothing
        calls.append(1)
        await asyncio.sleep(0)
        raise error

    outcomes = await asyncio.gather(*(reuse.run(each, compute) for each in asked), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(error)] * 3
    assert [each.request.times.reused for each in asked] == ["", "shared", "shared"], "it happened once"
    assert len(calls) == 1
    assert await reuse.look(Question(model(), request(), Asked())) is None


async def test_without_a_key_everybody_computes() -> None:
    reuse = Reuse(CacheSettings(**ON))

    async def compute() -> Any:  # noqa: ANN401 - results
        return [Text("one")]

    asked = Question(model(), request(reuse=False), Asked())
    assert await reuse.look(asked) is None
    results = await reuse.run(asked, compute)
    reuse.keep(asked, results)
    assert (await reuse.look(asked), asked.request.times.reused) == (None, "")
    assert len(reuse.stores()[0][1]) == 0


# ------------------------------------------------------------ what it costs to look


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of each input that is hashed: its bytes, and whether on the event loop's thread."""
    made: list[tuple[int, bool]] = []
    loop, real = threading.get_ident(), cache.digest_of

    def noted(raw: RawInput) -> bytes:
        made.append((raw.nbytes, threading.get_ident() == loop))
        return real(raw)

    monkeypatch.setattr(cache, "digest_of", noted)
    return made


@pytest.mark.parametrize(("nbytes", "before"), [(BEFORE_THE_DOOR, True), (BEFORE_THE_DOOR + 1, False)])
async def test_what_is_large_and_refused_is_not_hashed(
    root: Path, hashed: list[tuple[int, bool]], nbytes: int, before: bool
) -> None:
    add(root, b"old")
    async with world(root, admission={"max_requests": 1}, cache=ON) as w:
        asked = w.request()
        with w.admission.admit(1, 4, asked.arrived_s):
            asked.nbytes = nbytes
            with pytest.raises(Overloaded):
                await w.flow.answer(asked)
        assert bool(hashed) is before


async def test_large_requests_share_and_keep_answers_like_small_ones(
    root: Path, hashed: list[tuple[int, bool]]
) -> None:
    add(root, b"old")
    async with world(root, cache=ON) as w:
        batches = len(w.router.batches())
        w.router.holds_batches = True
        requests = [w.request() for _ in range(3)]
        for each in requests:
            each.nbytes = BEFORE_THE_DOOR + 1
        asked = [asyncio.create_task(w.flow.answer(each)) for each in requests[:2]]
        await w.until("the batch", lambda: w.router.held_batches)
        w.router.run()
        first, second = await asyncio.gather(*asked)
        third = await w.flow.answer(requests[2])
        assert first.results == second.results == third.results
        assert [each.times.reused for each in requests] == ["", "shared", "kept"]
        assert (len(w.router.batches()), len(hashed)) == (batches + 1, 3)
        assert w.admission.in_flight_requests == 0
        assert w.metrics.statistics.of(NAME, w.current().version).inference_count == 1, (
            "what is kept or shared ran no row"
        )


# ------------------------------------------------------------ prepared tensors


class Prepares:
    """A model whose tensors are kept, and leases of it."""

    def __init__(self) -> None:
        self.reuse = Reuse(CacheSettings(prepared_budget_bytes=1 << 20))
        self.arena = Arena.create(1 << 20)
        self.leases = Leases(self.arena, 1024, 10)
        self.big, self.small = served(nbytes=2048), served(nbytes=4)

    async def lease(self, of: ServedModel, *, reuse: bool = True) -> Lease:
        return await self.leases.acquire(of, RawInput(kind="text"), Terms(FOREVER_S, 100, reuse=reuse))

    async def key(self, of: ServedModel, word: bytes = b"word", *, top_k: int = 5, reuse: bool = True) -> bytes | None:
        with await self.lease(of, reuse=reuse) as lease:
            return await self.reuse.prepared_key(lease, RawInput(kind="text", data=word), Asked(top_k=top_k))


@pytest.fixture
def prepares() -> Iterator[Prepares]:
    made = Prepares()
    yield made
    made.arena.close()


async def test_tensors_are_kept_by_input_options_and_preprocessing_and_outlive_versions(prepares: Prepares) -> None:
    key, one, other = prepares.key, model(), model(2, version="b" * 16)
    assert await key(one) == await key(other)
    other.preprocessing = b"other"
    keys = [await key(one), await key(other), await key(one, b"more"), await key(one, top_k=1)]
    assert None not in keys
    assert len(set(keys)) == 4
    assert await key(one, reuse=False) is None, "prepared anew for who asks for it"
    one.cached = False
    assert await key(one) is None
    prepares.reuse = Reuse(CacheSettings(**ON))
    assert await key(other) is None, "switched off"


async def test_kept_tensors_are_written_into_the_next_lease_s_slots(prepares: Prepares) -> None:
    key = await prepares.key(prepares.big)
    with await prepares.lease(prepares.big) as lease:
        (slot,) = lease.inputs
        slot.view[:] = b"x" * 2048
        tensor = Tensor("x", "UINT8", (1, 2048), slot.ref)
        prepares.reuse.keep_prepared(key, Prepared(1, [tensor], b"context", 0.5), prepares.leases.memory)
        slot.view[:] = b"y" * 2048  # the slot is somebody else's next
    with await prepares.lease(prepares.big) as lease:
        found = prepares.reuse.prepared(key, lease)
        assert found is not None
        assert (found.context, found.elapsed_s) == (b"context", 0.0)
        assert isinstance(found.tensors[0].data, SlotRef)
        assert bytes(lease.inputs[0].view) == b"x" * 2048
        assert prepares.big.preparing_rows == 0, "it is prepared"


async def test_kept_tensors_that_do_not_fit_the_slots_are_made_again(prepares: Prepares) -> None:
    small = Prepared(1, [Tensor("x", "UINT8", (1, 4), b"word"), Tensor("y", "UINT8", (1, 4), b"word")], b"", 0.5)
    whole = Tensor("x", "UINT8", (1, 2048), b"x" * 2048)
    two = Prepared(1, [whole, whole], b"", 0.5)
    single = Prepared(1, [Tensor("x", "UINT8", (1, 4), b"word")], b"", 0.5)
    for number, kept in enumerate((small, single, two)):
        key = bytes([number]) * 32
        prepares.reuse.keep_prepared(key, kept, prepares.leases.memory)
        with await prepares.lease(prepares.big) as lease:
            assert prepares.reuse.prepared(key, lease) is None


async def test_small_tensors_travel_inline_and_what_is_unknown_is_none(prepares: Prepares) -> None:
    kept = Prepared(1, [Tensor("x", "UINT8", (1, 4), b"word")], b"c", 0.5)
    prepares.reuse.keep_prepared(b"k" * 32, kept, prepares.leases.memory)
    with await prepares.lease(prepares.small) as lease:
        found = prepares.reuse.prepared(b"k" * 32, lease)
        assert found is not None
        assert (found.tensors, found.context) == (kept.tensors, b"c")
        assert prepares.reuse.prepared(b"?" * 32, lease) is None
        assert prepares.reuse.prepared(None, lease) is None
    prepares.reuse.keep_prepared(None, kept, prepares.leases.memory)
    ((name, store),) = prepares.reuse.stores()
    assert (name, len(store)) == ("prepared", 1)


async def test_what_takes_long_is_hashed_beside_the_loop_and_once_for_all_caches(
    prepares: Prepares, hashed: list[tuple[int, bool]]
) -> None:
    reuse, half = Reuse(CacheSettings(**ON, prepared_budget_bytes=1 << 20)), IN_A_THREAD // 2
    for sizes, on_the_loop in (((half, half), True), ((half, half, 1), False)):
        hashed.clear()
        asked = request()
        asked.inputs = [RawInput(kind="text", data=bytes(size)) for size in sizes]
        question = Question(model(), asked, Asked())
        await reuse.look(question)
        assert hashed == [(size, on_the_loop) for size in sizes]
        terms = Terms(FOREVER_S, 100, digests=question.digests)
        for raw in asked.inputs:
            with await prepares.leases.acquire(prepares.small, RawInput(kind="text"), terms) as lease:
                assert await reuse.prepared_key(lease, raw, Asked()) is not None
        assert len(hashed) == len(sizes), "no second time"
    large = RawInput(kind="text", data=bytes(IN_A_THREAD + 1))
    with await prepares.lease(prepares.small) as lease:
        await reuse.prepared_key(lease, large, Asked())
    assert hashed[-1] == (IN_A_THREAD + 1, False)
