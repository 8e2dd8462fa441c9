from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import Code
from shared.messages import Failure
from shared.results import FinishReason
from tests.support.desk import Desk, Outcome, text_of
from tests.support.tiny_llama import ENDS, NOT_A_NUMBER, POISON, TinyLlama, Touchy, greedy, logits_after
from workers.backends.base import DeviceLost
from workers.generation import isolation
from workers.generation.capacity import Capacity
from workers.generation.line import MAX_WAITING
from workers.generation.network import State
from workers.generation.state import KeyValueState
from workers.jobs import Refused

NETWORK = TinyLlama()
SENSITIVE = Touchy()
FINE = [token for token in range(64) if token not in (POISON, NOT_A_NUMBER, ENDS)]
PROMPTS = st.lists(st.sampled_from(FINE), min_size=1, max_size=24)
COUNTS = st.integers(1, 16)
EXAMPLES = 20
"""Each is many texts."""


def code(outcome: Outcome) -> str | None:
    return None if outcome.failure is None else outcome.failure.code


def expected(prompt: list[int], count: int) -> list[int]:
    return list(_expected(tuple(prompt), count))


@cache
def _expected(prompt: tuple[int, ...], count: int) -> list[int]:
    return greedy(NETWORK, prompt, count)


# ------------------------------------------------------------------ joining and leaving


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    asked=st.lists(st.tuples(PROMPTS, COUNTS, st.integers(0, 6)), min_size=1, max_size=10),
    portion=st.sampled_from([1, 3, 8, 64]),
    sequences=st.integers(1, 5),
)
def test_texts_that_join_and_leave_at_random_are_what_they_are_alone(
    asked: list[tuple[list[int], int, int]], portion: int, sequences: int
) -> None:
    desk = Desk(NETWORK, Capacity(sequences, 48 * sequences, 48), portion=portion)
    outcomes = []
    for prompt, count, steps in asked:
        outcomes.append(desk.ask(prompt, max_tokens=count, logprobs=0))
        desk.step(steps)
    desk.finish()
    for (prompt, count, _), outcome in zip(asked, outcomes, strict=True):
        tokens = expected(prompt, count)
        assert outcome.ids == tokens
        assert outcome.text == text_of(tokens)
        assert outcome.end is not None
        reason = FinishReason.END_TOKEN if tokens[-1] == ENDS else FinishReason.LENGTH
        assert (outcome.end.reason, outcome.end.prompt_tokens) == (reason, len(prompt))
        assert outcome.end.completion_tokens == len(tokens)


WAYS = st.sampled_from(
    [
        {},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.4, "seed": 2**64 - 1, "top_k": 7},
        {"temperature": 1.0, "seed": 0, "top_p": 0.6, "repetition_penalty": 1.4},
        {"repetition_penalty": 2.0},
        {"beams": 3},
        {"beams": 2, "length_penalty": -1.0, "stop": ("a", "b", "c")},
        {"stop": ("0", "1", "9", "ii")},
        {"stop_token_ids": (8, 49)},
    ]
)
MATES = st.sampled_from(["cancel", "poison", "nan", "late", "fine"])


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    asked=st.lists(
        st.tuples(PROMPTS, COUNTS, WAYS, st.integers(0, 4), MATES, st.integers(0, 6)), min_size=1, max_size=10
    )
)
def test_nothing_that_becomes_of_others_changes_a_text(asked: list[Any]) -> None:
    desk = Desk(SENSITIVE, Capacity(6, 6 * 48, 48), portion=8)
    texts = []
    for prompt, count, options, steps, fate, after in asked:
        texts.append((prompt, count, options, desk.ask(prompt, max_tokens=count, logprobs=1, **options)))
        mate = _mate(desk, fate, prompt)
        desk.step(steps)
        if fate == "cancel":
            desk.cancel(mate)
        if fate == "late":
            desk.clock.now_s += 1.0
        desk.step(after)
    desk.finish()
    for prompt, count, options, outcome in texts:
        alone = desk.alone(prompt, max_tokens=count, logprobs=1, **options)
        assert code(outcome) == code(alone)
        assert (outcome.text, outcome.end, outcome.ids) == (alone.text, alone.end, alone.ids), options
        logprobs = [token.logprob for token in alone.tokens]
        assert [token.logprob for token in outcome.tokens] == pytest.approx(logprobs, abs=1e-4)


def _mate(desk: Desk, fate: str, prompt: list[int]) -> Outcome:
    bad = {"poison": POISON, "nan": NOT_A_NUMBER}
    late_s = desk.clock.now_s + 0.5 if fate == "late" else 1e12
    return desk.ask([*prompt[:5], *([bad[fate]] if fate in bad else []), 3], max_tokens=30, deadline_s=late_s)


