"""traffic.json: which version of a model answers whom, and every change of that. Pure; gateway and command line use it.

`current` answers, except for the share of callers that the `canary` has. A *shadow* is a canary that gets copies of
that share and never answers. `standby` was current before and stays loaded, so that going back takes no load.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from shared.errors import Conflict, InvalidOption

By: TypeAlias = Literal["routing_key", "request_id"]
"""What of a request decides which version it goes to; a request without a routing key goes by its id."""
Action: TypeAlias = Literal["switch", "canary", "shadow", "share", "ramp", "promote", "rollback", "drop_standby"]

MAX_HISTORY = 1000
"""Changes kept; older ones are dropped so that the file stays readable."""
MAX_STEPS = 100
MIN_STEP_S = 1.0


class Ramp(msgspec.Struct, frozen=True, kw_only=True):
    """A share that grows by itself for as long as nothing speaks against the canary."""

    steps: list[float]
    """Percent, rising; reaching 100 makes the canary the current version."""
    every_s: float
    step: int = 0
    """The present one."""
    next_at_s: float = 0.0
    """When the next one is due: seconds since 1970, since it must outlive the process."""


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """A version beside the current one."""

    version: str
    percent: float
    """Of the callers (0 to 100): it answers them, or as a shadow gets copies of what they ask."""
    by: By = "routing_key"
    shadow: bool = False
    ramp: Ramp | None = None


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """traffic.json."""

    current: str
    standby: str = ""
    """Also while it is the canary: when that ends, it is there to go back to, as before."""
    canary: Canary | None = None
    history: list[dict[str, Any]] = []
    """Every change, oldest first: at, action, from, to, by; a share's percent; a rollback's reason and figures."""

    def wanted(self) -> list[str]:
        """The versions that are to be loaded, the current one first."""
        return [version for version in dict.fromkeys((*self.answering(), self.standby)) if version]

    def answering(self) -> list[str]:
        """Those without which it can't be served: the current one and the canary, if there is one."""
        return [self.current, *([self.canary.version] if self.canary is not None else [])]

    @property
    def ending(self) -> str:
        """The version that a rollback ends."""
        return self.canary.version if self.canary is not None else self.current

    def without_history(self) -> "Traffic":
        """What says who answers whom."""
        return msgspec.structs.replace(self, history=[])


class Why(NamedTuple):
    """Who changes something, and what for: goes into the history."""

    at: str
    """UTC, ISO 8601."""
    by: str
    reason: str = ""
    figures: Mapping[str, Any] | None = None


def switch(before: Traffic, version: str, why: Why) -> Traffic:
    """All traffic to this version at once; the one before becomes the standby. Nothing changes if it is current."""
    if version == before.current:
        return before if before.canary is None else roll_back(before, why)
    action: Action = "promote" if before.canary is not None and before.canary.version == version else "switch"
    after = msgspec.structs.replace(before, current=version, standby=before.current, canary=None)
    return _noted(after, action, before.current, version, why)


def start_canary(before: Traffic, canary: Canary, why: Why) -> Traffic:
    """Give a version a share, or change the share that it has; nothing changes if it has just that.

    A ramp of one step is none. Raises Conflict, InvalidOption.
    """
    check(canary)
    if canary.ramp is not None and canary.ramp.step == len(canary.ramp.steps) - 1 and canary.percent < 100:
        canary = msgspec.structs.replace(canary, ramp=None)
    if canary.version == before.current:
        raise Conflict(f"version {canary.version} is the current one already")
    if not before.current:
        raise Conflict("the model has no current version that a canary could stand beside")
    running = before.canary
    if running == canary:
        return before
    if running is not None and running.version != canary.version:
        raise Conflict(f"version {running.version} is the canary already: promote it or roll it back first")
    again = running is not None and running.shadow == canary.shadow
    action: Action = "share" if again else "shadow" if canary.shadow else "canary"
    after = msgspec.structs.replace(before, canary=canary)
    return _noted(after, action, before.current, canary.version, why, percent=canary.percent)


def promote(before: Traffic, why: Why) -> Traffic:
    """The canary becomes the current version. Raises Conflict when there is none."""
    if before.canary is None:
        raise Conflict("there is no canary to promote")
    return switch(before, before.canary.version, why)


