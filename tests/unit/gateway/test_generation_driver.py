import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.pauses import Pauses
from gateway.request import Part
from shared.board import ELSEWHERE, IDLE, Doing
from shared.clock import now_s
from shared.errors import (
    DeadlineExceeded,
    InvalidInput,
    InvalidOption,
    LostTwice,
    NotReady,
    Overloaded,
    ProcessLost,
)
from shared.messages import ModelNote
from shared.results import FinishReason
from tests.support.generation_parts import TextWorld
from tests.support.generation_players import CONTEXT


@pytest.fixture
async def world() -> AsyncIterator[TextWorld]:
    world = TextWorld()
    world.greet()
    yield world
    assert world.router.too_much == []
    world.close()


# ------------------------------------------------------------ one text


async def test_a_text_comes_whole(world: TextWorld) -> None:
    (text,) = await world.answer("ab", max_tokens=5)
    assert text.text == "ABABA"
    assert text.end is not None
    assert (text.end.reason, text.end.prompt_tokens, text.end.completion_tokens) == (FinishReason.LENGTH, 2, 5)
    assert world.at_rest()


async def test_a_text_comes_while_it_grows(world: TextWorld) -> None:
    world.router.steps_by_itself = False
    reading = world.begin("ab", max_tokens=3)
    await world.until("the worker has it", world.router.under_way)
    seen = []
    for _ in range(3):
        world.router.step()
        await world.until("a part", lambda: len(reading.parts) > len(seen))
        seen.append(reading.text)
    assert seen == ["A", "AB", "ABA"]
    await reading.end()
    assert [part.end is not None for part in reading.parts] == [False, False, True]
    assert {(part.model, part.version) for part in reading.parts} == {("writer", world.model.version)}
    assert world.at_rest()


async def test_times_and_metrics_tell_of_the_first_token(world: TextWorld) -> None:
    reading = world.begin("ab", max_tokens=4)
    await reading.end()
    timing = reading.request.times.server_timing()
    assert "first;dur=" in timing
    assert 'tokens;desc="4"' in timing
    assert world.sample("headrace_generated_tokens_total") == 4
    assert world.sample("headrace_first_token_seconds_count") == 1
    assert world.sample("headrace_token_seconds_count") == 1
    assert world.sample("headrace_requests_total", outcome="ok") == 1


async def test_log_probabilities_travel_with_the_text(world: TextWorld) -> None:
    (text,) = await world.answer("ab", max_tokens=2, logprobs=0)
    assert [(token.data, token.logprob) for token in text.tokens] == [(b"A", -0.5), (b"B", -0.5)]


async def test_many_prompts_of_one_request(world: TextWorld) -> None:
    texts = await world.answer("ab", "cd", "ef.", "gh", "ij", max_tokens=4)
    assert [text.text for text in texts] == ["ABAB", "CDCD", "EF", "GHGH", "IJIJ"]
    assert world.at_rest()


async def test_a_slow_reader_gets_what_grew_meanwhile_at_once(world: TextWorld) -> None:
    world.router.steps_by_itself = False
    may_go, parts = asyncio.Event(), []

    async def write(part: Part) -> None:
        parts.append(part.text)
        await may_go.wait()

    reading = world.begin("abcdefgh", write=write, max_tokens=8)
    await world.until("the worker has it", world.router.under_way)
    world.router.step()
    await world.until("the first part", lambda: parts)
    world.router.step(7)  # nobody else is held up by it
    may_go.set()
    await reading.end()
    assert parts == ["A", "BCDEFGH"]


# ------------------------------------------------------------ refused


async def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(world: TextWorld) -> None:
    with pytest.raises(InvalidInput, match=f"the prompt has {CONTEXT} tokens; the model's context is {CONTEXT} tokens"):
        await world.answer("x" * CONTEXT)
    assert world.at_rest()


async def test_an_answer_ends_with_the_context(world: TextWorld) -> None:
    (text,) = await world.answer("x" * (CONTEXT - 3), max_tokens=1000)
    assert text.text == "XXX"


