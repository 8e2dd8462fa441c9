"""From logits to the next token, for many sequences at once, in float32 on the device.

What a sequence gets depends on its own logits, options and seed alone, never on who else is in the batch: the random
number of a step is made of the seed and the number of the step, not taken from a generator that others use, too.

Order: log probabilities are read first; then repetition penalty, temperature, top-k, top-p, and the draw.
"""

import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from shared.generation import GenerationOptions

_TWO_53 = 2.0**53
_MASK = 2**64 - 1


class Seen:
    """The tokens of one sequence so far, as a mask on the device: what the repetition penalty is about."""

    def __init__(self, tokens: Sequence[int], size: int, device: torch.device) -> None:
        self.mask = torch.zeros(size, dtype=torch.bool, device=device)
        self.mask[torch.tensor(tokens, dtype=torch.long, device=device)] = True

    def add(self, token: int) -> None:
        """One more."""
        self.mask[token] = True


class Way(msgspec.Struct):
    """How one row's next token is chosen."""

    options: GenerationOptions
    seed: int
    step: int
    """Tokens chosen before."""
    seen: Tensor | None
    """bool `[vocabulary]`, where there is a repetition penalty."""


class Choice(msgspec.Struct):
    """One row's next token."""

    token: int
    logprob: float = 0.0
    """With this, natural logarithms, only where they are asked for."""
    alternatives: list[tuple[int, float]] = []
    """The likeliest ones, best first."""


def choose(logits: Tensor, ways: Sequence[Way]) -> list[Choice]:
    """One token per row of finite float32 `[n, vocabulary]`."""
    scores = penalised(logits, ways)
    tokens = scores.argmax(-1)
    drawn = [row for row, way in enumerate(ways) if way.options.temperature > 0]
    if drawn:
        tokens[drawn] = _drawn(scores[drawn], [ways[row] for row in drawn])
    choices = [Choice(token) for token in tokens.tolist()]
    told = [row for row, way in enumerate(ways) if way.options.logprobs is not None]
    if told:
        counts = [ways[row].options.logprobs or 0 for row in told]
        for row, (logprob, best) in zip(told, log_probabilities(logits[told], tokens[told], counts), strict=True):
            choices[row].logprob, choices[row].alternatives = logprob, best
    return choices


def penalised(logits: Tensor, ways: Sequence[Way]) -> Tensor:
    """Tokens that have occurred made less likely, or with a penalty below 1 more so, in the rows that ask for it."""
    rows = [row for row, way in enumerate(ways) if way.seen is not None]
    if not rows:
        return logits
    seen = torch.stack([mask for way in ways if (mask := way.seen) is not None])
    penalty = _column(logits, [ways[row].options.repetition_penalty for row in rows])
    before = logits[rows]
    after = torch.where(seen, torch.where(before > 0, before / penalty, before * penalty), before)
    scores = logits.clone()
    scores[rows] = after
    return scores


def log_probabilities(
    logits: Tensor, tokens: Tensor, counts: Sequence[int]
) -> list[tuple[float, list[tuple[int, float]]]]:
    """Per row: of its token, and of its `counts[row]` likeliest ones."""
    logs = logits.log_softmax(-1)
    chosen = logs.gather(1, tokens[:, None])[:, 0].tolist()
    best = logs.topk(min(max(counts), logs.shape[1]), dim=-1)
    rows = zip(chosen, best.indices.tolist(), best.values.tolist(), counts, strict=True)
    return [(logprob, list(zip(ids[:count], values[:count], strict=True))) for logprob, ids, values, count in rows]


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) that only these two decide (splitmix64 of both), the same on every machine."""
    mixed = _mixed((_mixed(seed & _MASK) + 0x9E3779B97F4A7C15 * (step + 1)) & _MASK)
    return (mixed >> 11) / _TWO_53


def _mixed(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _drawn(scores: Tensor, ways: Sequence[Way]) -> Tensor:
    """int64 `[n]`. Rows that use all tokens need no order, which costs more than all the rest."""
    # Less the largest one, so that dividing by next to nothing gives 0 for it and -infinity for all others.
    temperatures = _column(scores, [max(way.options.temperature, 1e-10) for way in ways])
    scaled = (scores - scores.amax(-1, keepdim=True)) / temperatures
    cut = [way.options.top_k > 0 or way.options.top_p < 1 for way in ways]
    tokens = torch.empty(len(ways), dtype=torch.long, device=scores.device)
    for wanted in (False, True):
        rows = [row for row, has in enumerate(cut) if has is wanted]
        if rows:
            some = [ways[row] for row in rows]
            tokens[rows] = _from_best(scaled[rows], some) if wanted else _at(scaled[rows].softmax(-1), some)
    return tokens


def _from_best(scaled: Tensor, ways: Sequence[Way]) -> Tensor:
    """Of each row's best tokens: first so many, then of these as many as have a probability together."""
    size = scaled.shape[-1]
    largest = max(way.options.top_k or size for way in ways)
    # Equal scores in the order of the tokens, so that where a row is cut does not hang on what sorts it.
    ordered, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    ordered, tokens = ordered[:, :largest], tokens[:, :largest]
    places = torch.arange(ordered.shape[-1], device=scaled.device)
    count = torch.tensor([way.options.top_k or size for way in ways], device=scaled.device)[:, None]
    probabilities = ordered.masked_fill(places >= count, -math.inf).softmax(-1)
    before = probabilities.double().cumsum(-1) - probabilities
    nucleus = torch.tensor([way.options.top_p for way in ways], dtype=torch.double, device=scaled.device)[:, None]
    # The first one always stays, as does the one with which the sum is reached.
    kept = probabilities.masked_fill((before >= nucleus) & (places > 0), 0.0)
    return tokens.gather(1, _at(kept, ways)[:, None])[:, 0]


def _at(probabilities: Tensor, ways: Sequence[Way]) -> Tensor:
    """Place of each row's random number in the running sum of its probabilities, which need not add up to 1.

    The sum is in double precision: in float32, the tail of a large vocabulary would be lost in rounding.
    """
    sums = probabilities.double().cumsum(-1)
    numbers = torch.tensor([uniform(way.seed, way.step) for way in ways], dtype=torch.double, device=sums.device)
    places = torch.searchsorted(sums, numbers[:, None] * sums[:, -1:], right=True)[:, 0]
    last = probabilities.shape[-1] - 1 - (probabilities > 0).flip(-1).int().argmax(-1)
    return torch.minimum(places, last)


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
