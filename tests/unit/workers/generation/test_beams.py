import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.clock import FOREVER_S
from shared.generation import GenerationOptions, Vocabulary
from shared.results import FinishReason
from workers.generation.beams import BeamSearch, Found
from workers.generation.sampler import Seen, Way
from workers.generation.sequences import Beams, Reader
from workers.jobs import Job

PIECES = [b"a", b"b", b"c", b"d", b""]
END = 4
VOCABULARY = Vocabulary(PIECES, [END])


class Model:
    """Logits that depend on all tokens before, made of a seed."""

    def __init__(self, seed: int, size: int) -> None:
        self.seed, self.size = seed, size
        self.asked: list[int] = []

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        number = hash((self.seed, *tokens)) % 2**31
        return torch.randn(self.size, generator=torch.Generator().manual_seed(number)) * 1.5

    def logs(self, tokens: Sequence[int]) -> list[float]:
        return [float(value) for value in self.logits(tokens).log_softmax(-1).double()]

    def search(self, most: int, vocabulary: Vocabulary = VOCABULARY, **options: Any) -> Found:  # noqa: ANN401 - each its own
        asked = GenerationOptions(**options)
        search = BeamSearch(asked, vocabulary, vocabulary.end_ids, most)
        rows: list[list[int]] = [[]]
        steps = 0
        while search.rows:
            assert [*search.tokens()] == rows, "each row's tokens, wherever it has come from"
            assert [row[-1] for row in rows if row] == search.last_tokens()
            self.asked.append(len(rows))
            penal = asked.repetition_penalty != 1
            ways = [Way(asked, 0, 0, Seen(row, self.size, torch.device("cpu")).mask if penal else None) for row in rows]
            parents = search.advance(torch.stack([self.logits(row) for row in rows]), ways)
            rows = [[*rows[parent], token] for parent, token in zip(parents, search.last_tokens(), strict=True)]
            steps += 1
            assert steps <= most
        assert search.best is not None
        return search.best


def ids(found: Found) -> list[int]:
    return [choice.token for choice in found.choices]


def best_of_all(model: Model, most: int, penalty: float, ends: Sequence[int]) -> tuple[float, list[int]]:
    """Every text there is, judged."""
    found: list[tuple[float, list[int]]] = []
    going = [t for t in range(model.size) if t not in ends]
    for length in range(1, most + 1):
        for begin in itertools.product(going, repeat=length - 1):
            for last in range(model.size) if length == most else ends:
                tokens = [*begin, last]
                total = sum(model.logs(tokens[:at])[token] for at, token in enumerate(tokens))
                found.append((total / length**penalty, tokens))
    return max(found)