async def test_more_beams_than_any_worker_has_sequences(world: TextWorld) -> None:
    with pytest.raises(InvalidOption, match=r"options\.beams is 5; this model generates at most 4 sequences"):
        await world.answer("ab", beams=5)
    assert world.metrics.drops.of("writer") == {"admission": {"invalid_option": 1}}


async def test_more_tokens_than_the_cache_has_room_for() -> None:
    world = TextWorld(sequences=4, tokens=40)
    world.greet()
    with pytest.raises(InvalidInput, match=r"may become 2 sequences of 22 tokens.*memory for 40 tokens"):
        await world.answer("ab", beams=2, max_tokens=20)
    assert world.at_rest()
    world.close()


async def test_a_model_without_texts_is_told_from_one_with(world: TextWorld) -> None:
    type(world.model.pipeline).generates = False
    try:
        with pytest.raises(InvalidInput, match="generates no text"):
            await world.begin("ab").end()
    finally:
        type(world.model.pipeline).generates = True


async def test_what_the_pool_refuses_never_comes_to_a_worker(world: TextWorld) -> None:
    with pytest.raises(InvalidInput, match="a bad prompt"):
        await world.answer("bad!")
    assert world.router.order == []
    assert world.at_rest()


async def test_a_full_queue_refuses_at_the_door(world: TextWorld) -> None:
    world.router.steps_by_itself = False
    most = world.generation.lobby.of(world.model).places.waiting_most
    readings = [world.begin("ab") for _ in range(4)]
    await world.until("the worker is full", lambda: world.router.under_way() == 4)
    readings += [world.begin("ab") for _ in range(most)]
    await world.until("a line", lambda: len(world.in_line()) == most)
    with pytest.raises(Overloaded, match=f"{most} texts wait to be begun; at most {most} may") as refused:
        await world.answer("ab")
    assert refused.value.retry_after_ms
    assert world.metrics.drops.of("writer") == {"admission": {"overloaded": 1}}
    for reading in readings:
        await reading.leave()
    world.router.step()
    assert world.at_rest()


async def test_what_could_not_even_begin_in_time_is_refused_at_the_door(world: TextWorld) -> None:
    world.router.steps_by_itself = False
    pace = world.generation.lobby.of(world.model).pace
    pace.seed(10.0, 0.0)  # seconds a token
    readings = [world.begin("ab", max_tokens=30, within_s=100.0) for _ in range(4)]
    await world.until("the worker is full", lambda: world.router.under_way() == 4)
    with pytest.raises(Overloaded, match="would begin in about"):
        await world.answer("ab", max_tokens=1)
    for reading in readings:
        await reading.leave()
    world.router.step()
    assert world.at_rest()


# ------------------------------------------------------------ order and room


async def test_the_earliest_deadline_begins_first(world: TextWorld) -> None:
    world.router.steps_by_itself = False
    first = [world.begin("ab", max_tokens=8) for _ in range(4)]
    await world.until("the worker is full", lambda: world.router.under_way() == 4)
    late = world.begin("late", max_tokens=1, within_s=4.0)
    soon = world.begin("soon", max_tokens=1, within_s=3.0)
    await world.until("both wait", lambda: len(world.in_line()) == 2)
    world.router.steps_by_itself = True
    world.router._by_itself()
    await asyncio.gather(*(reading.end() for reading in (*first, late, soon)))
    assert world.router.order[4:] == ["soon", "late"]


async def test_texts_join_and_leave_between_steps(world: TextWorld) -> None:
    world.router.steps_by_itself = False
    long = world.begin("abcd", max_tokens=6)
    await world.until("one", lambda: world.router.under_way() == 1)
    world.router.step(2)
    short = world.begin("xy", max_tokens=1)
    await world.until("two", lambda: world.router.under_way() == 2)
    world.router.step()
    await short.end()
    assert world.router.under_way() == 1
    world.router.step(3)
    await long.end()
    assert (long.text, short.text) == ("ABCDAB", "X")