def test_those_that_run_get_a_token_in_each_step_while_a_long_prompt_is_read() -> None:
    desk = Desk(NETWORK, portion=4)
    runs = desk.ask([1, 2, 3], max_tokens=20)
    desk.step()
    joins = desk.ask([5] * 17, max_tokens=4)
    for number in range(5):
        assert (runs.pieces, joins.pieces) == (1 + number, 0)
        assert (runs.count, joins.count) == (1 + number, 0)
        desk.step()
    assert (runs.pieces, joins.pieces) == (6, 1), "17 tokens are read in five portions of at most 4"
    desk.finish()
    assert (runs.count, joins.count) == (20, 4)
    assert joins.text == text_of(expected([5] * 17, 4))


def test_short_prompts_are_read_together() -> None:
    desk = Desk(NETWORK, portion=8)
    outcomes = [desk.ask([number, 2], max_tokens=3) for number in range(4)]
    desk.step()
    assert [outcome.pieces for outcome in outcomes] == [1, 1, 1, 1]


def test_a_short_prompt_does_not_wait_for_a_long_one_nor_the_long_one_for_ever() -> None:
    desk = Desk(NETWORK, portion=4)
    long = desk.ask([5] * 23, max_tokens=2)
    desk.step()
    desk.step()
    short = desk.ask([1, 2, 3], max_tokens=2)
    desk.step()
    desk.step()
    assert short.pieces, "at the latest every other portion is for the shortest"
    assert not long.pieces
    for number in range(12):
        if not long.pieces:
            desk.ask([number + 1, 2, 3], max_tokens=1)
            desk.step()
    assert long.pieces, "and every other one for who came first"
    desk.finish()
    assert (short.text, long.text) == (text_of(expected([1, 2, 3], 2)), text_of(expected([5] * 23, 2)))


def test_a_text_that_is_cancelled_leaves_with_the_next_step_wherever_it_is() -> None:
    desk = Desk(NETWORK, Capacity(2, 96, 48), portion=4)
    running = desk.ask([1, 2, 3], max_tokens=20)
    desk.step()
    reading, waiting = desk.ask([5] * 17, max_tokens=20), desk.ask([9], max_tokens=20)
    desk.step()
    for outcome in (waiting, reading, running):
        desk.cancel(outcome)
        desk.step()
        assert code(outcome) == Code.CANCELLED
        desk.cancel(outcome)
    assert len(desk.stepper) == 0
    desk.step()
    assert desk.stepper._cancelled == set(), "else a worker that lives for months remembers every caller who left"


def test_a_text_whose_deadline_passes_ends_with_the_next_step_wherever_it_is() -> None:
    desk = Desk(NETWORK, Capacity(2, 96, 48), portion=4)
    running = desk.ask([1, 2, 3], max_tokens=20, deadline_s=4.0)
    desk.step()
    reading, waiting = desk.ask([5] * 17, deadline_s=3.0), desk.ask([9], deadline_s=2.0)
    stays = desk.ask([7], max_tokens=3)
    for now_s, outcome in ((2.0, waiting), (3.0, reading), (4.0, running)):
        assert not outcome.over
        desk.clock.now_s = now_s
        desk.step()
        assert code(outcome) == Code.DEADLINE_EXCEEDED
    desk.finish()
    assert stays.text == text_of(expected([7], 3))


# ------------------------------------------------------------------ room