def plain_search(model: Model, most: int, width: int, penalty: float, ends: Sequence[int]) -> list[int]:
    """The same rules without any early end, in plain numbers."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, most + 1):
        candidates = sorted(
            ((total + log, [*tokens, token]) for total, tokens in live for token, log in enumerate(model.logs(tokens))),
            key=lambda each: -each[0],
        )
        ended += [(total / length**penalty, tokens) for total, tokens in candidates[:width] if tokens[-1] in ends]
        live = [(total, tokens) for total, tokens in candidates if tokens[-1] not in ends][:width]
    ended += [(total / most**penalty, tokens) for total, tokens in live]
    return max(ended, key=lambda each: each[0])[1]


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    most=st.integers(1, 3),
    penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    ends=st.sampled_from([[END], [END, 0]]),
)
def test_with_beams_enough_it_is_the_best_text_of_all(seed: int, most: int, penalty: float, ends: list[int]) -> None:
    model = Model(seed, len(PIECES))
    vocabulary = Vocabulary(PIECES, ends)
    found = model.search(most, vocabulary, beams=125, length_penalty=penalty)
    score, tokens = best_of_all(model, most, penalty, ends)
    assert ids(found) == tokens
    assert found.score == pytest.approx(score, abs=1e-5)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    most=st.integers(1, 9),
    width=st.integers(2, 5),
    penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
)
def test_ending_early_changes_nothing(seed: int, most: int, width: int, penalty: float) -> None:
    model = Model(seed, len(PIECES))
    found = model.search(most, beams=width, length_penalty=penalty)
    assert ids(found) == plain_search(model, most, width, penalty, [END])
    assert max(model.asked) <= width
    text = b"".join(PIECES[token] for token in ids(found)).decode()
    assert found.text == text
    assert found.reason is (FinishReason.END_TOKEN if ids(found)[-1] == END else FinishReason.LENGTH)


class Fixed(Model):
    """The same probabilities whatever came before, but for what is said of a beginning."""

    def __init__(self, usual: Sequence[float], after: dict[tuple[int, ...], Sequence[float]]) -> None:
        super().__init__(0, len(usual))
        self._usual, self._after = usual, after

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        shares = self._after.get(tuple(tokens), self._usual)
        return torch.tensor([math.log(share) if share else -math.inf for share in shares])


def test_it_finds_what_greedy_does_not() -> None:
    model = Fixed([0.25, 0.25, 0.25, 0.25, 0], {(): [0.6, 0.4, 0, 0, 0], (1,): [0, 0, 1.0, 0, 0]})
    assert model.search(2, beams=2).text == "bc"
    assert model.asked == [1, 2]


def test_a_longer_text_is_favoured_by_the_penalty() -> None:
    after: dict[tuple[int, ...], Sequence[float]] = {
        (): [0.5, 0, 0, 0, 0.5],
        (0,): [0, 0.7, 0, 0, 0.3],
        (0, 1): [0, 0, 0, 0, 1.0],
    }
    model = Fixed([0, 0, 0, 0, 1.0], after)
    assert model.search(9, beams=2, length_penalty=0.0).text == ""
    assert model.search(9, beams=2, length_penalty=2.0).text == "ab"


def test_it_ends_as_soon_as_nothing_better_can_come() -> None:
    model = Fixed([0.1, 0.1, 0, 0, 0.8], {(): [0.04, 0.01, 0, 0, 0.95]})
    assert model.search(100, beams=2, length_penalty=0.0).text == ""
    assert len(model.asked) == 1


def test_a_stop_string_ends_one_continuation_and_is_cut_off() -> None:
    after: dict[tuple[int, ...], Sequence[float]] = {(): [0.9, 0.1, 0, 0, 0], (0,): [0, 0.9, 0.1, 0, 0]}
    found = Fixed([0, 0, 0, 1.0, 0], after).search(6, beams=2, stop=("bd",), length_penalty=0.0)
    assert (found.text, found.reason) == ("a", FinishReason.STOP_STRING)
    assert ids(found) == [0, 1, 3]


def test_a_stop_string_behind_the_best_is_forgotten_as_an_end_token_is() -> None:
    vocabulary = Vocabulary(PIECES, [4])
    options = GenerationOptions(beams=2, stop=("c",))
    search = BeamSearch(options, vocabulary, vocabulary.end_ids, 9)
    step = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.05, 0.05]]))
    search.advance(step, [Way(options, 0, 0, None)])
    assert search.best is None
    search.advance(torch.log(torch.tensor([[0.01, 0.01, 0.9, 0.04, 0.04]] * 2)), [Way(options, 0, 0, None)] * 2)
    assert search.best is not None
    assert search.best.text == "a"


def test_what_was_held_back_for_a_stop_string_is_said_in_the_end() -> None:
    after: dict[tuple[int, ...], Sequence[float]] = {(): [1.0, 0, 0, 0, 0], (0,): [0, 1.0, 0, 0, 0]}
    found = Fixed([0, 0, 0, 0, 1.0], after).search(6, beams=2, stop=("bd",))
    assert (found.text, found.reason) == ("ab", FinishReason.END_TOKEN)


def test_the_repetition_penalty_is_about_each_continuation_s_own_tokens() -> None:
    model = Fixed([0.4, 0.3, 0.2, 0.1, 0], {})
    found = model.search(3, beams=3, repetition_penalty=5.0)
    assert len(set(ids(found))) == 3


def test_a_search_that_nothing_goes_on_with_and_that_has_found_nothing_says_so() -> None:
    reader = Reader(VOCABULARY, 48, len(PIECES), torch.device("cpu"))
    text = Beams(Job("gateway", 1, FOREVER_S, [1], GenerationOptions(beams=2)), reader)
    with pytest.raises(RuntimeError, match="leaves no token"):
        text.take(torch.full((1, len(PIECES)), -math.inf))


def test_many_end_tokens_and_log_probabilities_copy_no_vocabulary_per_candidate() -> None:
    size, ends = 20_000, frozenset(range(63))
    options = GenerationOptions(beams=16, logprobs=20, stop_token_ids=tuple(ends))
    search = BeamSearch(options, Vocabulary([b"a"] * size, [0]), ends, 100)
    way = Way(options, 0, 0, None)
    search.advance(torch.randn(1, size), [way])
    with torch.profiler.profile(profile_memory=True) as profile:
        search.advance(torch.randn(search.rows, size), [way] * search.rows)
    taken = max(event.self_cpu_memory_usage for event in profile.key_averages())
    assert taken < 16 * size * 8 * 3, "a few times the sum of each continuation, whatever the number of candidates"


def test_log_probabilities_follow_the_text_that_is_found() -> None:
    model = Model(3, len(PIECES))
    found = model.search(5, beams=3, logprobs=2, repetition_penalty=1.2)
    tokens = ids(found)
    for at, choice in enumerate(found.choices):
        logs = model.logs(tokens[:at])
        assert choice.logprob == pytest.approx(logs[choice.token], abs=1e-5)
        best = sorted(range(len(logs)), key=lambda token: -logs[token])[:2]
        assert [token for token, _ in choice.alternatives] == best
