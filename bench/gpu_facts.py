"""The arithmetic of `make bench-gpu`: from when the device did what to shares, rates and agreement. No torch."""

from collections.abc import Sequence
from typing import NamedTuple

from bench.records import percentile


class Passed(NamedTuple):
    """One pass, in seconds on one clock."""

    asked_s: float
    """By the host's clock, as `answered_s`."""
    answered_s: float
    copy: tuple[float, float]
    """First and last moment, by the device's clock from the first pass on."""
    run: tuple[float, float]


def idle_share(passes: Sequence[Passed]) -> float:
    """Of the time from the first to the last result, the share in which nothing was computed."""
    whole = passes[-1].run[1] - passes[0].run[0]
    busy = sum(last - first for first, last in (each.run for each in passes))
    return max(0.0, 1.0 - busy / whole) if whole > 0 else 0.0


def overlap_share(passes: Sequence[Passed]) -> float:
    """Of the time that copies took, the share in which another pass was computed. The first one has none beside it."""
    later = passes[1:]
    copied = sum(each.copy[1] - each.copy[0] for each in later)
    beside = sum(_common(each.copy, other.run) for each in later for other in passes if other is not each)
    return min(1.0, beside / copied) if copied > 0 else 0.0


def _common(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def per_s(passes: Sequence[Passed], rows: int) -> float:
    """Rows per second, from the first question to the last answer."""
    return len(passes) * rows / (passes[-1].answered_s - passes[0].asked_s)


def p99_ms(passes: Sequence[Passed]) -> float:
    """From question to answer."""
    return percentile(sorted(each.answered_s - each.asked_s for each in passes), 0.99) * 1e3


def agreement(one: Sequence[int], other: Sequence[int]) -> float:
    """The share of images for which two runs find the same class the likeliest."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def busy_share(before_ns: float, after_ns: float, window_s: float) -> float:
    """From the compute time of all batches at both ends of a window: the share in which something was computed."""
    return min(1.0, (after_ns - before_ns) / 1e9 / window_s)
