"""What one model's forecasts are multiplied with: learned from the slowest answers. Pure policy.

A step up after each request that took longer than its corrected forecast, `LATE` of that step down after each one that
did not: where the two balance, that share of the requests takes longer (stochastic approximation of a quantile). What
was admitted before the first of several steps up knew nothing of it, so all of these together raise the correction by
no more than `BURST`, as congestion control reacts once a round trip: one late batch is one observation.
"""

from typing import NamedTuple

LATE = 0.005
"""Share of requests that may take longer than their corrected forecast. 2 % late ones are promised; the first moments
of an overload, before anything is learned, take their part of that."""
LEARN = 0.05
"""The relative step up."""
BURST = 1.5
"""A server that has become half as fast is known after two such rounds, and forgiven within some thousand good
answers."""
START = 1.25
"""Before anything was learned: careful, since an answer that is late by a hair is as lost as any, and what an overload
does to cores that others use as well is not known yet."""
LEAST, MOST = 0.5, 4.0
"""Bounds, so that one bad second can't close the door for good."""
HALF_LIFE_S = 3.0
"""Of what was learned above the start: an overload teaches it anew within some late answers."""
RELEVANT = 0.25
"""Forecasts below this share of the budget are well inside whatever the correction is, and mostly noise."""


class Promise(NamedTuple):
    """What was forecast for a request when it was let in."""

    raw_s: float
    """Uncorrected: learning from corrected forecasts would swing."""
    budget_s: float
    round: int
    """Of the correction's, at that moment."""


class Correction:
    """Of one model."""

    __slots__ = ("_ceiling", "_round", "factor")

    def __init__(self) -> None:
        self.factor = START
        self._round = 0
        self._ceiling = MOST

    def promise(self, raw_s: float, budget_s: float) -> Promise:
        """A request is let in."""
        return Promise(raw_s, budget_s, self._round)

    def answered(self, promise: Promise, actual_s: float) -> None:
        """It was answered after `actual_s`."""
        promised_s = promise.raw_s * self.factor
        if promised_s < promise.budget_s * RELEVANT:
            return
        if actual_s > promised_s:
            self._raise(promise)
        else:
            self.factor = max(self.factor * (1 - LEARN * LATE), LEAST)

    def missed(self, promise: Promise) -> None:
        """It was not answered within its budget. One that was a try against the forecast proves nothing."""
        if promise.raw_s <= promise.budget_s:
            self._raise(promise)

    def forget(self, elapsed_s: float) -> None:
        """Time has passed, and what was learned of a bad time is worth less.

        Light traffic teaches nothing, and would otherwise be refused for it until the next overload.
        """
        if self.factor > START:
            self.factor = START + (self.factor - START) * 0.5 ** (elapsed_s / HALF_LIFE_S)

    def _raise(self, promise: Promise) -> None:
        if promise.round == self._round:  # let in after the last steps up had begun
            self._round += 1
            self._ceiling = min(self.factor * BURST, MOST)
        self.factor = min(self.factor * (1 + LEARN * (1 - LATE)), max(self._ceiling, self.factor))

    def __repr__(self) -> str:
        return f"<Correction {self.factor:.2f}>"
