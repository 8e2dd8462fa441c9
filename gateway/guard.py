"""When a canary is rolled back without being asked. Pure policy of the gateway: it is told what happened, and judges.

A canary is held against the current version, answer by answer (`gateway.sequential`), by what share of its

- answers fail by the server's or the model's fault (`is_fault`),
- answers hold NaN or infinity,
- batches take more than `guard.slow_factor` times what the current version needs for as many rows,
- copies, of a shadow, are answered otherwise than by the current version.

Apart from these, `MOST_LOST` batches with which a worker died or hung condemn it, or `MOST_ENDED` inputs that ended one
twice: each of them costs seconds in which nobody is answered, and twenty would be minutes.

`guard.false_alarm` is the chance that a canary that is as good is *ever* rolled back, over all measures, all gateways
(each judges what it sees) and all looks. It is divided among them, one half for the canary's evidence and one half for
the bound on the current version's rate. Both are tallied over the same stretch of time, so that trouble that comes
over both is nobody's fault; stretches end, so that a long good past does not hide a bad present.
"""

import math
from typing import NamedTuple

from gateway.figures import Latencies, VersionFigures
from gateway.sequential import Comparison, Evidence
from shared.errors import Code
from shared.settings_base import GuardSettings

STRETCH = 4096
"""Answers of the canary in one stretch: enough to see twice the current version's error rate, few enough that one
that fails altogether after a whole stretch of good answers is found within some 150."""
DISAGREEMENT_FLOOR = 0.1
"""Share of copies that may be answered otherwise: a version trained anew changes its mind about some inputs."""
MOST_ENDED = 3
"""Inputs that ended a worker of the canary twice, more than of the current version: whatever the number of answers.
A death that is not the input's fault is met by a second try, so one may be bad luck, and three are not."""
MOST_LOST = 2
"""Batches of the canary with which a worker died or hung, more than of the current version. A second try of the same
inputs is no further sign; so one input that ends workers does not end a canary, and callers need not wait for it."""
CLEARLY_BAD = 0.5
"""A share of bad answers that needs no comparison: the current version is quiet when the canary has most callers."""

_FAULTS = {Code.INTERNAL, Code.NONFINITE_OUTPUT, Code.PROCESS_LOST, Code.MODEL_DISABLED}


class Verdict(NamedTuple):
    """Why a canary is to be rolled back."""

    reason: str
    """One sentence, safe to show."""
    figures: dict[str, float | str]
    """For the history: measure, rates, numbers of answers, the rate that was allowed, evidence and what was needed."""


def is_fault(code: Code | None, *, admitted: bool) -> bool | None:
    """Whether an outcome (None: answered) speaks against the version; None when it says nothing about it.

    Against it: failures of server and model. A deadline that passed counts once the request was admitted, since the
    forecast had found room for it: a model that hangs fails in this way only. MODEL_DISABLED, an input refused for
    having ended two of its processes, counts too: with few different inputs a version that crashes answers hardly
    anything else. What the caller did wrong, gave up, or was refused at the door says nothing.
    """
    if code is None:
        return False
    if code in _FAULTS or (code is Code.DEADLINE_EXCEEDED and admitted):
        return True
    return None


class Pair(NamedTuple):
    """Who is compared."""

    current: str
    canary: str
    shadow: bool = False
    """Whether the canary only gets copies."""


class _Version:
    """What one version did since the canary started."""

    __slots__ = ("ended", "figures", "latencies", "lost", "recent")

    def __init__(self, figures: VersionFigures) -> None:
        self.figures = figures
        self.latencies = Latencies()
        self.recent = 0
        """Answers in the present stretch."""
        self.ended = 0
        """Inputs in it that ended a worker twice."""
        self.lost = 0
        """Batches in it with which a worker died or hung, without second tries."""