class Watched(TinyLlama):
    """Notes what room it is asked for, and how many rows run."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms: list[tuple[int, int]] = []
        self.most_rows = 0
        self.memory: float = float("inf")
        """Rows times tokens that there is memory for."""
        self.step_rows: float = float("inf")
        """Rows of a step that there is memory for."""

    def new_state(self, rows: int, tokens: int) -> KeyValueState:
        state = super().new_state(1, 1)
        grow = state.grow

        def watched(rows: int, tokens: int) -> None:
            if (rows, tokens) != state.room:
                self.rooms.append((rows, tokens))
            if rows * tokens > self.memory:
                raise torch.OutOfMemoryError("no")
            grow(rows, tokens)

        state.grow = watched  # type: ignore[method-assign]  # watched
        state.grow(rows, tokens)
        return state

    def extend(
        self, tokens: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor, state: State, first_row: int
    ) -> torch.Tensor:
        if len(tokens) > self.step_rows:
            raise torch.OutOfMemoryError("no")
        self.most_rows = max(self.most_rows, len(tokens))
        return super().extend(tokens, counts, lengths, state, first_row)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    asked=st.lists(st.tuples(PROMPTS, COUNTS, st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=12),
    sequences=st.integers(3, 6),
    tokens=st.integers(150, 288),
)
def test_the_cache_is_never_larger_than_it_may_be(asked: list[Any], sequences: int, tokens: int) -> None:
    network = Watched()
    desk = Desk(network, Capacity(sequences, tokens, 48))
    outcomes = []
    for prompt, count, beams, steps in asked:
        outcomes.append(desk.ask(prompt, max_tokens=count, beams=beams))
        desk.step(steps)
    desk.finish()
    assert all(outcome.end for outcome in outcomes)
    assert all(rows * long <= tokens and rows <= sequences for rows, long in network.rooms)
    assert network.most_rows <= sequences


def test_a_cache_is_given_back_when_nothing_is_left_to_do() -> None:
    desk = Desk(NETWORK)
    desk.ask([1, 2], max_tokens=3)
    desk.finish()
    assert desk.runner._state is None


def test_who_finds_no_room_waits_and_is_not_overtaken() -> None:
    desk = Desk(NETWORK, Capacity(4, 4 * 30, 48))
    first = [desk.ask([1, 2, 3], max_tokens=10) for _ in range(3)]
    long = desk.ask([1] * 20, max_tokens=25)
    short = desk.ask([4], max_tokens=2)
    desk.step(5)
    assert (long.pieces, short.pieces) == (0, 0), "45 tokens times four rows are more than 120"
    desk.finish()
    assert all(outcome.end for outcome in (*first, long, short))


def test_room_goes_to_the_gateway_with_the_fewest_rows() -> None:
    desk = Desk(NETWORK, Capacity(2, 96, 48))
    many = [desk.ask([1, 2, number], owner="many", max_tokens=9) for number in range(6)]
    one = desk.ask([3, 2], owner="one", max_tokens=9)
    desk.step(2)
    assert [outcome.pieces > 0 for outcome in many] == [True, *[False] * 5]
    assert one.pieces > 0
    desk.finish()


@pytest.mark.parametrize(
    ("prompt", "options", "refused", "says"),
    [
        ([], {}, Code.INVALID_INPUT, "the prompt has 0 tokens; this model takes 1..47"),
        ([1] * 48, {}, Code.INVALID_INPUT, "the prompt has 48 tokens; this model takes 1..47"),
        ([64], {}, Code.INVALID_INPUT, "a token of the prompt is none of the model's 64"),
        ([-1], {}, Code.INVALID_INPUT, "a token of the prompt is none of the model's 64"),
        ([1] * 20, {"beams": 4, "max_tokens": 15}, Code.TOO_LARGE, "4 beam(s) of 35 tokens"),
        ([1], {"beams": 5, "max_tokens": 1}, Code.TOO_LARGE, "4 sequences, 120 tokens together"),
    ],
)
def test_what_can_never_run_is_refused(prompt: list[int], options: dict[str, Any], refused: Code, says: str) -> None:
    desk = Desk(NETWORK, Capacity(4, 120, 48))
    with pytest.raises(Refused) as caught:
        desk.ask(prompt, **options)
    assert caught.value.failure.code == refused
    assert says in caught.value.failure.text
    assert len(desk.stepper) == 0


def test_a_gateway_that_sends_more_than_can_ever_wait_is_refused() -> None:
    desk = Desk(NETWORK)
    for _ in range(MAX_WAITING):
        desk.ask([1], owner="flood")
    with pytest.raises(Refused) as caught:
        desk.ask([1], owner="flood")
    assert caught.value.failure.code == Code.OVERLOADED
    desk.ask([1], owner="other")


def test_the_context_ends_a_text_and_its_last_token_needs_no_room() -> None:
    desk = Desk(NETWORK, Capacity(1, 48, 48))
    outcome = desk.ask([1] * 40, max_tokens=1000, logprobs=0)
    desk.finish()
    assert outcome.ids == expected([1] * 40, 1000)
    assert outcome.end is not None
    assert outcome.end.reason is FinishReason.LENGTH
    assert outcome.end.completion_tokens == 8


# ------------------------------------------------------------------ what goes wrong


def test_only_the_text_that_the_network_raises_on_fails() -> None:
    desk = Desk(SENSITIVE, portion=32)
    fine = [desk.ask([number, 3, 11], max_tokens=20) for number in (1, 9, 12)]
    bad = desk.ask([4, POISON, 5], max_tokens=20)
    not_finite = desk.ask([4, NOT_A_NUMBER, 5], max_tokens=20)
    desk.step()
    assert (code(bad), code(not_finite)) == (Code.INTERNAL, Code.NONFINITE_OUTPUT)
    assert bad.failure is not None
    assert "token" not in bad.failure.text, "what a user's code raises is for the log alone"
    desk.finish()
    for number, outcome in zip((1, 9, 12), fine, strict=True):
        assert outcome.text == text_of(expected([number, 3, 11], 20))


def test_a_text_that_comes_upon_a_bad_token_itself_fails_alone() -> None:
    """In the middle of a text, not in the prompt: the state of its row is spoilt, and its place is taken by others."""
    prompt = next([a, 7] for a in FINE if POISON in expected([a, 7], 12)[2:])
    desk = Desk(SENSITIVE, Capacity(2, 96, 48), portion=32)
    bad = desk.ask(prompt, max_tokens=30)
    mates = [desk.ask([number, 3, 11], max_tokens=40) for number in (1, 9, 12, 17)]
    desk.finish()
    assert code(bad) == Code.INTERNAL
    assert bad.text == text_of(expected(prompt, 30)).partition(text_of([POISON]))[0] + text_of([POISON])
    for number, outcome in zip((1, 9, 12, 17), mates, strict=True):
        assert outcome.text == text_of(expected([number, 3, 11], 40))


class Odd(TinyLlama):
    """Gives NaN for a whole step of several rows, and fine numbers for each of them alone."""

    def extend(
        self, tokens: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor, state: State, first_row: int
    ) -> torch.Tensor:
        logits = super().extend(tokens, counts, lengths, state, first_row)
        return logits if len(tokens) == 1 else logits * float("nan")


def test_a_row_that_is_fine_alone_goes_on() -> None:
    desk = Desk(Odd(), portion=32)
    outcomes = [desk.ask([number, 3, 11], max_tokens=9) for number in (1, 9)]
    desk.finish()
    for number, outcome in zip((1, 9), outcomes, strict=True):
        assert outcome.text == text_of(expected([number, 3, 11], 9))


def test_a_step_that_does_not_fit_the_memory_is_halved_and_the_cap_is_kept() -> None:
    network = Watched()
    network.step_rows = 3
    desk = Desk(network)
    asked = [([number, 3, 11], 12) for number in range(8)]
    outcomes = [desk.ask(prompt, max_tokens=count) for prompt, count in asked]
    desk.finish()
    for (prompt, count), outcome in zip(asked, outcomes, strict=True):
        assert outcome.text == text_of(expected(prompt, count))
    assert desk.loaded.row_cap is not None
    assert desk.loaded.row_cap <= 3
    assert network.most_rows <= 3


def test_rows_that_there_is_no_memory_for_wait_until_others_have_left() -> None:
    network = Watched()
    network.memory = 4 * 64
    desk = Desk(network, Capacity(8, 8 * 64, 48))
    outcomes = [desk.ask([number, 3, 11], max_tokens=12) for number in range(8)]
    desk.finish()
    for number, outcome in enumerate(outcomes):
        assert outcome.text == text_of(expected([number, 3, 11], 12))
    assert desk.loaded.row_cap == 4


def test_a_text_that_alone_is_too_much_for_the_memory_fails() -> None:
    network = Watched()
    network.memory = 10
    desk = Desk(network)
    outcome = desk.ask([1, 2, 3])
    desk.finish()
    assert code(outcome) == Code.OVERLOADED
    network.memory, network.step_rows = 1e9, 0
    again = desk.ask([1, 2, 3])
    desk.finish()
    assert code(again) == Code.OVERLOADED


def test_no_memory_to_put_rows_together_ends_their_texts_and_not_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        """Torch, but for one thing."""

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever it is
            return getattr(torch, name)

        def cat(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
            raise torch.OutOfMemoryError(f"no room for {len(parts)} parts")

    desk = Desk(Touchy())
    texts = [desk.ask([token, 1], max_tokens=8) for token in (5, POISON, 6)]
    with monkeypatch.context() as patch:
        patch.setattr(isolation, "torch", Full())
        desk.step()
    assert [code(text) for text in texts] == [Code.OVERLOADED, Code.INTERNAL, Code.OVERLOADED]
    again = desk.ask([5, 1], max_tokens=8)
    desk.finish()
    assert again.end is not None


def test_rows_that_can_not_be_moved_end_the_texts_and_not_the_worker() -> None:
    desk = Desk(NETWORK)
    outcomes = [desk.ask([1, 2, 3], max_tokens=count) for count in (2, 9)]
    desk.step()
    assert desk.runner._state is not None

    def keep(rows: Sequence[int]) -> None:
        raise torch.OutOfMemoryError("no")

    desk.runner._state.keep = keep  # type: ignore[method-assign]  # on purpose
    desk.step()
    assert outcomes[0].end is not None
    assert code(outcomes[1]) == Code.OVERLOADED
    assert outcomes[1].text == text_of(expected([1, 2, 3], 9)[:2])
    fresh = desk.ask([1, 2, 3], max_tokens=9)
    desk.finish()
    assert fresh.text == text_of(expected([1, 2, 3], 9))


def test_those_that_a_leaving_gateway_takes_down_with_it_are_told() -> None:
    desk = Desk(NETWORK)
    desk.ask([1, 2, 3], owner="gone", max_tokens=9)
    desk.ask([1, 2, 3], owner="stays", max_tokens=9)
    desk.step()
    assert desk.runner._state is not None

    def keep(rows: Sequence[int]) -> None:
        raise torch.OutOfMemoryError("no")

    desk.runner._state.keep = keep  # type: ignore[method-assign]  # on purpose
    said = desk.stepper.forget("gone")
    assert {owner: [piece.failure and piece.failure.code for piece in pieces] for owner, pieces in said.items()} == {
        "stays": [Code.OVERLOADED]
    }


class Dying(TinyLlama):
    def extend(
        self, tokens: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor, state: State, first_row: int
    ) -> torch.Tensor:
        raise DeviceLost("device-side assert")


def test_a_lost_device_ends_all() -> None:
    desk = Desk(Dying())
    desk.ask([1])
    with pytest.raises(DeviceLost):
        desk.step()


def test_a_gateway_that_is_gone_is_told_nothing_and_leaves_no_rows() -> None:
    desk = Desk(NETWORK, Capacity(3, 144, 48))
    gone = [desk.ask([1, 2, number], owner="gone", max_tokens=30) for number in range(4)]
    stays = desk.ask([5, 3, 11], owner="stays", max_tokens=30)
    desk.step(3)
    said = [outcome.pieces for outcome in gone]
    desk.stepper.forget("gone")
    assert len(desk.stepper) == 1
    desk.finish()
    assert [outcome.pieces for outcome in gone] == said
    assert stays.text == text_of(expected([5, 3, 11], 30))


def test_all_that_is_left_can_be_ended_at_once() -> None:
    desk = Desk(NETWORK, Capacity(2, 96, 48), portion=4)
    outcomes = [desk.ask([1, 2, 3]), desk.ask([5] * 17), desk.ask([9])]
    desk.step(2)
    said = desk.stepper.end_all(Failure(Code.DRAINING, "the worker stops"))
    assert [piece.failure.code for pieces in said.values() for piece in pieces if piece.failure] == [Code.DRAINING] * 3
    assert len(desk.stepper) == 0
    assert all(not outcome.over for outcome in outcomes)


# ------------------------------------------------------------------ seeds and log probabilities


def test_the_same_seed_gives_the_same_text_and_another_one_another() -> None:
    desk = Desk(NETWORK)
    options = {"temperature": 1.0, "max_tokens": 30}
    same = [desk.ask([1, 2, 3], seed=7, **options) for _ in range(3)]
    desk.step(5)
    later = desk.ask([1, 2, 3], seed=7, **options)
    other = desk.ask([1, 2, 3], seed=8, **options)
    unseeded = [desk.ask([1, 2, 3], **options) for _ in range(12)]
    desk.finish()
    assert {outcome.text for outcome in (*same, later)} == {same[0].text}
    assert other.text != same[0].text
    # A text may end with its first tokens, so that two of them are the same by chance; not most of twelve.
    assert len({outcome.text for outcome in unseeded}) > 6


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 4, "top_k": 5}, {"beams": 3}])
def test_log_probabilities_are_the_network_s(options: dict[str, Any]) -> None:
    desk = Desk(NETWORK)
    desk.ask([9, 9], max_tokens=20)
    outcome = desk.ask([1, 2, 3], max_tokens=8, logprobs=2, **options)
    desk.finish()
    known = [1, 2, 3]
    for token in outcome.tokens:
        logs = logits_after(NETWORK, known).log_softmax(-1)
        assert token.logprob == pytest.approx(float(logs[token.id]), abs=1e-4)
        best = logs.topk(2)
        assert [each.id for each in token.alternatives] == best.indices.tolist()
        assert [each.logprob for each in token.alternatives] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert text_of([token.id]).encode() == token.data or token.id in (62, ENDS)
        known.append(token.id)
    assert outcome.end is not None
    assert len(outcome.tokens) == outcome.end.completion_tokens