async def test_a_text_goes_to_the_worker_with_the_most_room(world: TextWorld) -> None:
    world.router.steps_by_itself = False
    other = world.greet("worker-1")
    readings = [world.begin("ab", max_tokens=4) for _ in range(4)]
    await world.until("all are begun", lambda: world.router.under_way() == 4)
    assert len(world.router.writing[other.identity]) == 2
    world.router.step(4)
    for reading in readings:
        await reading.end()


# ------------------------------------------------------------ leaving


async def test_a_caller_who_leaves_cancels_at_once_and_frees_the_room_with_the_workers_last_piece(
    world: TextWorld,
) -> None:
    world.router.steps_by_itself = False
    reading = world.begin("ab", max_tokens=8)
    await world.until("the worker has it", world.router.under_way)
    world.router.step()
    await reading.leave()
    assert world.router.cancels() == [1]
    places = world.generation.lobby.of(world.model).places
    assert len(places.running()) == 1  # cancelled is not free
    world.router.step()
    assert world.at_rest()
    assert world.sample("headrace_requests_total", outcome="cancelled") == 1
    assert world.sample("headrace_rows_for_nobody_total") == 1


async def test_leaving_the_line_is_a_drop_before_the_worker(world: TextWorld) -> None:
    world.router.steps_by_itself = False
    readings = [world.begin("ab", max_tokens=8) for _ in range(5)]
    await world.until("one waits", world.in_line)
    await readings.pop().leave()
    assert world.metrics.drops.of("writer") == {"batch": {"cancelled": 1}}
    world.router.step(8)
    for reading in readings:
        await reading.end()
    assert world.at_rest()


async def test_leaving_before_the_first_step_is_a_drop_at_the_worker(world: TextWorld) -> None:
    world.router.steps_by_itself = False
    reading = world.begin("ab", max_tokens=8)
    await world.until("the worker has it", world.router.under_way)
    await reading.leave()
    world.router.step()
    assert world.metrics.drops.of("writer") == {"copy": {"cancelled": 1}}
    assert world.at_rest()


async def test_leaving_while_the_pool_has_it(world: TextWorld) -> None:
    world.pool_side.silent.add(b"slow")
    reading = world.begin("slow")
    await world.until("the pool has it", lambda: world.pool_side.sent)
    await reading.leave()
    assert world.metrics.drops.of("writer") == {"prepare": {"cancelled": 1}}
    assert world.generation.lobby.of(world.model).places.is_idle


async def test_a_deadline_in_the_middle_keeps_what_came(world: TextWorld) -> None:
    world.router.steps_by_itself = False
    reading = world.begin("ab", max_tokens=8, within_s=0.05)
    await world.until("the worker has it", world.router.under_way)
    world.router.step(3)
    with pytest.raises(
        DeadlineExceeded, match=r"after 3 of 8 tokens \(the call's own, or else gateway\.default_deadline_ms"
    ):
        await reading.end()
    assert reading.text == "ABA"
    assert world.router.cancels() == [1]
    world.router.step()
    assert world.at_rest()


async def test_a_deadline_of_many_texts_counts_the_tokens_of_all_of_them(world: TextWorld) -> None:
    world.router.steps_by_itself = False
    asking = asyncio.create_task(world.answer("ab", "cd", max_tokens=8, within_s=0.05))
    await world.until("the worker has both", lambda: world.router.under_way() == 2)
    world.router.step(3)
    with pytest.raises(DeadlineExceeded, match="after 6 of 16 tokens"):
        await asking
    world.router.step()
    assert world.at_rest()


async def test_a_worker_that_sees_the_deadline_first_says_no_less(world: TextWorld) -> None:
    world.router.steps_by_itself = False
    reading = world.begin("ab", max_tokens=8)
    await world.until("the worker has it", world.router.under_way)
    world.router.step(2)
    await world.until("two letters", lambda: reading.text == "AB")
    world.give_back(next(iter(world.workers.workers())), "deadline_exceeded")
    with pytest.raises(DeadlineExceeded, match="after 2 of 8 tokens"):
        await reading.end()
    assert world.at_rest()


