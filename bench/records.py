"""What became of every call of a run, by phase and by size, with latencies from the planned time. Pure.

The words are those of `bench.ledger`, which compares them with the server's; two more are ours alone.
"""

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from bench.ledger import OK
from shared.errors import Code

NOT_SENT = "not_sent"
"""The deadline had passed before the generator could send it: the server never saw it."""
LATE = "ok_late"
"""Answered, but after the deadline (gRPC rounds it up)."""
REFUSED = Code.OVERLOADED.value
_STAGE = re.compile(r"(\w+);dur=([\d.]+)")
PENDING = ""
"""Sent and not ended."""


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; `values` must be sorted and not empty."""
    return values[min(len(values) - 1, int(share * len(values)))]


class Records:
    """Every call of a run, by its place in the plan. Seconds from the start of the plan."""

    def __init__(self, planned_s: Sequence[float], phases: Sequence[int], sizes: Sequence[str]) -> None:
        self.planned_s = planned_s
        self.phases = phases
        """Index of each call's phase."""
        self.sizes = sizes
        self.sent_s = array("d", bytes(8 * len(planned_s)))
        self.ended_s = array("d", bytes(8 * len(planned_s)))
        self.outcomes = [PENDING] * len(planned_s)

    def __len__(self) -> int:
        return len(self.outcomes)

    def mark_late(self, deadline_s: float) -> None:
        """Tell answers that came after planned + deadline from those in time; once, after the run."""
        for index, outcome in enumerate(self.outcomes):
            if outcome == OK and self.ended_s[index] - self.planned_s[index] > deadline_s:
                self.outcomes[index] = LATE

    def lines(self) -> list[str]:
        """CSV, with a header."""
        rows = zip(self.phases, self.sizes, self.planned_s, self.sent_s, self.ended_s, self.outcomes, strict=True)
        return ["phase,size,planned_s,sent_s,ended_s,outcome"] + [
            f"{phase},{size},{planned:.6f},{sent:.6f},{ended:.6f},{outcome}"
            for phase, size, planned, sent, ended, outcome in rows
        ]

    def where(self, phase: int | None = None, size: str | None = None) -> list[int]:
        """Places in the plan of one phase, one size, or all."""
        return [
            index
            for index in range(len(self))
            if (phase is None or self.phases[index] == phase) and (size is None or self.sizes[index] == size)
        ]


def callers_words(outcomes: dict[str, int]) -> Counter[str]:
    """The outcomes of a summary as `bench.ledger.compare` wants them: of calls that were sent, late or not."""
    words = Counter(outcomes)
    words[OK] += words.pop(LATE, 0)
    words.pop(NOT_SENT, None)
    return +words


def summary(records: Records, places: Sequence[int]) -> dict[str, Any]:
    """The ledger of these calls: `planned` is the sum of `outcomes`. Percentiles in milliseconds."""
    outcomes = Counter(records.outcomes[index] for index in places)

    def of(*wanted: str) -> Iterable[int]:
        return (index for index in places if records.outcomes[index] in wanted)

    return {
        "planned": len(places),
        "outcomes": dict(sorted(outcomes.items())),
        "ok_ms": _spread(records.ended_s, records.planned_s, of(OK)),
        "refused_ms": _spread(records.ended_s, records.sent_s, of(REFUSED)),
        "sent_after_plan_ms": _spread(records.sent_s, records.planned_s, of(*(outcomes.keys() - {NOT_SENT}))),
    }


def stages(timings: Iterable[str]) -> dict[str, dict[str, float]]:
    """Percentiles of each stage from Server-Timing headers, and of their sum."""
    found: dict[str, list[float]] = {}
    for timing in timings:
        by_stage = {stage: float(ms) for stage, ms in _STAGE.findall(timing)}
        for stage, ms in (by_stage | {"sum": sum(by_stage.values())}).items():
            found.setdefault(stage, []).append(ms)
    return {stage: spread(values) for stage, values in found.items()}


def _spread(until: Sequence[float], since: Sequence[float], places: Iterable[int]) -> dict[str, float]:
    return spread([(until[index] - since[index]) * 1e3 for index in places])


def spread(values: list[float]) -> dict[str, float]:
    """Percentiles, rounded; empty when there are no values. Sorts in place."""
    values.sort()
    if not values:
        return {}
    shares = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
    return {name: round(percentile(values, share), 2) for name, share in shares.items()} | {"max": round(values[-1], 2)}
