"""Every item that is not computed is counted once, where it happened and why; every row for nobody, too."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gateway.drops import Drops, Point
from gateway.request import DEFAULT_PRIORITY, PROOF_PRIORITY, Request
from gateway.served import Terms
from shared.errors import Code, HeadraceError
from shared.pipeline import Options, RawInput
from shared.settings import AdmissionSettings
from tests.support import virtual_time
from tests.support.dispatch_bench import Bench
from tests.support.gateway_parts import connect_worker, served
from tests.support.simulation import repeatable
from tests.support.virtual_processes import NBYTES
from tests.support.virtual_server import VirtualServer, model

Story = Callable[[VirtualServer], Awaitable[None]]


class World:
    """A pool process that takes 2 ms an input, a worker that takes 10 ms a batch until it is slowed down."""

    def __init__(self, max_rows: int = 2, requests: int = 100) -> None:
        self.batch_s = 0.010
        self._max_rows = max_rows
        self._requests = requests

    def play(self, story: Story) -> VirtualServer:
        async def main() -> VirtualServer:
            server = VirtualServer(
                [model(max_rows=self._max_rows)],
                lambda _model, _rows: self.batch_s,
                prepare_s=lambda: 0.002,
                admission=AdmissionSettings(max_requests=self._requests),
            )
            await story(server)
            await asyncio.sleep(5.0)  # of virtual time
            assert server.at_rest()
            server.close()
            return server

        return virtual_time.run(main)


def drops_of(server: VirtualServer) -> dict[tuple[str, str], int]:
    """By point and reason."""
    return {(point, reason): items for (_, point, reason), items in server.metrics.drops.rows()}


def nobody(server: VirtualServer) -> int:
    return sum(server.metrics.drops.rows_for_nobody.values())


async def pass_ms(milliseconds: float) -> None:
    await asyncio.sleep(milliseconds / 1000)  # of virtual time


def ask(server: VirtualServer, number: int, patience_s: float = 1.0) -> "asyncio.Task[None]":
    return asyncio.ensure_future(server.call(number, patience_s))


async def leave_behind_a_running_batch(server: VirtualServer, after_ms: float) -> None:
    """One call runs from 2 to 12 ms; another one comes at 3 ms, is prepared at 5 ms, and leaves."""
    ask(server, 1)
    await pass_ms(3)
    second = ask(server, 2)
    await pass_ms(after_ms)
    second.cancel()


@pytest.mark.parametrize(("max_rows", "after_ms", "point"), [(2, 1, "prepare"), (2, 4, "batch"), (1, 4, "copy")])
def test_a_caller_that_leaves_is_counted_where_its_item_was(max_rows: int, after_ms: float, point: str) -> None:
    server = World(max_rows).play(lambda server: leave_behind_a_running_batch(server, after_ms))
    assert drops_of(server) == {(point, "cancelled"): 1}
    assert nobody(server) == 0
    assert server.outcomes() == {"ok": 1, "left": 1}


def test_waiting_for_a_slot_is_before_preparation() -> None:
    async def story(server: VirtualServer) -> None:
        calls = [ask(server, number) for number in range(5)]  # three have slots
        await pass_ms(1)
        assert server.leases.waiting_items() == 2
        calls[4].cancel()
        await pass_ms(0)
        assert server.leases.waiting_items() == 1

    server = World(max_rows=1).play(story)
    assert drops_of(server) == {("prepare", "cancelled"): 1}


@pytest.mark.parametrize(("ahead", "point"), [(2, "batch"), (1, "copy")])
def test_a_deadline_that_passes_is_told_apart_from_a_caller_that_leaves(ahead: int, point: str) -> None:
    """The running batch takes far longer than was foreseen; one more is staged behind it."""
    world = World(max_rows=1)

    async def story(server: VirtualServer) -> None:
        world.batch_s = 0.1
        for number in range(ahead):
            ask(server, number)
        await pass_ms(3)
        ask(server, 9, patience_s=0.045)

    server = world.play(story)
    assert drops_of(server) == {(point, "deadline_exceeded"): 1}
    assert server.outcomes() == {"ok": ahead, "deadline_exceeded": 1}
    assert nobody(server) == 0


def test_a_call_that_grpc_cancels_at_its_deadline_is_late() -> None:
    """The caller's clock runs ahead of ours: its cancellation comes a little before our own timer."""

    async def story(server: VirtualServer) -> None:
        world.batch_s = 0.1
        ask(server, 1)
        await pass_ms(3)
        second = ask(server, 2, patience_s=0.035)
        await pass_ms(0.5)
        third = ask(server, 3, patience_s=0.2)
        await pass_ms(26)  # the second one has 8.5 ms left, the third one is only in a hurry
        second.cancel()
        third.cancel()

    world = World()
    server = world.play(story)
    assert [call.outcome for call in server.calls if call.number != 1] == ["left", "left"]
    counted = server.metrics.registry.get_sample_value
    for outcome in ("deadline_exceeded", "cancelled"):
        assert counted("headrace_requests_total", {"model": "words", "outcome": outcome}) == 1
        assert sum(items for (_, reason), items in drops_of(server).items() if reason == outcome) == 1