async def test_a_write_that_fails_ends_the_text(world: TextWorld) -> None:
    world.router.steps_by_itself = False

    async def write(_part: Part) -> None:
        raise ConnectionError

    reading = world.begin("ab", write=write)
    await world.until("the worker has it", world.router.under_way)
    world.router.step()
    with pytest.raises(ConnectionError):
        await reading.end()
    world.router.step()
    assert world.at_rest()


# ------------------------------------------------------------ lost workers


async def test_what_has_grown_fails_with_its_worker_and_what_has_not_begins_again(world: TextWorld) -> None:
    world.router.steps_by_itself = False
    grown = world.begin("ab", max_tokens=4)
    await world.until("one", lambda: world.router.under_way() == 1)
    world.router.step()
    fresh = world.begin("xy", max_tokens=2)
    await world.until("two", lambda: world.router.under_way() == 2)
    world.lose(next(iter(world.workers.workers())))
    with pytest.raises(ProcessLost, match="can't go on elsewhere"):
        await grown.end()
    assert grown.text == "A"
    world.greet("worker-1")
    await world.until("it begins again", lambda: world.router.under_way() == 1)
    world.router.step(2)
    await fresh.end()
    assert fresh.text == "XY"
    assert world.at_rest()


async def test_a_suspect_takes_no_other_text_with_it_until_its_prompt_has_gone_through(world: TextWorld) -> None:
    world.router.steps_by_itself = False
    suspect = world.begin("su", max_tokens=3)
    await world.until("it is begun", world.router.under_way)
    world.lose(next(iter(world.workers.workers())))
    world.greet("worker-1")
    other = world.begin("ot", max_tokens=3)
    await world.until("it waits", world.in_line)
    assert world.router.order == ["su", "su"]
    world.router.step()
    assert world.router.order == ["su", "su", "ot"]
    world.router.step(3)
    await suspect.end()
    await other.end()


async def test_a_text_that_ends_two_workers_is_quarantined(world: TextWorld) -> None:
    world.router.steps_by_itself = False
    reading = world.begin("poison", max_tokens=3)
    for name in ("worker-1", "worker-2"):
        await world.until("it is begun", world.router.under_way)
        world.lose(next(iter(world.workers.workers())))
        world.greet(name)
    with pytest.raises(LostTwice):
        await reading.end()
    assert len(world.quarantine) == 1
    assert world.at_rest()


async def test_a_worker_that_does_not_come_back_is_waited_for_only_so_long() -> None:
    world = TextWorld(return_limit_ms=1)
    worker = world.greet()
    world.router.steps_by_itself = False
    world.lose(worker)
    reading = world.begin("ab")
    await world.until("it waits", lambda: world.generation.models() == {world.model})
    await asyncio.sleep(0.002)  # the setting's limit
    world.generation.tick(Pauses())
    with pytest.raises(ProcessLost, match=r"worker\.return_limit_ms"):
        await reading.end()
    assert world.at_rest()
    world.close()


async def test_a_worker_that_lost_the_version_meanwhile_gives_the_text_back(world: TextWorld) -> None:
    world.router.steps_by_itself = False
    world.model.state.on_demand = True
    wanted = []
    world.generation.lobby.wanted = wanted.append
    reading = world.begin("ab", max_tokens=1)
    await world.until("it is begun", world.router.under_way)
    (worker,) = world.workers.workers()
    world.evict(worker)
    await world.until("it is wanted", lambda: wanted == [world.model])
    world.load(worker.identity)
    await world.until("it is begun again", world.router.under_way)
    world.router.step()
    await reading.end()
    assert world.at_rest()


