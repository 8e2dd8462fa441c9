import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway import flow
from gateway.admission import Admission
from gateway.batcher import Batcher
from gateway.cost_model import CostModel
from gateway.dispatch import Dispatcher
from gateway.flow import Door, Flow
from gateway.forecast import Forecast
from gateway.inflight import InFlight
from gateway.leases import Leases
from gateway.metrics import Metrics
from gateway.pool_client import PoolClient, PoolJob
from gateway.quarantine import Quarantine, digest_of
from gateway.request import Answer, Request
from gateway.routing import Routing
from gateway.work import Work
from gateway.worker_client import WorkerClient
from shared.arena import Arena
from shared.clock import now_s
from shared.errors import (
    DeadlineExceeded,
    HeadraceError,
    InvalidInput,
    InvalidOption,
    ModelDisabled,
    NotReady,
    Overloaded,
    UnknownModel,
)
from shared.pipeline import RawInput
from shared.results import Text
from shared.settings import AdmissionSettings, WorkerSettings
from tests.support.gateway_parts import (
    AnsweringProcesses,
    AnsweringRouter,
    WordPipeline,
    connect_worker,
    served,
    welcome,
)

LIMIT_S = 5.0


class World:
    """The whole gateway core, with a pool and a worker that answer in the same process."""

    def __init__(self) -> None:
        self.arena = Arena.create(1 << 20)
        self.model = served(max_rows=4)
        self.router = AnsweringRouter()
        self.workers = WorkerClient(self.router, welcome)  # type: ignore[arg-type]  # a fake with the port's names
        self.router.workers = self.workers
        cost = CostModel()
        self.work: InFlight[Work] = InFlight()
        self.dispatch = Dispatcher(Batcher(cost.predict), cost, self.workers, self.work, WorkerSettings())
        self.leases = Leases(self.arena, 1024, 3)
        self.admission = Admission(AdmissionSettings(max_requests=8, max_rows=40, max_inputs_per_request=40))
        self.processes = AnsweringProcesses(WordPipeline())
        self.jobs: InFlight[PoolJob] = InFlight()
        self.pool = PoolClient(self.processes, self.jobs, lambda _m, _e: None)  # type: ignore[arg-type]  # a fake
        self.metrics = Metrics()
        routing = Routing([self.model])
        self.forecast = Forecast(1, routing)
        door = Door(self.admission, self.forecast, Quarantine())
        self.flow = Flow(door, routing, self.leases, self.pool, self.dispatch, self.metrics)
        self.workers.connect([self.dispatch])
        self.dispatch.configure(self.model)
        self.leases.nobody_comes = self.dispatch.kick
        self.worker = connect_worker(self.workers, 1)

    def request(self, *words: str, partial: bool = False, model: str = "words", within_s: float = LIMIT_S) -> Request:
        inputs = [RawInput(kind="text", data=word.encode()) for word in words]
        now = now_s()
        return Request(model, "", "id-1", inputs, {}, now + within_s, now, 4 * len(words), partial)

    async def answer(self, *words: str, partial: bool = False) -> Answer:
        async with asyncio.timeout(LIMIT_S):
            return await self.flow.answer(self.request(*words, partial=partial))

    def at_rest(self) -> bool:
        """Nothing is held by anybody."""
        held = self.admission.in_flight_requests, len(self.work), self.leases.waiting_items(), self.pool.waiting()
        return held == (0, 0, 0, 0) and self.dispatch.waiting_items() == 0 and not self.arena.stats().leased_bytes

    def count(self, outcome: str, model: str = "words") -> float:
        return (
            self.metrics.registry.get_sample_value("headrace_requests_total", {"model": model, "outcome": outcome})
            or 0.0
        )


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    if world.dispatch._timer is not None:
        world.dispatch._timer.cancel()
    world.arena.close()


def words(answer: Answer) -> list[str]:
    return [result.text for result in answer.results if isinstance(result, Text | HeadraceError)]


async def test_one_input_through_all_stages(world: World) -> None:
    request = world.request("abcd")
    answer = await world.flow.answer(request)
    assert words(answer) == ["abcd"]
    assert (answer.model, answer.version) == ("words", world.model.version)
    assert request.times.batch_rows == 1
    assert 'version;desc="0123456789abcdef"' in request.times.server_timing()
    assert world.at_rest()
    assert world.count("ok") == 1


async def test_many_inputs_are_answered_in_order(world: World) -> None:
    given = [f"{n:04}" for n in range(40)]
    assert words(await world.answer(*given)) == given
    assert all(len(batch.items) <= 4 for batch in world.router.batches())
    assert world.at_rest()


async def test_the_next_request_of_the_same_turn_sees_all_items_of_the_one_before(world: World) -> None:
    seen: list[tuple[int, int]] = []
    check = world.forecast.check

    def note(*asked: Any) -> float:  # noqa: ANN401 - as the forecast's own
        seen.append((world.model.rows_in_flight, world.model.unprepared_items))
        return check(*asked)

    world.forecast.check = note  # type: ignore[method-assign]  # what it is asked with, it can see
    await asyncio.gather(world.answer("abcd", "abcd", "abcd"), world.answer("efgh"), world.answer("ijkl", "ijkl"))
    assert seen == [(0, 0), (3, 3), (4, 4)]
    assert (world.model.rows_in_flight, world.model.unprepared_items) == (0, 0)


