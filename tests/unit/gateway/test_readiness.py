import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gateway import proof as proof_module
from gateway import readiness as readiness_module
from gateway.proof import AtTexts
from gateway.readiness import Readiness
from gateway.request import StageTimes
from gateway.routing import Routing
from gateway.served import ServedModel, Terms
from gateway.state import Phase, Role
from gateway.worker_client import Worker, WorkerClient
from shared.board import ELSEWHERE, IDLE, Doing
from shared.errors import InternalFault, NotReady
from shared.messages import PROTOCOL_VERSION, Hello, ModelLoaded, ModelNote
from shared.pipeline import Options, RawInput
from shared.results import Result
from tests.support.gateway_parts import FakeRouter, connect_worker, served, welcome
from tests.support.generation_parts import TextWorld

LIMIT_S = 5.0


class ProofFlow:
    """The flow's `item`, answering what the test wants."""

    def __init__(self) -> None:
        self.calls = 0
        self.answer: Callable[[], Awaitable[list[Result]]] = self._nothing

    async def item(
        self, model: ServedModel, raw: RawInput, options: Options, terms: Terms, times: StageTimes
    ) -> list[Result]:
        self.calls += 1
        return await self.answer()

    async def _nothing(self) -> list[Result]:
        return []


class World:
    def __init__(self, *models: ServedModel, workers: int = 1) -> None:
        self.models = models or (served(),)
        for model in self.models:
            model.state.phase, model.state.reason = "no_worker", "no worker is connected"
        self.readiness = Readiness(Routing(self.models), workers)
        self.flow = ProofFlow()
        self.readiness.connect(self.flow, dict)  # type: ignore[arg-type]  # a fake with the port's name
        self.phases: list[Phase] = []
        self.readiness.subscribe(lambda: self.phases.append(self.models[0].state.phase))
        self.lives = 0

    def greet(self, name: str = "worker-0") -> Worker:
        self.lives += 1
        worker = Worker(f"{name}.{self.lives}".encode(), Hello(PROTOCOL_VERSION, 1, name, "cpu"), 1)
        self.readiness.worker_greeted(worker)
        return worker

    def load(self, worker: Worker, number: int = 1) -> None:
        self.readiness.model_loaded(worker, ModelLoaded(number, [], 5, "fp32", 0.5, pads=False))

    async def settled(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while self.readiness._proving:
                await asyncio.wait(self.readiness._proving.values())
                await asyncio.sleep(0)


async def test_ready_only_after_a_batch_came_back() -> None:
    world = World()
    assert world.readiness.not_ready_reason() == "model 'words' is not ready: no worker is connected"
    worker = world.greet()
    world.load(worker)
    assert world.flow.calls == 0  # no pool process has the pipeline yet
    assert world.readiness.not_ready_reason() is not None
    world.readiness.pipeline_opened(1, None)
    await world.settled()
    assert world.flow.calls == 1
    assert world.readiness.not_ready_reason() is None
    assert world.phases == ["loading", "proving", "ready"]
    assert world.readiness.models()[0].memory_bytes == 5


async def test_one_model_that_is_not_ready_makes_the_server_not_ready() -> None:
    world = World(served(1), served(2, name="other"))
    for number in (1, 2):
        world.readiness.pipeline_opened(number, None)
    worker = world.greet()
    world.load(worker, 1)
    await world.settled()
    assert world.readiness.not_ready_reason() == "model 'other' is not ready: a worker is loading it"


async def test_a_lost_worker_turns_it_false_at_once_and_a_new_one_is_proven_again() -> None:
    world = World()
    world.readiness.pipeline_opened(1, None)
    worker = world.greet()
    world.load(worker)
    await world.settled()
    world.readiness.worker_lost(worker)
    assert "no worker is connected" in (world.readiness.not_ready_reason() or "")
    world.load(world.greet())
    assert world.readiness.not_ready_reason() is not None
    await world.settled()
    assert world.readiness.not_ready_reason() is None
    assert world.flow.calls == 2


async def test_a_second_worker_keeps_it_ready() -> None:
    world = World()
    world.readiness.pipeline_opened(1, None)
    first, second = world.greet(), world.greet()
    world.load(first)
    world.load(second)
    await world.settled()
    world.readiness.worker_lost(first)
    assert world.readiness.not_ready_reason() is None


async def test_a_model_stays_ready_while_one_of_two_workers_starts_again() -> None:
    world = World(workers=2)
    world.readiness.pipeline_opened(1, None)
    first, second = world.greet("worker-0"), world.greet("worker-1")
    world.load(first)
    world.load(second)
    await world.settled()
    world.phases.clear()
    world.readiness.worker_lost(first)
    world.load(world.greet("worker-0"))
    world.readiness.worker_lost(second)
    world.load(world.greet("worker-1"))
    await world.settled()
    assert world.phases == []
    assert world.flow.calls == 1


async def test_a_load_that_fails_on_one_of_two_workers_fails_nothing() -> None:
    world = World(workers=2)
    world.readiness.pipeline_opened(1, None)
    poor = world.greet("worker-0")
    world.readiness.model_failed(poor, 1, NotReady("the weights do not fit"))
    assert world.models[0].state.phase == "loading"  # the second worker has not come yet
    assert world.models[0].state.reason == "the weights do not fit"
    rich = world.greet("worker-1")
    world.load(rich)
    await world.settled()
    world.readiness.model_failed(poor, 1, NotReady("the weights do not fit"))
    assert world.models[0].state.phase == "ready"
    world.readiness.worker_lost(rich)
    assert world.models[0].state.phase == "loading"  # it comes back


async def test_a_load_that_fails_on_all_workers_has_failed() -> None:
    world = World(workers=2)
    for name in ("worker-0", "worker-1"):
        assert world.models[0].state.phase != "failed"
        world.readiness.model_failed(world.greet(name), 1, NotReady("the weights do not fit"))
    assert world.readiness.not_ready_reason() == "model 'words' is not ready: the weights do not fit"
    assert world.models[0].state.phase == "failed"


async def test_a_failed_load_and_a_refused_pipeline_say_why() -> None:
    world = World(served(1), served(2, name="other"))
    worker = world.greet()
    world.readiness.model_failed(worker, 1, NotReady("the weights do not fit"))
    assert world.readiness.not_ready_reason() == "model 'words' is not ready: the weights do not fit"
    world.readiness.pipeline_opened(2, InternalFault("no such class"))
    assert world.models[1].state.phase == "failed"


async def test_a_failed_proof_is_tried_again() -> None:
    world = World()
    world.readiness.pipeline_opened(1, None)

    async def refuse() -> list[Result]:
        raise NotReady("nothing came back")

    world.flow.answer = refuse
    world.load(world.greet())
    await world.settled()
    assert world.models[0].state.phase == "failed"
    assert world.readiness.not_ready_reason() == "model 'words' is not ready: nothing came back"
    world.flow.answer = world.flow._nothing
    world.readiness._maybe_prove(world.models[0])
    await world.settled()
    assert world.readiness.not_ready_reason() is None


async def test_a_silent_model_is_proven_again_and_a_busy_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.readiness.pipeline_opened(1, None)
    world.load(world.greet())
    await world.settled()
    monkeypatch.setattr(readiness_module, "now_s", lambda: 1000.0)
    world.models[0].proven_s = 998.0
    world.readiness.tick()
    assert world.flow.calls == 1
    world.models[0].proven_s = 990.0
    world.readiness.tick()
    world.readiness.tick()
    await world.settled()
    assert world.flow.calls == 2


async def test_a_bug_while_proving_is_not_ready_and_does_not_end_the_keeper() -> None:
    world = World()
    world.readiness.pipeline_opened(1, None)

    async def bug() -> list[Result]:
        raise KeyError("bug")

    world.flow.answer = bug
    world.load(world.greet())
    await world.settled()
    assert world.models[0].state.phase == "failed"
    assert "bug" not in world.models[0].state.reason


async def test_draining_is_not_ready() -> None:
    world = World()
    world.readiness.pipeline_opened(1, None)
    world.load(world.greet())
    await world.settled()
    world.readiness.drain()
    assert world.readiness.not_ready_reason() == "the server is stopping"
    assert isinstance(world.readiness.debug()["reason"], str)


async def test_a_refused_pipeline_stays_refused_whatever_workers_say() -> None:
    world = World()
    world.readiness.pipeline_opened(1, InternalFault("no such class"))
    world.load(world.greet())
    await world.settled()
    assert world.models[0].state.phase == "failed"
    assert world.readiness.not_ready_reason() == "model 'words' is not ready: no such class"
    assert world.flow.calls == 0


async def test_how_a_model_runs_is_shown_and_follows_the_worker() -> None:
    world = World()
    workers = WorkerClient(FakeRouter(), welcome)  # type: ignore[arg-type]  # a fake with the port's names
    workers.connect([world.readiness])
    worker = connect_worker(workers)
    workers.on_message(worker.identity, ModelLoaded(1, [], 5, "fp16", 0.5, pads=True, row_cap=8))
    state = world.models[0].state
    assert (state.precision, state.row_cap) == ("fp16", 8)
    workers.on_message(worker.identity, ModelNote(1, "fp32", 4))
    assert (state.precision, state.row_cap) == ("fp32", 4)
    await world.settled()


# ------------------------------------------------------------ loaded on demand, unloaded, let go


def lazy(number: int = 1) -> ServedModel:
    model = served(number)
    model.state.on_demand = True
    return model


async def test_a_model_on_demand_is_ready_enough_once_a_worker_is_there_and_waits_when_it_was_given_up() -> None:
    world = World(lazy())
    assert world.readiness.not_ready_reason() is not None, "nobody could load it"
    world.readiness.pipeline_opened(1, None)
    worker = world.greet()
    assert (world.models[0].state.phase, world.readiness.not_ready_reason()) == ("on_demand", None)
    world.readiness.wanted(world.models[0])
    assert world.models[0].state.phase == "loading"
    world.load(worker)
    await world.settled()
    world.readiness.model_evicted(worker, 1)
    assert (world.models[0].state.phase, world.readiness.not_ready_reason()) == ("on_demand", None)
    assert world.phases == ["on_demand", "loading", "proving", "ready", "on_demand"]


async def test_what_one_of_two_workers_gives_up_is_still_ready() -> None:
    world = World(lazy(), workers=2)
    world.readiness.pipeline_opened(1, None)
    first, second = world.greet(), world.greet("worker-1")
    world.load(first)
    world.load(second)
    await world.settled()
    world.readiness.model_evicted(first, 1)
    assert world.models[0].state.phase == "ready"
    world.readiness.worker_lost(second)
    assert world.models[0].state.phase == "on_demand"
    world.readiness.worker_lost(first)
    assert world.models[0].state.phase == "no_worker"


async def test_what_is_on_demand_is_not_kept_in_use_by_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(lazy())
    world.readiness.pipeline_opened(1, None)
    world.load(world.greet())
    await world.settled()
    monkeypatch.setattr(readiness_module, "now_s", lambda: 1e6)
    world.readiness.tick()
    await world.settled()
    assert world.flow.calls == 1


async def test_one_on_demand_that_could_not_be_loaded_may_be_asked_for_again_and_a_pinned_one_stays_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(lazy(), served(2, name="pinned"))
    worker = world.greet()
    for number in (1, 2):
        world.readiness.model_failed(worker, number, NotReady("no memory"))
    world.readiness.tick()
    assert [model.state.phase for model in world.models] == ["failed", "failed"]
    later = readiness_module.now_s() + readiness_module.TRY_AGAIN_S + 1
    monkeypatch.setattr(readiness_module, "now_s", lambda: later)
    world.readiness.tick()
    assert [model.state.phase for model in world.models] == ["on_demand", "failed"]
    assert [world.readiness.load_failed(model) for model in world.models] == [False, True]
    world.load(worker, 2)
    assert world.readiness._failed_s == {}


@pytest.mark.parametrize("role", ["canary", "shadow", "standby", "coming", "retiring"])
async def test_only_current_versions_decide_whether_the_server_is_ready(role: Role) -> None:
    world = World(served(1), served(2))
    for number in (1, 2):
        world.readiness.pipeline_opened(number, None)
    world.load(world.greet(), 1)
    await world.settled()
    assert world.readiness.not_ready_reason() is not None
    world.models[1].state.role = role
    assert world.readiness.not_ready_reason() is None


async def test_an_unloaded_version_stays_so_whatever_comes_late() -> None:
    world = World()
    world.readiness.pipeline_opened(1, None)
    hold = asyncio.Event()

    async def slow() -> list[Result]:
        await hold.wait()
        return []

    world.flow.answer = slow
    worker = world.greet()
    world.load(worker)
    world.readiness.unloaded(world.models[0], "it was unloaded by request")
    world.load(worker)
    world.readiness.model_evicted(worker, 1)
    world.readiness.worker_lost(world.greet("worker-1"))
    hold.set()
    await world.settled()
    assert (world.models[0].state.phase, world.readiness.not_ready_reason()) == ("unloaded", None)


async def test_nothing_is_kept_of_a_version_that_is_gone() -> None:
    world = World()
    world.readiness.pipeline_opened(1, InternalFault("no such class"))
    world.readiness.model_failed(world.greet(), 1, NotReady("no memory"))
    world.readiness._failures[1] = 1
    world.readiness.forget(1)
    readiness = world.readiness
    assert not any((readiness._refused, readiness._failed_s, readiness._failures, readiness._pipelines_open))


async def test_who_has_unsubscribed_hears_no_more_and_a_greeting_is_told_after_the_phases() -> None:
    world = World(lazy())
    heard: list[str] = []
    world.readiness.greeted = lambda: heard.append(world.models[0].state.phase)

    def changed() -> None:
        heard.append("changed")
        world.readiness.unsubscribe(changed)  # while all are told

    world.readiness.subscribe(changed)
    world.greet()
    world.readiness.drain()
    assert heard == ["changed", "on_demand"]


async def test_how_long_the_load_took_is_shown_by_stage() -> None:
    world = World()
    loaded = ModelLoaded(1, [], 5, "fp32", 0.5, pads=False, stages_s={"read": 0.1, "warm_up": 0.4})
    world.readiness.model_loaded(world.greet(), loaded)
    state = world.models[0].state
    assert (state.load_s, state.stages_s) == (0.5, {"read": 0.1, "warm_up": 0.4})


# ------------------------------------------------------------ busy is not failed


class Writing:
    """A world of texts whose worker steps when the test says so, and its readiness."""

    def __init__(self) -> None:
        self.world = TextWorld(sequences=1)
        self.world.router.steps_by_itself = False
        self.model = self.world.model
        self.readiness = Readiness(Routing([self.model]))
        self.readiness.connect(self.world.flow, dict)
        self.readiness.texts = AtTexts(self.world.workers, self.world.generation.lobby)
        self.readiness.pipeline_opened(1, None)
        worker = self.world.greet()
        self.readiness.worker_greeted(worker)
        self.readiness._workers[worker.identity].came(1)
        self.model.proven_s = readiness_module.now_s()
        self.model.state.phase, self.model.state.reason = "ready", ""

    def later(self) -> None:
        """Nothing has come back for longer than a ready model may be silent."""
        self.model.proven_s = readiness_module.now_s() - readiness_module.PROVE_EVERY_S - 1
        self.readiness.tick()

    async def proof_ends(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while self.readiness._proving:
                await asyncio.wait(self.readiness._proving.values())
                await asyncio.sleep(0)

    def close(self) -> None:
        self.world.close()


async def test_a_model_that_is_at_a_text_is_not_proven_and_is_again_when_it_has_ended() -> None:
    writing = Writing()
    reading = writing.world.begin("ab", max_tokens=2)
    await writing.world.until("the worker has it", writing.world.router.under_way)
    writing.later()
    assert not writing.readiness._proving
    writing.world.router.step(2)
    await reading.end()
    writing.later()
    assert writing.readiness._proving
    await writing.world.until("the proof's text", writing.world.router.under_way)
    writing.world.router.step(2)
    await writing.proof_ends()
    assert writing.readiness.not_ready_reason() is None
    writing.close()


async def test_a_proof_that_waits_behind_a_text_is_late_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    writing = Writing()
    monkeypatch.setattr(proof_module, "PROVE_LIMIT_S", 0.05)
    reading = writing.world.begin("ab", max_tokens=2)
    await writing.world.until("the worker has it", writing.world.router.under_way)
    writing.readiness._maybe_prove(writing.model)  # as when it began a moment before the text took the only place
    await writing.proof_ends()
    assert (writing.model.state.phase, writing.readiness.not_ready_reason()) == ("ready", None)
    await reading.leave()
    writing.close()


async def test_a_worker_that_says_nothing_while_nobody_asks_fails_its_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    writing = Writing()
    monkeypatch.setattr(proof_module, "PROVE_LIMIT_S", 0.05)
    writing.later()
    await writing.world.until("the proof's text", writing.world.router.under_way)
    await writing.proof_ends()
    assert "a batch of its example did not come back" in (writing.readiness.not_ready_reason() or "")
    writing.close()


@pytest.mark.parametrize(("batch", "phase"), [(ELSEWHERE, "ready"), (IDLE, "failed")])
async def test_a_worker_at_another_gateways_texts_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, batch: int, phase: str
) -> None:
    writing = Writing()
    monkeypatch.setattr(proof_module, "PROVE_LIMIT_S", 0.05)
    monkeypatch.setattr(Worker, "doing", lambda _: Doing(batch, readiness_module.now_s()))
    writing.later()
    await writing.world.until("the proof's text", writing.world.router.under_way)
    await writing.proof_ends()
    assert writing.model.state.phase == phase
    writing.close()


@pytest.mark.parametrize(("comes_back", "phase"), [(True, "ready"), (False, "failed")])
async def test_a_proof_that_is_late_while_batches_come_back_is_no_failure(comes_back: bool, phase: Phase) -> None:
    world = World()
    world.readiness.pipeline_opened(1, None)
    world.load(world.greet())
    await world.settled()
    world.models[0].proven_s = 0.0

    async def late() -> list[Result]:
        if comes_back:
            world.models[0].proven_s = readiness_module.now_s() + 1.0
        raise TimeoutError

    world.flow.answer = late
    world.readiness.tick()
    await world.settled()
    assert world.models[0].state.phase == phase


async def test_a_first_proof_has_to_come_back() -> None:
    world = World()
    world.readiness.pipeline_opened(1, None)

    async def late() -> list[Result]:
        world.models[0].proven_s = readiness_module.now_s() + 1.0
        raise TimeoutError

    world.flow.answer = late
    world.load(world.greet())
    await world.settled()
    assert world.models[0].state.phase == "failed"