async def test_unloading_answers_what_waits(world: TextWorld) -> None:
    world.router.steps_by_itself = False
    readings = [world.begin("ab", max_tokens=8) for _ in range(5)]
    await world.until("one waits", world.in_line)
    world.generation.withdraw(world.model)
    with pytest.raises(NotReady, match="was unloaded"):
        await readings.pop().end()
    assert world.model.requests == 4  # who reads along keeps the version in use
    world.router.step(8)
    for reading in readings:
        await reading.end()
    world.generation.forget(1)
    assert world.generation.lobby.versions == {}


async def test_debug_and_gauges_show_what_is_reserved(world: TextWorld) -> None:
    world.router.steps_by_itself = False
    reading = world.begin("ab", max_tokens=8)
    await world.until("it is begun", world.router.under_way)
    (told,) = world.shown.describe()["generation"]
    assert (told["running_sequences"], told["tokens_reserved"], told["tokens_capacity"]) == (1, 10, 128)
    version = world.model.version
    assert world.sample("headrace_generation_running", version=version) == 1
    assert world.sample("headrace_generation_tokens_reserved", version=version) == 10
    world.router.step(8)
    await reading.end()
    assert world.sample("headrace_generation_running", version=version) == 0


async def test_a_router_without_room_is_tried_again(world: TextWorld) -> None:
    world.router.full = True
    reading = world.begin("ab", max_tokens=2)
    await world.until("it waits", world.in_line)
    world.router.full = False
    world.generation.tick(Pauses())
    await reading.end()
    assert reading.text == "AB"


async def test_a_worker_that_stops_gives_back_what_it_has_not_begun(world: TextWorld) -> None:
    world.router.steps_by_itself = False
    reading = world.begin("ab", max_tokens=1)
    await world.until("it is begun", world.router.under_way)
    (worker,) = world.workers.workers()
    world.give_back(worker, "draining")
    assert not world.router.under_way()  # it is not sent there again
    world.lose(worker)
    world.greet("worker-1")
    await world.until("it is begun again", world.router.under_way)
    world.router.step()
    await reading.end()
    assert world.at_rest()


