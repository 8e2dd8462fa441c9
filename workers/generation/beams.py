"""Beam search: of all continuations of those kept, the best `beams` are kept, until none can beat the best that ended.

Continuations are compared by log probability / tokens ** length_penalty, the end token counted. One that ends among the
best `beams` of a step is remembered if it is the best so far; one that ends further behind is forgotten. All rows of a
search are in the state, and move with it.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from shared.generation import Detokeniser, GenerationOptions, Vocabulary
from shared.results import FinishReason
from workers.generation.sampler import Choice, Way, penalised


class _Link(NamedTuple):
    """One token of a continuation, and through it those before."""

    before: "_Link | None"
    choice: Choice
    text: str
    length: int


class _Live(msgspec.Struct):
    """A continuation that goes on; one row of the state."""

    score: float
    """Sum of log probabilities, after the repetition penalty."""
    last: _Link | None
    detokeniser: Detokeniser


class Found(NamedTuple):
    """The best continuation that has ended."""

    score: float
    choices: Sequence[Choice]
    text: str
    reason: FinishReason


class _Candidate(NamedTuple):
    row: int
    token: int
    score: float
    logprob: float
    alternatives: list[tuple[int, float]]


class BeamSearch:
    """One prompt's. Starts with one row, the prompt's own."""

    def __init__(self, options: GenerationOptions, vocabulary: Vocabulary, ends: frozenset[int], most: int) -> None:
        """`ends`: tokens that end a text; `most`: tokens of an answer, 1 or more."""
        self._options = options
        self._ends = ends
        self._most = most
        self._live = [_Live(0.0, None, Detokeniser(vocabulary, options.stop))]
        self.best: Found | None = None

    @property
    def rows(self) -> int:
        """Rows that it has now; 0 when it is over, and `best` is the answer."""
        return len(self._live)

    def last_tokens(self) -> list[int]:
        """Of each row."""
        return [live.last.choice.token for live in self._live if live.last is not None]

    def tokens(self) -> Iterator[list[int]]:
        """Of each row: all tokens that the search has added."""
        return ([choice.token for choice in _chain(live.last)] for live in self._live)

    def advance(self, logits: Tensor, ways: Sequence[Way]) -> list[int]:
        """Go on from float32 logits `[rows, vocabulary]`; for each new row, which one it comes from."""
        live: list[_Live] = []
        parents: list[int] = []
        for rank, candidate in enumerate(self._candidates(logits, ways)):
            if len(live) == self._options.beams:
                break
            onward = self._follow(candidate, rank)
            if onward is not None:
                live.append(onward)
                parents.append(candidate.row)
        self._live = live
        if self.best is not None and all(self._bound(each) <= self.best.score for each in live):
            self._live, parents = [], []
        return parents

    def _candidates(self, logits: Tensor, ways: Sequence[Way]) -> list[_Candidate]:
        """The best ones, best first: so many that `beams` of them go on, if there are as many."""
        size = logits.shape[1]
        scores = torch.tensor([live.score for live in self._live], dtype=torch.double, device=logits.device)
        judged, logs = penalised(logits, ways), logits.log_softmax(-1)
        ahead = logs if judged is logits else judged.log_softmax(-1)
        totals = (ahead.double() + scores[:, None]).flatten()
        best = totals.topk(min(len(totals), self._options.beams * (1 + len(self._ends))))
        rows, tokens = best.indices // size, best.indices % size
        # Once per row: of a search with many end tokens there are a thousand candidates.
        likeliest = self._likeliest(logs)
        logprobs = logs[rows, tokens] if self._options.logprobs is not None else torch.zeros(len(rows))
        found = zip(rows.tolist(), tokens.tolist(), best.values.tolist(), logprobs.tolist(), strict=True)
        # What the network rules out has -infinity, and is no continuation.
        return [_Candidate(*each, likeliest[each[0]]) for each in found if each[2] > -math.inf]

    def _likeliest(self, logs: Tensor) -> list[list[tuple[int, float]]]:
        """Of each row, as many as are asked for."""
        if not self._options.logprobs:
            return [[]] * len(logs)
        best = logs.topk(min(self._options.logprobs, logs.shape[1]), dim=-1)
        return [
            list(zip(tokens, values, strict=True))
            for tokens, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def _follow(self, candidate: _Candidate, rank: int) -> _Live | None:
        """The continuation that a candidate makes; None where it ends."""
        before = self._live[candidate.row]
        choice = Choice(candidate.token, candidate.logprob, candidate.alternatives)
        count = 1 + (before.last.length if before.last is not None else 0)
        detokeniser = before.detokeniser.copy()
        if candidate.token in self._ends:
            if rank < self._options.beams:
                link = _Link(before.last, choice, detokeniser.finish(), count)
                self._ended(candidate.score, link, FinishReason.END_TOKEN)
            return None
        text = detokeniser.feed(candidate.token)
        link = _Link(before.last, choice, text, count)
        if detokeniser.stopped:
            if rank < self._options.beams:
                self._ended(candidate.score, link, FinishReason.STOP_STRING)
            return None
        if count == self._most:
            self._ended(candidate.score, link._replace(text=text + detokeniser.finish()), FinishReason.LENGTH)
            return None
        return _Live(candidate.score, link, detokeniser)

    def _ended(self, total: float, link: _Link, reason: FinishReason) -> None:
        score = self._judged(total, link.length)
        if self.best is None or score > self.best.score:
            chain = [*_links(link)]
            self.best = Found(score, [each.choice for each in chain], "".join(each.text for each in chain), reason)

    def _judged(self, total: float, count: int) -> float:
        return float(total / count**self._options.length_penalty)

    def _bound(self, live: _Live) -> float:
        """What it can still come to at best: its sum falls with each token, so only its length may help."""
        count = live.last.length if live.last is not None else 1
        return self._judged(live.score, self._most if self._options.length_penalty > 0 else count)

    def __repr__(self) -> str:
        return f"<BeamSearch rows={self.rows} best={self.best and self.best.text!r}>"


def _links(last: _Link | None) -> list[_Link]:
    links = []
    while last is not None:
        links.append(last)
        last = last.before
    return links[::-1]


def _chain(last: _Link | None) -> list[Choice]:
    return [link.choice for link in _links(last)]
