import gc
import select
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import msgspec
import pytest
import torch

from shared.board import ELSEWHERE, IDLE, Doing
from shared.errors import Code
from shared.generation_messages import Generate, Piece
from shared.messages import BatchDone, RunBatch
from tests.support.desk import CPU, VOCABULARY, Clock
from tests.support.generating_worker import generate
from tests.support.tiny_llama import TinyLlama
from tests.support.worker_parts import FakeRunner, ToyPipeline, TwoSidedArena, batch, item, loaded
from workers.aside import Aside
from workers.backends.base import Forward, NoDevice
from workers.flight import Flight
from workers.generation.capacity import Capacity
from workers.generation.network import State
from workers.generation.runner import GenerationRunner
from workers.jobs import Inbox
from workers.loaded import Key, LoadedVersion
from workers.runs import Runs
from workers.texts import Texts
from workers.work import Work

TEXTS, TOY = Key("texts", "1" * 16), Key("toy", "0" * 16)


@pytest.fixture
def arena() -> Iterator[TwoSidedArena]:
    arena = TwoSidedArena()
    yield arena
    arena.close()


class Timed(TinyLlama):
    """Each step takes a while of the test's clock."""

    def __init__(self, clock: Clock, step_s: float) -> None:
        super().__init__(context=48)
        self.clock, self.step_s = clock, step_s

    def extend(
        self, tokens: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor, state: State, first_row: int
    ) -> torch.Tensor:
        self.clock.now_s += self.step_s
        return super().extend(tokens, counts, lengths, state, first_row)


class Batches(FakeRunner):
    """So does each batch."""

    def __init__(self, clock: Clock, batch_s: float) -> None:
        super().__init__()
        self.clock, self.batch_s = clock, batch_s

    def run(self, *arguments: Any) -> Forward:  # noqa: ANN401 - passed on
        self.clock.now_s += self.batch_s
        return super().run(*arguments)._replace(copy_s=0.0, run_s=self.batch_s)


class Session:
    """What `Runs` and `Texts` need of one: batches and prompts that wait, and a log of what it is told."""

    def __init__(self, bench: "Bench") -> None:
        self._bench = bench
        self.inbox = Inbox()
        self.batches: deque[RunBatch] = deque()
        self.cancelled: set[int] = set()
        self.said: list[Piece] = []
        self.shown: list[int] = []
        self.notes = 0
        self.link: Any = type("Link", (), {"arena": bench.arena.attached})

    def next(self, apart: Collection[LoadedVersion]) -> tuple[LoadedVersion, RunBatch] | None:
        waiting = ((self._bench.models[each.model], each) for each in self.batches)
        return next((each for each in waiting if each[0] not in apart), None)

    def queued(self) -> set[Key]:
        return {self._bench.models[each.model].key for each in self.batches}

    def begin(self, batch: RunBatch) -> None:
        self.batches.remove(batch)

    def answer(self, message: RunBatch, done: BatchDone) -> None:
        self._bench.log.append("bcd"[message.model - 1])

    def say(self, pieces: list[Piece]) -> None:
        self.inbox.ended(pieces)
        self.said += pieces
        self._bench.log.append("g")

    def doing(self, doing: Doing) -> None:
        self.shown.append(doing.batch)

    def note(self, version: LoadedVersion) -> None:
        self.notes += 1


class Bench:
    def __init__(self, arena: TwoSidedArena, step_s: float = 1.0, batch_s: float = 1.0) -> None:
        self.arena, self.clock = arena, Clock()
        self.log: list[str] = []
        capacity = Capacity(4, 4 * 48, 48)
        runner = GenerationRunner(Timed(self.clock, step_s), VOCABULARY, CPU, capacity)
        self.texts_version: LoadedVersion | None = LoadedVersion(TEXTS, runner, ToyPipeline(), [])
        self.texts_version.generation = runner.limits
        self.toy = loaded(Batches(self.clock, batch_s))
        self.models = {1: self.toy}
        self.sessions = [Session(self)]
        sessions: Any = lambda: self.sessions  # noqa: E731 - fakes
        self.texts = Texts(sessions, self._get, self.clock)
        self.aside = Aside(NoDevice())
        self.work = Work(Runs(sessions, Flight(NoDevice()), self.aside, self.clock), self.texts, self.clock)

    def _get(self, key: Key) -> LoadedVersion | None:
        return {TEXTS: self.texts_version, TOY: self.toy}.get(key)

    def send(self, message: Generate, key: Key = TEXTS, session: int = 0) -> None:
        self.sessions[session].inbox.add(key, message)

    def run(self, limit: int = 1000) -> str:
        """Until there is nothing to do; what was answered, in order."""
        for _ in range(limit):
            self.texts.collect()
            if not self.work.step():
                return "".join(self.log)
        raise AssertionError(f"still at work after {limit} steps")