def test_what_is_refused_at_the_door_is_dropped_there() -> None:
    async def story(server: VirtualServer) -> None:
        for number in range(3):
            ask(server, number)
        await pass_ms(0)
        ask(server, 3)

    server = World(requests=3).play(story)
    assert drops_of(server) == {("admission", "overloaded"): 1}


def test_what_comes_for_a_model_that_is_not_ready_or_while_the_doors_are_closed_is_dropped_at_the_door() -> None:
    async def story(server: VirtualServer) -> None:
        server.models[0].state.phase = "no_worker"
        await many(server, 3, 1.0)
        server.models[0].state.phase = "ready"
        server.admission.close_doors()
        await many(server, 2, 1.0)

    assert drops_of(World().play(story)) == {("admission", "not_ready"): 3, ("admission", "draining"): 2}


def test_rows_are_for_nobody_once_their_caller_has_left_or_is_late() -> None:
    """Left while the batch ran; and late by the time that was lost after it."""

    async def left(server: VirtualServer) -> None:
        first = ask(server, 1)
        await pass_ms(5)
        first.cancel()

    server = World().play(left)
    assert (drops_of(server), nobody(server)) == ({}, 1)

    async def late(server: VirtualServer) -> None:
        server.models[0].pipeline.postprocess_is_trivial = False
        ask(server, 1, patience_s=0.013)
        await pass_ms(11.5)
        ask(server, 2)  # keeps the only pool process busy when the rows come back at 12 ms

    server = World().play(late)
    assert (drops_of(server), nobody(server)) == ({}, 1)
    assert server.outcomes() == {"deadline_exceeded": 1, "ok": 1}


async def many(server: VirtualServer, words: int, patience_s: float) -> None:
    """One request of so many inputs."""
    now_s = asyncio.get_running_loop().time()
    inputs = [RawInput(kind="text", data=str(number).encode().ljust(NBYTES)) for number in range(words)]
    request = Request("words", "", "id", inputs, {}, now_s + patience_s, now_s, NBYTES * words)
    try:
        await server.flow.answer(request)
    except HeadraceError:
        return


def test_all_pieces_of_a_request_stand_in_the_books() -> None:
    """Of eight inputs two were computed, two run, and four wait in three places when the request is left."""

    async def story(server: VirtualServer) -> None:
        call = asyncio.ensure_future(many(server, 8, 1.0))
        await pass_ms(15)
        call.cancel()

    server = World(max_rows=1).play(story)
    computed = sum(ran.rows for ran in server.router.ran)
    assert nobody(server) == computed > 0
    assert sum(drops_of(server).values()) + computed == 8
    assert {reason for _, reason in drops_of(server)} == {"cancelled"}