def roll_back(before: Traffic, why: Why, ends: str = "") -> Traffic:
    """Take the canary's share away; without one, the standby is current again.

    `ends`: the version that this is to end: the canary, or without one the current version; empty: whichever it is.
    The same order twice, or one that comes late, so ends nothing else. Raises Conflict, also when there is nothing to
    go back to.
    """
    running = before.canary
    if ends and ends != before.ending:
        raise Conflict(f"{_not_ended(before, ends)}; nothing was changed")
    if running is not None:
        after = msgspec.structs.replace(before, canary=None)
        return _noted(after, "rollback", running.version, before.current, why)
    if not before.standby:
        raise Conflict("there is neither a canary nor an earlier version to go back to")
    after = msgspec.structs.replace(before, current=before.standby, standby=before.current)
    return _noted(after, "rollback", before.current, after.current, why)


def unnamed_ending(before: Traffic) -> str:
    """What a rollback that names no version ends.

    Raises Conflict right after another rollback: whoever did not know of that one would bring back what it has ended.
    """
    last = before.history[-1] if before.history else {}
    if before.canary is None and before.standby and last.get("action") == "rollback":
        raise Conflict(
            f"the last change was a rollback already ({last.get('at', '')} by {last.get('by', '')}): {before.current} "
            f"answers all callers; to end that one, too, name it (--ends {before.current}), "
            "or name the one that is to answer (--to HASH)"
        )
    return before.ending


def _not_ended(before: Traffic, ends: str) -> str:
    """Why a rollback does not end this version."""
    running, kind = before.canary, ""
    if running is not None:
        kind = "shadow" if running.shadow else "canary"
        if ends == before.current:
            return f"version {ends} is current, and a rollback ends the {kind} first, which is {running.version}"
    also = f", {kind} is {running.version}" if running is not None else ""
    return f"version {ends[:100]} is not in force any more; current is {before.current or 'none'}{also}"


def drop_standby(before: Traffic, why: Why) -> Traffic:
    """Give up the version to go back to, so that its memory and its files are free; nothing changes without one."""
    if not before.standby:
        return before
    return _noted(msgspec.structs.replace(before, standby=""), "drop_standby", before.standby, "", why)


def next_step(before: Traffic, now_s: float, why: Why) -> Traffic:
    """A ramp's next share when it is due at `now_s` (seconds since 1970), or nothing. A step of 100 % promotes."""
    canary = before.canary
    if canary is None or canary.ramp is None or now_s < canary.ramp.next_at_s:
        return before
    ramp = canary.ramp
    percent = ramp.steps[min(ramp.step + 1, len(ramp.steps) - 1)]
    if percent >= 100 and not canary.shadow:
        return promote(before, why)
    if ramp.step + 1 >= len(ramp.steps) - 1:
        after = msgspec.structs.replace(canary, percent=percent, ramp=None)
    else:
        grown = msgspec.structs.replace(ramp, step=ramp.step + 1, next_at_s=now_s + ramp.every_s)
        after = msgspec.structs.replace(canary, percent=percent, ramp=grown)
    changed = msgspec.structs.replace(before, canary=after)
    return _noted(changed, "ramp", before.current, canary.version, why, percent=percent)


def check(canary: Canary) -> None:
    """Raises InvalidOption, naming the option."""
    if not 0 < canary.percent <= 100:  # also refuses NaN
        raise InvalidOption(f"percent is {canary.percent:g}: must be above 0 and at most 100")
    ramp = canary.ramp
    if ramp is None:
        return
    if not 1 <= len(ramp.steps) <= MAX_STEPS or not all(0 < step <= 100 for step in ramp.steps):
        raise InvalidOption(f"percent must be 1 to {MAX_STEPS} steps, each above 0 and at most 100")
    if any(later <= earlier for earlier, later in zip(ramp.steps, ramp.steps[1:], strict=False)):
        raise InvalidOption("the steps of percent must rise")
    if not 0 <= ramp.step < len(ramp.steps) or ramp.steps[ramp.step] != canary.percent:
        raise InvalidOption("percent must be the ramp's present step")
    if not MIN_STEP_S <= ramp.every_s <= 30 * 86400:
        raise InvalidOption(f"every is {ramp.every_s:g} s: must be {MIN_STEP_S:g} s to 30 days")


def _noted(after: Traffic, action: Action, left: str, came: str, why: Why, *, percent: float | None = None) -> Traffic:
    entry: dict[str, Any] = {"at": why.at, "action": action, "from": left, "to": came, "by": why.by}
    if percent is not None:
        entry["percent"] = percent
    if why.reason:
        entry["reason"] = why.reason
    if why.figures:
        entry["figures"] = dict(why.figures)
    return msgspec.structs.replace(after, history=[*after.history, entry][-MAX_HISTORY:])