def batches(count: int, models: int = 1) -> list[RunBatch]:
    numbers = range(1, count + 1)
    return [batch(item(number, 1), number=number, model=1 + number % models) for number in numbers]


def test_batches_and_steps_alternate_where_they_cost_the_same(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    bench.send(generate(1, [1, 2, 3], max_tokens=8))
    bench.sessions[0].batches.extend(batches(5))
    order = bench.run()
    assert order.count("g") == 8
    assert order[:10] in ("bgbgbgbgbg", "gbgbgbgbgb")


@pytest.mark.parametrize(("step_s", "batch_s", "steps", "of"), [(1.0, 4.0, 20, 25), (4.0, 1.0, 5, 25)])
def test_time_counts_and_not_turns(arena: TwoSidedArena, step_s: float, batch_s: float, steps: int, of: int) -> None:
    bench = Bench(arena, step_s, batch_s)
    bench.send(generate(1, [1, 2, 3], max_tokens=45))
    bench.sessions[0].batches.extend(batches(45))
    assert abs(bench.run()[:of].count("g") - steps) <= 1


@pytest.mark.parametrize("dear_s", [1.0, 5.0])
def test_each_model_with_batches_has_as_much_time_as_one_with_texts(arena: TwoSidedArena, dear_s: float) -> None:
    bench = Bench(arena)
    for number, name in ((2, "second"), (3, "third")):
        runner = Batches(bench.clock, dear_s if number == 3 else 1.0)
        bench.models[number] = loaded(runner, key=Key(name, "0" * 16))
    bench.send(generate(1, [1, 2, 3], max_tokens=45))
    costs_s, used_s = {1: 1.0, 2: 1.0, 3: dear_s}, {1: 0.0, 2: 0.0, 3: 0.0}
    bench.texts.collect()
    started_s, number = bench.clock.now_s, 0
    while (passed_s := bench.clock.now_s - started_s) < 80:
        while len(bench.sessions[0].batches) < 2:  # as a gateway sends them: who has had least is next
            number += 1
            model = min(used_s, key=used_s.__getitem__)
            used_s[model] += costs_s[model]
            bench.sessions[0].batches.append(batch(item(number, 1), number=number, model=model))
        bench.work.step()
    for letter, cost_s in {"g": 1.0, "b": 1.0, "c": 1.0, "d": dear_s}.items():
        assert bench.log.count(letter) * cost_s / passed_s == pytest.approx(0.25, abs=0.08), letter


def test_a_model_whose_batch_was_long_and_that_waits_anew_has_not_been_forgiven(arena: TwoSidedArena) -> None:
    bench = Bench(arena, step_s=1.0, batch_s=8.0)
    bench.send(generate(1, [1, 2, 3], max_tokens=40))
    bench.texts.collect()
    for number in range(1, 4):  # its only caller sends the next one when it has read the answer
        bench.sessions[0].batches.append(batch(item(number, 1), number=number))
        while bench.log.count("b") < number:
            bench.work.step()
    assert bench.log.count("g") >= 14, "a step for each batch, else"


def test_a_model_that_had_the_device_to_itself_for_long_owes_nothing_for_that(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    bench.send(generate(1, [1, 2, 3], max_tokens=4))
    bench.sessions[0].batches.extend(batches(100))
    bench.run()
    bench.log.clear()
    bench.send(generate(2, [1, 2, 3], max_tokens=20))
    bench.sessions[0].batches.extend(batches(20))
    order = bench.run()
    assert 9 <= order[:20].count("b") <= 11


def test_either_alone_has_all_of_the_time(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    bench.sessions[0].batches.extend(batches(3))
    assert bench.run() == "bbb"
    bench.log.clear()
    bench.send(generate(1, [1, 2, 3], max_tokens=4))
    assert bench.run() == "gggg"


def test_a_batch_that_has_run_aside_is_answered_while_texts_go_on(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    bench.sessions[0].batches.append(msgspec.structs.replace(batches(1)[0], aside=True))
    bench.send(generate(1, [1, 2, 3], max_tokens=10))
    bench.texts.collect()
    while bench.sessions[0].batches:
        bench.work.step()
    readable, _, _ = select.select([bench.aside.fileno()], [], [], 10.0)
    assert readable, "the batch has not run within 10 s"
    assert "b" in bench.run()[:-1]


def test_a_version_is_held_by_nobody_once_its_last_text_has_ended(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    bench.send(generate(1, [1, 2, 3], max_tokens=4))
    bench.sessions[0].batches.extend(batches(3))
    bench.texts.collect()
    assert bench.texts_version in bench.work.running()
    bench.run()
    assert bench.work.running() == []
    assert bench.texts_version is not None
    gone = weakref.ref(bench.texts_version)
    bench.texts_version = None
    gc.collect()
    assert gone() is None, "the loader's thread is to be the last to let go of it"


def test_a_version_is_held_by_nobody_once_its_only_gateway_is_gone(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    bench.send(generate(1, [1, 2, 3], max_tokens=40))
    bench.texts.collect()
    bench.work.step()
    session: Any = bench.sessions[0]
    bench.work.forget(session)
    assert bench.work.running() == []
    said = len(session.said)
    bench.run()
    assert len(session.said) == said


def test_gateways_see_that_the_worker_is_at_work_for_no_batch_of_theirs(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    bench.send(generate(1, [1, 2, 3], max_tokens=2))
    bench.run()
    assert bench.sessions[0].shown == [ELSEWHERE, IDLE] * 2


def test_each_gateway_gets_its_own_pieces(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    bench.sessions.append(Session(bench))
    bench.send(generate(1, [1, 2, 3], max_tokens=3))
    bench.send(generate(1, [9, 9, 9, 9], max_tokens=5), session=1)
    bench.run()
    ends = [[piece.end.prompt_tokens for piece in session.said if piece.end] for session in bench.sessions]
    assert ends == [[3], [4]]


def test_what_can_not_begin_is_answered_at_once(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    bench.send(generate(1, [1]), key=Key("gone", "2" * 16))
    bench.send(generate(2, [1]), key=TOY)
    bench.send(generate(3, []))
    bench.send(Generate(4, 1, 1e12, b"abc", b""))
    bench.run()
    failures = {piece.job: piece.failure.code for piece in bench.sessions[0].said if piece.failure}
    assert failures == {1: Code.NOT_READY, 2: Code.UNSUPPORTED, 3: Code.INVALID_INPUT, 4: Code.INTERNAL}
    assert bench.work.running() == []
    assert len(bench.sessions[0].inbox) == 0


def test_a_stop_ends_every_text_also_one_that_nobody_has_taken_up(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    bench.send(generate(1, [1, 2, 3], max_tokens=40))
    bench.texts.collect()
    bench.work.step()
    bench.send(generate(2, [1, 2, 3], max_tokens=40))
    bench.work.finish_all()
    ended = {piece.job: piece.failure.code for piece in bench.sessions[0].said if piece.failure}
    assert ended == {1: Code.DRAINING, 2: Code.DRAINING}
    assert bench.work.running() == []


def test_a_cap_that_is_learned_is_told(arena: TwoSidedArena) -> None:
    bench = Bench(arena)
    assert bench.texts_version is not None
    runner: Any = bench.texts_version.runner
    extend = runner._network.extend

    def limited(tokens: torch.Tensor, *others: Any) -> torch.Tensor:  # noqa: ANN401 - passed on
        if len(tokens) > 1:
            raise torch.OutOfMemoryError("no")
        return torch.as_tensor(extend(tokens, *others))

    runner._network.extend = limited
    for job in range(2):
        bench.send(generate(job, [1, 2, job], max_tokens=4))
    bench.run()
    assert bench.sessions[0].notes == 1
    assert [piece.job for piece in bench.sessions[0].said if piece.end] == [0, 1]
