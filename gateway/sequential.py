"""Is one thing's rate of bad outcomes above another's? Asked after every outcome, without fooling oneself. Pure.

A test for a fixed number of outcomes is wrong when it is looked at as they come: sooner or later it alarms. Here the
*evidence* against "the rate is at most p0" is a mixture of likelihood ratios over rates p1 above p0. While the claim
is true it is a supermartingale that starts at 1, so by Ville's inequality the chance that it *ever* reaches N is at
most 1/N (Robbins 1970; "e-process"). The other side's rate is not known either: p0 is an upper bound that holds at all
times at once, made in the same way. Evidence falls as p0 grows towards the observed rate, so with a bound that holds
it is at most what the true p0 would give, and the two chances of an error add up.
"""

import math
from typing import NamedTuple

_HALVINGS = 40
"""Of the interval that holds the upper bound: more than a float can tell."""

_RATES = tuple(1 / (1 + 10 ** (-step / 4)) for step in range(-16, 13))
"""Suspected rates p1: odds from 1:10,000 to 1000:1, each 1.8 times the one before. They must not depend on the data."""
_GRID = tuple((rate, math.log(rate), math.log1p(-rate)) for rate in _RATES)
_LOG_WEIGHT = -math.log(len(_GRID))
"""All are equally likely beforehand."""
_MIXTURE = math.lgamma(1.0) - 2 * math.lgamma(0.5)
"""Of the Beta(1/2, 1/2) mixture behind the upper bound."""


class Tally:
    """Outcomes, and how many of them were bad."""

    __slots__ = ("bad", "total")

    def __init__(self, bad: int = 0, total: int = 0) -> None:
        self.bad = bad
        self.total = total

    def add(self, *, bad: bool) -> None:
        """One more outcome."""
        self.total += 1
        self.bad += bad

    @property
    def rate(self) -> float:
        """Share of bad ones; 0 when there were none at all."""
        return self.bad / self.total if self.total else 0.0


class Evidence(NamedTuple):
    """What speaks against a rate."""

    log: float
    """Natural logarithm."""
    allowed: float
    """The rate that would not be held against it."""


def log_evidence(tally: Tally, allowed: float) -> float:
    """Natural logarithm of the evidence that the rate is above `allowed`; minus infinity when nothing speaks for it.

    What was observed must be above `allowed` itself: only there more tolerance always means less evidence.
    """
    bad, good = tally.bad, tally.total - tally.bad
    if not 0 < allowed < tally.rate:
        return -math.inf
    log_bad, log_good = math.log(allowed), math.log1p(-allowed)
    ratios = [bad * (log_p - log_bad) + good * (log_q - log_good) for rate, log_p, log_q in _GRID if rate > allowed]
    if not ratios:
        return -math.inf
    top = max(ratios)
    return top + math.log(math.fsum(math.exp(ratio - top) for ratio in ratios)) + _LOG_WEIGHT


def most_evidence(tally: Tally, allowed: float) -> float:
    """A bound on `log_evidence` that costs a tenth of it: the likelihood ratio of the rate that fits best."""
    bad, good, rate = tally.bad, tally.total - tally.bad, tally.rate
    if not 0 < allowed < rate:
        return -math.inf
    found = bad * math.log(rate / allowed)
    return found + good * math.log((1 - rate) / (1 - allowed)) if good else found


def upper_bound(tally: Tally, doubt: float) -> float:
    """A rate that the true one exceeds with a chance of at most `doubt`, however often this is asked as outcomes come.

    1 when nothing is known. The largest rate that a Beta(1/2, 1/2) mixture does not refute.
    """
    bad, good = tally.bad, tally.total - tally.bad
    if not good:
        return 1.0
    mixture = math.lgamma(bad + 0.5) + math.lgamma(good + 0.5) - math.lgamma(tally.total + 1.0) + _MIXTURE
    refuted = mixture + math.log(doubt)
    low, high = tally.rate, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        likelihood = (bad * math.log(middle) if bad else 0.0) + good * math.log1p(-middle)
        low, high = (middle, high) if likelihood > refuted else (low, middle)
    return high


class Comparison:
    """Two tallies of one kind of outcome: the canary's and the current version's."""

    __slots__ = ("canary", "current", "floor")

    def __init__(self, floor: float) -> None:
        """`floor`: a rate that is never held against the canary."""
        self.floor = floor
        self.restart()

    def restart(self) -> None:
        """Forget what came so far."""
        self.canary, self.current = Tally(), Tally()

    def evidence(self, log_needed: float, doubt: float) -> Evidence | None:
        """That the canary's rate is above the floor and above the current version's, if it reaches `log_needed`."""
        if most_evidence(self.canary, max(self.floor, self.current.rate)) < log_needed:
            return None  # nearly always: the bound below can only be higher
        return self._reached(log_needed, max(self.floor, upper_bound(self.current, doubt)))

    def evidence_alone(self, log_needed: float) -> Evidence | None:
        """The same while too little is known of the current version: held against the floor, or the rate that it has.

        For what is bad beyond doubt only.
        """
        return self._reached(log_needed, max(self.floor, self.current.rate))

    def _reached(self, log_needed: float, allowed: float) -> Evidence | None:
        found = log_evidence(self.canary, allowed)
        return Evidence(found, allowed) if found >= log_needed else None
