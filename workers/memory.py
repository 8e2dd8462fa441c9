"""Who has to go when another version needs the memory. Pure policy: no clock, no thread, no device.

Versions in use, pinned ones and those that have just come never go; of the others, those that have been idle longest.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from workers.loaded import Key

GRACE_S = 5.0
"""A version that was loaded for a request stays until it has run its first batch, or for so long: where several push
each other out, each one still gets its work done. A gateway sends the first batch milliseconds after the load."""
SETTLE_S = 0.5
"""So long it stays after that first batch, which is the gateway's own proof: the requests that wait for it follow at
once. Without this, versions that several callers want push each other out without an answer in between."""
PATIENCE_S = 5.0
"""How long a load waits for the others to fall idle by themselves. After that those that would go next get no new
batches: under steady load a version is never idle, and who asked for the new one would wait for ever."""
_MB = 1e6


class Held(NamedTuple):
    """A loaded version, as far as its memory is concerned."""

    key: Key
    nbytes: int
    """As measured."""
    last_s: float
    """When it ran last."""
    pinned: bool = False
    busy: bool = False
    """A batch of it waits or is under way."""
    kept_until_s: float = float("-inf")
    """It has come so lately that it stays until then."""


class Room(NamedTuple):
    """What is to be done before a version can be loaded."""

    evict: Sequence[Key] = ()
    """Then it fits."""
    wait: bool = False
    """It can't be loaded now, and can later."""
    until_s: float | None = None
    """When to look again, if nothing happens before."""
    refusal: str = ""
    """It will never fit, or not beside those that may not be given up; why, in one sentence for the log."""
    told: str = ""
    """The same for callers, whom the other models' names and sizes are no business of."""


def kept_until_s(since_s: float, batches: int, last_s: float) -> float:
    """Until when a version stays that was loaded at `since_s` and has run so many batches, the last one at `last_s`."""
    if not batches:
        return since_s + GRACE_S
    return last_s + SETTLE_S if batches == 1 else float("-inf")


def room_for(key: Key, nbytes: int, held: Collection[Held], budget_bytes: int, now_s: float) -> Room:
    """How `nbytes` more can be had within the budget, beside what is loaded."""
    pinned = [each for each in held if each.pinned and each.key != key]
    if nbytes > budget_bytes - sum(each.nbytes for each in pinned):
        return _refused(key, nbytes, pinned, budget_bytes)
    missing = nbytes + sum(each.nbytes for each in held) - budget_bytes
    if missing <= 0:
        return Room()
    idle = [each for each in held if not each.pinned and not each.busy]
    found = _longest_idle([each for each in idle if each.kept_until_s <= now_s], missing)
    if found is not None:
        return Room(evict=found)
    ends = [each.kept_until_s for each in idle if each.kept_until_s > now_s]
    return Room(wait=True, until_s=min(ends, default=None))


def next_to_go(nbytes: int, held: Collection[Held], budget_bytes: int, now_s: float) -> Sequence[Key]:
    """Which versions should get no new batches, busy as they are, so that there will be room for `nbytes` more."""
    missing = nbytes + sum(each.nbytes for each in held) - budget_bytes
    movable = [each for each in held if not each.pinned and each.kept_until_s <= now_s]
    return _longest_idle(movable, missing) or ()


def _longest_idle(movable: Sequence[Held], missing: int) -> list[Key] | None:
    """The least recently used ones that make up for `missing` together, none without need; None: all are too few."""
    chosen: list[Held] = []
    for each in sorted(movable, key=lambda each: each.last_s):
        if sum(one.nbytes for one in chosen) >= missing:
            break
        if each.nbytes:  # what holds nothing would go for nothing
            chosen.append(each)
    spare = sum(each.nbytes for each in chosen) - missing
    if spare < 0:
        return None
    for each in reversed(chosen):  # a large one that came last may make smaller ones before it needless
        if each.nbytes <= spare:
            chosen.remove(each)
            spare -= each.nbytes
    return [each.key for each in chosen]


def _refused(key: Key, nbytes: int, pinned: Sequence[Held], budget_bytes: int) -> Room:
    alone = f"model {key.name} needs {megabytes(nbytes)}, and worker.memory_budget_bytes is {megabytes(budget_bytes)}"
    if nbytes > budget_bytes:
        return Room(refusal=f"{alone}: raise it", told=f"{alone}: raise it")
    names = ", ".join(f"{each.key.name} ({megabytes(each.nbytes)})" for each in pinned[:8])
    more = f" and {len(pinned) - 8} more" if len(pinned) > 8 else ""
    return Room(
        refusal=f"{alone}, of which {names}{more} may not be given up: raise it, "
        "or set `load: on_demand` in their model.yaml",
        told=f"there is no room for model {key.name} now (worker.memory_budget_bytes; the log has the details)",
    )


def megabytes(nbytes: int) -> str:
    """For people."""
    return f"{nbytes / _MB:.1f} MB" if nbytes < 100 * _MB else f"{nbytes / _MB:.0f} MB"