@pytest.mark.parametrize(("batch", "suspect"), [(IDLE, False), (7, False), (ELSEWHERE, True)])
async def test_a_text_is_no_suspect_where_the_worker_was_at_a_batch(
    world: TextWorld, batch: int, suspect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.router.steps_by_itself = False
    reading = world.begin("ab", max_tokens=1)
    await world.until("it is begun", world.router.under_way)
    (worker,) = world.workers.workers()
    monkeypatch.setattr(worker, "doing", lambda: Doing(batch, 0.0))
    world.lose(worker)
    assert [ticket.alone for ticket in world.in_line()] == [suspect]
    await reading.leave()


async def test_a_worker_that_is_silent_for_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    world = TextWorld(hang_limit_ms=1000)
    world.router.steps_by_itself = False
    worker, killed = world.greet(), []
    monkeypatch.setattr(world.workers, "kill", killed.append)
    reading = world.begin("ab", max_tokens=4)
    await world.until("it is begun", world.router.under_way)
    hangs, now = world.generation.hangs, now_s()
    hangs.kill(now + 0.9, Pauses())
    assert killed == []
    hangs.heard(worker, now + 0.9)
    hangs.kill(now + 1.8, Pauses())
    assert killed == []
    with monkeypatch.context() as patch:
        patch.setattr(worker, "doing", lambda: Doing(ELSEWHERE, now + 1.5))  # it takes steps that bring no piece
        hangs.kill(now + 2.4, Pauses())
        assert killed == []
    hangs.kill(now + 2.0, Pauses())
    hangs.kill(now + 2.1, Pauses())
    assert killed == [worker]  # once
    assert killed == [worker]  # once
    world.lose(worker)
    await reading.leave()
    world.close()


@pytest.mark.parametrize(
    ("shared", "doing", "spared_s", "ended_s"),
    [
        pytest.param(False, 7, 1e6, None, id="a batch of ours is for others to judge"),
        pytest.param(False, ELSEWHERE, 9.9, 10.1, id="a step"),
        pytest.param(False, IDLE, 9.9, 10.1, id="nothing, though it has a text"),
        pytest.param(True, ELSEWHERE, 71.9, 72.1, id="a step, or the slowest batch of another gateway"),
    ],
)
async def test_a_worker_with_texts_is_judged_by_what_it_does(
    monkeypatch: pytest.MonkeyPatch, shared: bool, doing: int, spared_s: float, ended_s: float | None
) -> None:
    world = TextWorld(hang_limit_ms=10_000)
    world.router.steps_by_itself = False
    worker, killed = world.greet(), []
    worker.is_shared = shared
    monkeypatch.setattr(world.workers, "kill", killed.append)
    hangs, began_s = world.generation.hangs, now_s() + 100.0
    hangs.slowest_s = lambda: 12.0
    reading = world.begin("ab", max_tokens=4)
    await world.until("it is begun", world.router.under_way)
    monkeypatch.setattr(worker, "doing", lambda: Doing(doing, began_s))
    hangs.kill(began_s + spared_s, Pauses())
    assert killed == []
    if ended_s is not None:
        hangs.kill(began_s + ended_s, Pauses())
        assert killed == [worker]
    world.lose(worker)
    await reading.leave()
    world.close()


async def test_a_hung_step_is_found_however_long_the_whole_text_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = TextWorld(sequences=8, hang_limit_ms=1000)
    world.router.steps_by_itself = False
    worker, killed = world.greet(), []
    monkeypatch.setattr(world.workers, "kill", killed.append)
    world.generation.lobby.of(world.model).pace.seed(0.1, 0.02)
    reading = world.begin("ab", max_tokens=12, beams=4)
    await world.until("it is begun", world.router.under_way)
    began_s = now_s() + 100.0
    monkeypatch.setattr(worker, "doing", lambda: Doing(ELSEWHERE, began_s))
    hangs = world.generation.hangs
    hangs.kill(began_s + 1.2, Pauses())
    assert killed == [], "three times a step and a portion of 16 tokens"
    hangs.kill(began_s + 1.3, Pauses())
    assert killed == [worker]
    world.lose(worker)
    await reading.leave()
    world.close()


async def test_texts_are_no_suspects_where_a_proof_ran_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    world = TextWorld()
    world.router.steps_by_itself = False
    reading = world.begin("ab", max_tokens=4)
    for life in range(3):
        worker = world.greet()
        await world.until("it is begun", world.router.under_way)
        worker.aside = 1
        monkeypatch.setattr(worker, "doing", lambda: Doing(ELSEWHERE, 1.0))
        assert not reading.task.done(), life
        world.lose(worker)
    world.router.steps_by_itself = True
    world.greet()
    await reading.end()
    world.close()


async def test_a_text_of_a_version_that_was_unloaded_does_not_wait_for_a_worker() -> None:
    world = TextWorld(return_limit_ms=60_000)
    world.router.steps_by_itself = False
    worker = world.greet()
    reading = world.begin("ab", max_tokens=4)
    await world.until("it is begun", world.router.under_way)
    world.model.state.phase = "unloaded"
    world.workers.forget(world.model.number)
    world.generation.withdraw(world.model)
    world.lose(worker)
    with pytest.raises(NotReady, match="unloaded"):
        await reading.end()
    world.close()


async def test_a_worker_whose_memory_was_not_enough_gets_no_more_texts_than_fit() -> None:
    world = TextWorld(sequences=4)
    world.router.steps_by_itself = False
    worker = world.greet()
    world.workers.on_message(worker.identity, ModelNote(1, "fp32", 2))
    readings = [world.begin("ab", max_tokens=4) for _ in range(3)]
    await world.until("two are begun", lambda: len(world.generation.held) == 2)
    await world.until("the third waits", world.in_line)

    def stepped() -> bool:
        world.router.step()
        return all(reading.task.done() for reading in readings)

    await world.until("all have ended", stepped)
    for reading in readings:
        assert (await reading.end()).results
    world.close()
