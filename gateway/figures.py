"""What is known of one version since its canary started: counts, and latency within 12 %. Pure."""

import math
from collections.abc import Iterable
from itertools import accumulate

import msgspec

from gateway.state import Role

_FIRST_S = 1e-4
"""Upper end of the first bucket: below it no two latencies are told apart."""
_PER_DECADE = 20
"""Buckets; each is 12 % wider than the one before."""
_LAST_S = 1e3
"""No deadline is later; what is longer counts as this."""
_BUCKETS = 7 * _PER_DECADE + 1
"""From the first to the last."""


class VersionFigures(msgspec.Struct, kw_only=True):
    """One version's figures, as admins see them."""

    version: str
    role: Role
    requests: int = 0
    """Answered, or failed by the server's or the model's fault; mistakes of callers are not in it."""
    errors: int = 0
    nonfinite: int = 0
    """Answers that hold NaN or infinity, or were refused for it."""
    slow: int = 0
    """Of `batches`: those that took longer than `guard.slow_factor` times what the current version needs."""
    compared: int = 0
    """Copies whose answer was held against the current version's."""
    disagreed: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    batches: int = 0
    """Those with a known cost to be held against."""


class Latencies:
    """Quantiles in bounded memory: counts in buckets that grow by a constant factor."""

    __slots__ = ("_counts", "total")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self.total = 0

    def observe(self, seconds: float) -> None:
        """One more; what is no number, or below 0, counts as 0."""
        place = math.ceil(math.log10(min(seconds, _LAST_S) / _FIRST_S) * _PER_DECADE) if seconds > _FIRST_S else 0
        self._counts[place] += 1
        self.total += 1

    def quantile_ms(self, share: float) -> float:
        """Milliseconds that `share` (0 to 1) of them did not exceed, to within a bucket; 0 when there were none."""
        wanted = math.ceil(share * self.total)
        if wanted <= 0:
            return 0.0
        place = next(place for place, so_far in enumerate(accumulate(self._counts)) if so_far >= wanted)
        # The middle of the bucket; rounded, since more digits would promise what is not known.
        return float(f"{_FIRST_S * 1e3 * 10 ** ((place - 0.5) / _PER_DECADE):.3g}")


def merged(parts: Iterable[list[VersionFigures]]) -> list[VersionFigures]:
    """The figures of several gateways as one list: counts add up; p50 is their mean by requests, p99 the worst."""
    found: dict[str, VersionFigures] = {}
    for figures in (one for part in parts for one in part):
        total = found.get(figures.version)
        if total is None:
            found[figures.version] = msgspec.structs.replace(figures)
            continue
        both = total.requests + figures.requests
        if both:
            weighted = total.p50_ms * total.requests + figures.p50_ms * figures.requests
            total.p50_ms = float(f"{weighted / both:.3g}")
        total.p99_ms = max(total.p99_ms, figures.p99_ms)
        for name in ("requests", "errors", "nonfinite", "slow", "compared", "disagreed", "batches"):
            setattr(total, name, getattr(total, name) + getattr(figures, name))
    return list(found.values())