@pytest.mark.parametrize("turns", range(6))
async def test_items_are_counted_once_whenever_their_request_ends(world: World, turns: int) -> None:
    world.router.hold = True
    task = asyncio.ensure_future(world.answer("abcd", "bad!", "efgh", partial=True))
    failed = asyncio.ensure_future(world.answer("abcd", "bad!", "efgh"))
    for _ in range(turns):
        await asyncio.sleep(0)
        assert world.model.rows_in_flight >= world.model.unprepared_items >= 0
    task.cancel()
    failed.cancel()
    await asyncio.gather(task, failed, return_exceptions=True)
    await asyncio.sleep(0)
    assert (world.model.rows_in_flight, world.model.unprepared_items) == (0, 0)


async def test_the_first_bad_input_fails_the_request_and_is_named(world: World) -> None:
    with pytest.raises(InvalidInput, match=r"inputs\[1\]: a bad word"):
        await world.answer("good", "bad!", "more")
    assert world.count("invalid_input") == 1
    await asyncio.sleep(0)
    assert world.at_rest()


async def test_a_single_bad_input_is_not_given_an_index(world: World) -> None:
    with pytest.raises(InvalidInput, match=r"^a bad word$"):
        await world.answer("bad!")


async def test_partial_results(world: World) -> None:
    answer = await world.answer("good", "bad!", "more", partial=True)
    assert words(answer) == ["good", "inputs[1]: a bad word", "more"]
    with pytest.raises(InvalidInput):
        await world.answer("bad!", "bad!", partial=True)


async def test_unknown_model_and_option(world: World) -> None:
    with pytest.raises(UnknownModel):
        await world.flow.answer(world.request("abcd", model="nobody"))
    assert world.count("unknown_model", "unknown") == 1
    request = world.request("abcd")
    request.options = {"top_k": 3}
    with pytest.raises(InvalidOption, match=r"options\.top_k is not an option of this model"):
        await world.flow.answer(request)
    assert world.at_rest()


async def test_a_spent_deadline_is_refused_before_any_work(world: World) -> None:
    with pytest.raises(DeadlineExceeded):
        await world.flow.answer(world.request("abcd", within_s=-1.0))
    assert world.processes.prepared == 0
    assert world.at_rest()


async def test_the_deadline_ends_a_wait_and_leaves_nothing_behind(world: World) -> None:
    world.router.hold = True
    with pytest.raises(DeadlineExceeded):
        await world.flow.answer(world.request("abcd", within_s=0.01))
    assert world.count("deadline_exceeded") == 1
    assert world.admission.in_flight_requests == 0
    assert len(world.work) == 1  # the worker has it; its late answer ends it
    world.workers.on_lost(world.worker.identity)
    assert world.at_rest()


async def test_admission_is_given_back_on_every_path(world: World) -> None:
    world.router.hold = True
    tasks = [asyncio.ensure_future(world.flow.answer(world.request("abcd"))) for _ in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match=r"admission\.max_requests"):
        await world.answer("abcd")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert world.count("cancelled") == 8
    world.router.hold = False
    world.workers.on_lost(world.worker.identity)
    connect_worker(world.workers, 1)
    assert words(await world.answer("abcd")) == ["abcd"]
    assert world.at_rest()


async def test_cancelling_some_leaves_the_right_answers_for_the_others(world: World) -> None:
    tasks = [asyncio.ensure_future(world.flow.answer(world.request(f"{n:04}"))) for n in range(8)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    for number, answer in enumerate(answers):
        if number % 2:
            assert isinstance(answer, Answer)
            assert words(answer) == [f"{number:04}"]
        else:
            assert isinstance(answer, asyncio.CancelledError)
    assert world.at_rest()


async def test_not_ready_is_refused_at_once(world: World) -> None:
    world.model.state.phase, world.model.state.reason = "no_worker", "no worker is connected"
    with pytest.raises(NotReady, match="no worker is connected"):
        await world.answer("abcd")
    assert world.processes.prepared == 0


async def test_an_input_that_ended_two_processes_is_refused_without_costing_a_third(world: World) -> None:
    poison = asyncio.ensure_future(world.answer("die!"))
    await asyncio.sleep(0)
    world.processes.die(b"pool-0.1", b"pool-0.2")
    world.processes.die(b"pool-0.2", b"pool-0.3")
    with pytest.raises(InvalidInput):
        await poison
    sent = len(world.processes.sent)
    with pytest.raises(ModelDisabled, match="ended two processes"):
        await world.answer("die!")
    assert len(world.processes.sent) == sent
    assert words(await world.answer("good")) == ["good"]
    assert world.at_rest()


async def test_a_large_input_is_looked_for_among_those_refused_beside_the_event_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def noted(model: int, raw: RawInput) -> bytes:
        threads.append(threading.get_ident())
        return digest_of(model, raw)

    monkeypatch.setattr(flow, "digest_of", noted)
    large = "x" * (flow.LARGE_BYTES + 1)
    world.flow._quarantine.add(digest_of(world.model.number, RawInput(kind="text", data=large.encode())), now_s())
    with pytest.raises(ModelDisabled, match="ended two processes"):
        await world.answer(large)
    assert threads, "it was looked for"
    assert threading.get_ident() not in threads
    assert words(await world.answer("good")) == ["good"]
    assert (len(threads), world.at_rest()) == (1, True)


async def test_every_failed_piece_is_seen(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidInput):
        await world.answer("bad!", "bad!", "bad!", partial=True)
    gc.collect()
    assert "never retrieved" not in caplog.text