def test_pieces_are_dropped_for_the_reason_of_their_request() -> None:
    """One of them can't be computed: the request fails at once, and that is why the others are not computed."""

    async def story(server: VirtualServer) -> None:
        first = server.flow.item

        async def item(model: object, raw: RawInput, options: Options, terms: Terms, times: object) -> object:
            if raw.data.startswith(b"5"):
                raise HeadraceError("no")
            return await first(model, raw, options, terms, times)  # type: ignore[arg-type]

        server.flow.item = item  # type: ignore[method-assign, assignment]
        await many(server, 8, 1.0)

    server = World(max_rows=1).play(story)
    assert {reason for _, reason in drops_of(server)} == {"internal"}
    assert sum(drops_of(server).values()) == 7


@pytest.mark.parametrize("seed", range(6))
def test_the_books_balance_whatever_happens(seed: int) -> None:
    """Callers of all kinds at twice what can be served, and deaths of pool processes and workers."""
    random = repeatable(seed)
    world = World(max_rows=random.choice([1, 2, 4]), requests=30)

    async def story(server: VirtualServer) -> None:
        for number in range(400):
            call = ask(server, number, random.choice([0.005, 0.02, 0.05, 0.3]))
            if random.random() < 0.3:
                server.later(random.uniform(0, 0.05), call.cancel)
            if random.random() < 0.02:
                for worker in list(server.workers.workers()):
                    server.router.die(worker)
            if random.random() < 0.02:
                server.pool_processes.kill(next(iter(server.pool_processes.ready())))
            if random.random() < 0.05:
                world.batch_s = random.choice([0.003, 0.01, 0.03])
            await pass_ms(random.expovariate(1 / 3))

    server = world.play(story)
    value = server.metrics.registry.get_sample_value
    counts = {
        code: value("headrace_requests_total", {"model": "words", "outcome": code}) or 0.0 for code in ("ok", *Code)
    }
    drops = drops_of(server)
    door = {reason: items for (point, reason), items in drops.items() if point == "admission"}
    inside = {key: items for key, items in drops.items() if key[0] != "admission"}
    gone = counts["cancelled"] + counts["deadline_exceeded"] - door.get("deadline_exceeded", 0)
    assert sum(counts.values()) == 400
    assert counts["ok"] > 0
    assert sum(inside.values()) + nobody(server) == gone > 0
    assert door.get("overloaded", 0) == counts["overloaded"]
    for reason in ("cancelled", "deadline_exceeded"):
        assert sum(items for (_, why), items in drops.items() if why == reason) <= counts[reason]
    assert {reason for _, reason in inside} <= {"cancelled", "deadline_exceeded"}


async def test_left_in_the_very_turn_in_which_a_batch_is_formed(bench: Callable[..., Bench]) -> None:
    made = served(max_wait_s=10.0)
    b = bench(made)
    connect_worker(b.workers, 1)
    coming = await b.lease(made, prepared=False)
    future = await b.submit(made)
    coming.prepared()  # nobody is waited for any more
    future.cancel()
    b.dispatch.kick()
    await asyncio.sleep(0)
    assert b.router.batches() == []
    assert list(b.dispatch.drops.rows()) == [(("words", "batch", "cancelled"), 1)]


async def test_left_in_the_very_turn_in_which_the_worker_answers(bench: Callable[..., Bench]) -> None:
    made = served()
    b = bench(made)
    counted: list[int] = []
    b.dispatch.on_batch = lambda _model, _batch, _done, nobody: counted.append(nobody)
    worker = connect_worker(b.workers, 1)
    future = await b.submit(made)
    b.dispatch.kick()
    (batch,) = b.router.batches()
    future.cancel()
    b.answer(worker, batch)
    await asyncio.sleep(0)
    assert counted == [1]
    assert list(b.dispatch.drops.rows()) == []


def test_readiness_own_batches_are_nobodys_drops() -> None:
    drops = Drops()
    drops.add("words", Point.BATCH, Code.CANCELLED, PROOF_PRIORITY)
    assert list(drops.rows()) == []
    drops.add("words", Point.BATCH, Code.CANCELLED, DEFAULT_PRIORITY)
    assert drops.of("words") == {"batch": {"cancelled": 1}}
    assert drops.of("other") == {}
    assert repr(drops) == "<Drops words/batch/cancelled: 1>"