class Guard:
    """Compares a canary with the current version; one for each canary."""

    def __init__(self, settings: GuardSettings, gateways: int, pair: Pair) -> None:
        """`gateways`: how many of them judge the same canary, each by itself."""
        self._settings = settings
        self._pair = pair
        self._current = _Version(VersionFigures(version=pair.current, role="current"))
        self._canary = _Version(VersionFigures(version=pair.canary, role="shadow" if pair.shadow else "canary"))
        floor = settings.error_floor
        self._errors, self._nonfinite, self._slow = Comparison(floor), Comparison(floor), Comparison(floor)
        self._disagreed = Comparison(max(floor, DISAGREEMENT_FLOOR))
        self._measures = {"error rate": self._errors, "non-finite rate": self._nonfinite, "slow batches": self._slow}
        if pair.shadow:
            self._measures["disagreement"] = self._disagreed
        self._share = settings.false_alarm / (2 * len(self._measures) * gateways)
        """Chance of a false alarm that each half of one measure of one gateway may have."""
        self._stretch = 1

    def observed(
        self, version: str, code: Code | None, seconds: float, *, admitted: bool = True, nonfinite_rows: int = 0
    ) -> None:
        """A request, or copy, was answered (`code` None) or failed, `seconds` after it came.

        Nothing happens for a version that is not compared, and for what says nothing about it.
        """
        side = self._side(version)
        bad = is_fault(code, admitted=admitted)
        if side is None or bad is None:
            return
        if side is self._canary and side.recent >= STRETCH:
            self.restart()
        nonfinite = nonfinite_rows > 0 or code is Code.NONFINITE_OUTPUT
        side.recent += 1
        figures = side.figures
        figures.requests += 1
        figures.errors += bad
        figures.nonfinite += nonfinite
        side.latencies.observe(seconds)
        if side is self._canary:
            self._errors.canary.add(bad=bad)
            self._nonfinite.canary.add(bad=nonfinite)
        else:
            self._errors.current.add(bad=bad)
            self._nonfinite.current.add(bad=nonfinite)

    def ended_workers(self, version: str, inputs: int) -> None:
        """So many inputs ended a worker twice, the second time alone."""
        side = self._side(version)
        if side is not None:
            side.ended += inputs

    def lost_worker(self, version: str) -> None:
        """A worker died, or was ended since it hung, while it ran a batch of it for the first time."""
        side = self._side(version)
        if side is not None:
            side.lost += 1

    def ran(self, version: str, run_s: float, expected_s: float) -> None:
        """A batch came back. `expected_s`: what the *current* version's cost model predicts for as many rows.

        Once for each batch: its requests are slow together, and would count as so many independent signs. Without a
        prediction (0) nothing can be said.
        """
        side = self._side(version)
        if side is None or not expected_s > 0:
            return
        slow = run_s > self._settings.slow_factor * expected_s
        side.figures.batches += 1
        side.figures.slow += slow
        (self._slow.canary if side is self._canary else self._slow.current).add(bad=slow)

    def compared(self, *, agrees: bool) -> None:
        """A copy's answer was held against the current version's."""
        self._canary.figures.compared += 1
        self._canary.figures.disagreed += not agrees
        self._disagreed.canary.add(bad=not agrees)

    def restart(self) -> None:
        """Begin another stretch: also to be called when the canary's share changes.

        With different shares before and after, trouble that comes over both would seem to be the canary's. The figures
        go on; the chance of a false alarm is divided among all stretches that may come.
        """
        self._stretch += 1
        for side in (self._canary, self._current):
            side.recent = side.ended = side.lost = 0
        for measure in (*self._measures.values(), self._disagreed):
            measure.restart()

    def verdict(self) -> Verdict | None:
        """Why the canary is to be rolled back, if it is. To be asked after everything that concerns the canary.

        Both versions must have `guard.min_samples` answers in this stretch; the current one need not when more than
        half of the canary's are bad. Workers that it ended need no company. Costs about a microsecond while nothing is
        wrong.
        """
        settings = self._settings
        if not settings.enabled:
            return None
        if self._canary.lost - self._current.lost >= MOST_LOST:
            return self._told_lost()
        if self._canary.ended - self._current.ended >= MOST_ENDED:
            return self._told_ended()
        if self._canary.recent < settings.min_samples:
            return None
        share = self._share / (self._stretch * (self._stretch + 1))  # of all stretches together: no more than 1
        log_needed = -math.log(share)
        for name, measure in self._measures.items():
            if measure is self._disagreed:
                found = measure.evidence_alone(log_needed)
            elif self._current.recent >= settings.min_samples:
                found = measure.evidence(log_needed, share)
            else:
                found = measure.evidence_alone(log_needed) if measure.canary.rate >= CLEARLY_BAD else None
            if found is not None:
                return self._told(name, measure, found, log_needed)
        return None

    @property
    def has_evidence(self) -> bool:
        """Whether the canary has answered enough in this stretch for its figures to mean something."""
        return not self._settings.enabled or self._canary.recent >= self._settings.min_samples

    def figures(self) -> list[VersionFigures]:
        """Since the canary started: the current version's, and the canary's."""
        for side in (self._current, self._canary):
            side.figures.p50_ms = side.latencies.quantile_ms(0.5)
            side.figures.p99_ms = side.latencies.quantile_ms(0.99)
        return [self._current.figures, self._canary.figures]

    def _side(self, version: str) -> _Version | None:
        if version == self._pair.canary:
            return self._canary
        return self._current if version == self._pair.current else None

    def _told_lost(self) -> Verdict:
        canary, current = self._canary, self._current
        figures: dict[str, float | str] = {
            "measure": "lost workers",
            "canary_batches": canary.lost,
            "canary_total": canary.recent,
            "current_batches": current.lost,
            "current_total": current.recent,
        }
        than = f"with {current.lost} of the current version's"
        return Verdict(f"a worker died or hung with {canary.lost} of its batches, {than}", figures)

    def _told_ended(self) -> Verdict:
        canary, current = self._canary, self._current
        figures: dict[str, float | str] = {
            "measure": "ended workers",
            "canary_inputs": canary.ended,
            "canary_total": canary.recent,
            "current_inputs": current.ended,
            "current_total": current.recent,
        }
        than = f"the current version did so with {current.ended} of {current.recent}"
        return Verdict(f"ended its worker twice with each of {canary.ended} inputs, {than}", figures)

    def _told(self, name: str, measure: Comparison, found: Evidence, log_needed: float) -> Verdict:
        canary, current = measure.canary, measure.current
        of, than = " answers", f"the current version's is {_percent(current.rate)} of {current.total}"
        if measure is self._slow:
            of = f" (over {self._settings.slow_factor:g} times what the current version needs)"
            than = f"the current version's are {_percent(current.rate)} of {current.total}"
        elif measure is self._disagreed:
            of, than = " copies", f"{_percent(found.allowed)} are allowed"
        reason = f"{name} {_percent(canary.rate)} of {canary.total}{of}, {than}"
        figures: dict[str, float | str] = {
            "measure": name,
            "canary_rate": round(canary.rate, 6),
            "canary_total": canary.total,
            "current_rate": round(current.rate, 6),
            "current_total": current.total,
            "allowed_rate": round(found.allowed, 6),
            "log10_evidence": round(found.log / math.log(10), 2),
            "log10_needed": round(log_needed / math.log(10), 2),
        }
        return Verdict(reason, figures)


def _percent(rate: float) -> str:
    return f"{rate * 100:.3g} %"
