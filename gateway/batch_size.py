"""How large a batch should be that can't meet all of its deadlines. Part of the batcher's pure policy in the gateway.

A smaller batch goes first if the rest can still be met after it; else the size that answers most rows in time per
second. (Always saving the tightest would shrink batches until everybody is late.)
"""

from collections.abc import Callable
from typing import TypeAlias

from gateway.batch_queue import Queue, QueuedItem
from gateway.cost_model import QueueKey

Needs: TypeAlias = Callable[[QueueKey, int], float]
"""Seconds from the start of a batch of so many rows until its answers are surely with the callers."""

SHORTEST_S = 1e-9
LOOK_AHEAD = 4
"""So many full batches of the most urgent items are looked at."""


def best_size(queue: Queue, start_s: float, whole: int, needs_s: Needs) -> int:
    """The allowed size up to `whole` of a batch that can't meet all deadlines if it takes all."""
    limits = queue.limits
    whole_s = start_s + needs_s(queue.key, whole)
    urgent, next_s = queue.urgent(whole_s, LOOK_AHEAD * limits.max_rows)
    others = queue.rows - sum(item.rows for item in urgent)
    best, best_rate = whole, 0.0
    spared = False
    for size in reversed(limits.sizes):
        if size > whole:
            continue
        size_s = needs_s(queue.key, size)
        done_s = start_s + size_s
        if not spared and done_s <= urgent[0].deadline_s:
            spared = True
            if done_s + whole_s - start_s <= _tightest_left(urgent, next_s, size):
                return size
        in_time = sum(item.rows for item in urgent if done_s <= item.deadline_s)
        if done_s <= next_s:
            in_time += others
        rate = min(in_time, size) / max(size_s, SHORTEST_S)
        if rate > best_rate:
            best, best_rate = size, rate
    return best


def _tightest_left(urgent: list[QueuedItem], next_s: float, room: int) -> float:
    """The earliest deadline of those who don't get into a batch of `room` rows."""
    for item in urgent:
        room -= item.rows
        if room < 0:
            return item.deadline_s
    return next_s
