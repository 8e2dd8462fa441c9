"""When an open loop sends: planned times of constant, Poisson, burst and ramp arrivals. Pure; seeded, so repeatable.

A phase is written `KIND:rate=N,seconds=N[,to=N][,burst=N][,name=WORD]`:

constant   evenly spaced
poisson    exponential gaps, as independent callers make
bursts     `burst` calls at the same moment, evenly spaced so that the rate is right
ramp       Poisson with a rate that rises or falls evenly from `rate` to `to`
"""

import itertools
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

KINDS = ("constant", "poisson", "bursts", "ramp")
MOST_CALLS = 2_000_000
"""Of one plan: what the records of that many calls need still fits into memory."""


class Phase(NamedTuple):
    """A stretch of one kind of arrivals."""

    kind: str
    rate: float
    """Calls a second; of a ramp, at its start."""
    seconds: float
    to: float = 0.0
    """Calls a second at a ramp's end."""
    burst: int = 16
    """Calls at one moment."""
    name: str = ""

    @property
    def calls(self) -> float:
        """Expected number."""
        return (self.rate + self.to) / 2 * self.seconds if self.kind == "ramp" else self.rate * self.seconds


class Arrival(NamedTuple):
    """One call of the plan."""

    planned_s: float
    """From the start of the plan."""
    phase: int
    """Index."""


def parse(text: str) -> Phase:
    """A phase as the command line writes it. Raises ValueError with a sentence."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ValueError(f"{text!r}: the kind must be one of {', '.join(KINDS)}")
    given = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in Phase._fields[1:]:
            raise ValueError(f"{text!r}: {part!r} must be one of rate=, seconds=, to=, burst= and name=")
        given[key] = value
    try:
        phase = Phase(
            kind,
            float(given.pop("rate")),
            float(given.pop("seconds")),
            float(given.pop("to", 0)),
            int(given.pop("burst", 16)),
            given.pop("name", ""),
        )
    except KeyError as missing:
        raise ValueError(f"{text!r}: {missing.args[0]}= is missing") from None
    _check(phase, text)
    return phase


def _check(phase: Phase, text: str) -> None:
    numbers = (phase.rate, phase.seconds, phase.to)
    if not all(math.isfinite(number) and number >= 0 for number in numbers) or phase.burst < 1:
        raise ValueError(f"{text!r}: numbers must be finite and not negative, a burst has 1 call or more")
    if phase.calls > MOST_CALLS:
        raise ValueError(f"{text!r} are {phase.calls:.0f} calls; at most {MOST_CALLS} fit into memory")


def plan(phases: tuple[Phase, ...], seed: int) -> list[Arrival]:
    """All calls in the order of their times; the same seed gives the same plan."""
    chance = random.Random(seed)  # noqa: S311 - arrivals, not secrets
    begin_s, found = 0.0, []
    for index, phase in enumerate(phases):
        found += [Arrival(begin_s + time_s, index) for time_s in times(phase, chance)]
        begin_s += phase.seconds
    return found


def boundaries(phases: tuple[Phase, ...]) -> list[float]:
    """Where each phase begins, and where the last one ends: seconds from the start of the plan."""
    return list(itertools.accumulate((phase.seconds for phase in phases), initial=0.0))


def times(phase: Phase, chance: random.Random) -> Iterator[float]:
    """Seconds from the phase's begin, rising, below `seconds`."""
    if not phase.calls:
        return iter(())
    made = {"constant": _constant, "bursts": _bursts}.get(phase.kind)
    return made(phase) if made else _poisson(phase, chance)


def _constant(phase: Phase) -> Iterator[float]:
    return (number / phase.rate for number in range(math.ceil(phase.calls - 1e-9)))


def _bursts(phase: Phase) -> Iterator[float]:
    bursts = math.ceil(phase.calls / phase.burst - 1e-9)
    return (number * phase.burst / phase.rate for number in range(bursts) for _ in range(phase.burst))


def _poisson(phase: Phase, chance: random.Random) -> Iterator[float]:
    """Unit-rate gaps, stretched: the time at which the expected number of calls reaches the sum of the gaps."""
    rise = (phase.to - phase.rate) / phase.seconds if phase.kind == "ramp" else 0.0
    expected = 0.0
    while True:
        expected += chance.expovariate(1.0)
        if expected >= phase.calls:
            return
        if abs(rise) < 1e-12:
            yield expected / phase.rate
        else:  # rate·t + rise·t²/2 = expected, in the form that does not cancel
            root = math.sqrt(max(0.0, phase.rate**2 + 2 * rise * expected))
            yield 2 * expected / (phase.rate + root)


def weighted(weights: dict[str, float], count: int, seed: int) -> list[str]:
    """`count` names, drawn by weight; the same seed gives the same names."""
    chance = random.Random(seed)  # noqa: S311 - arrivals, not secrets
    return chance.choices(list(weights), list(weights.values()), k=count)
