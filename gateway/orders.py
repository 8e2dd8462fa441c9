"""What an admin, or the guard, wants of a model's traffic. Data, so that it can go to another gateway. Pure."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from gateway.figures import VersionFigures
from shared import traffic
from shared.errors import Conflict
from shared.traffic import Canary, Traffic, Why


class Switch(msgspec.Struct, frozen=True, tag="switch"):
    """All traffic to this version at once."""

    version: str


class StartCanary(msgspec.Struct, frozen=True, tag="canary"):
    """Give a version a share, or copies of one as a shadow; again, to change the share."""

    canary: Canary


class Promote(msgspec.Struct, frozen=True, tag="promote"):
    """The canary becomes current."""


class RollBack(msgspec.Struct, frozen=True, tag="rollback"):
    """End the canary; without one, the version that was current before is current again."""

    reason: str = ""
    figures: dict[str, Any] = {}
    ends: str = ""
    """The version that is to end: the canary, or without one the current version. Empty, in orders of old: either."""


class DropStandby(msgspec.Struct, frozen=True, tag="drop_standby"):
    """Give up the version to go back to."""


class NextStep(msgspec.Struct, frozen=True, tag="step"):
    """A ramp's next share, if it is due."""

    now_s: float
    """Seconds since 1970."""


class Standing(NamedTuple):
    """How a model's traffic stands."""

    traffic: Traffic
    """In force."""
    coming: Traffic | None = None
    """What the files say, while that is not in force: it is being loaded, or was refused."""
    refused: str = ""
    """Why it was refused."""
    unwritten: str = ""
    """Why what is in force is not in traffic.json yet."""


GUARD = "guard"
"""By whom the guard orders: its verdict is about one canary, and means nothing once that one has ended."""

Order: TypeAlias = Switch | StartCanary | Promote | RollBack | DropStandby | NextStep


def applied(before: Traffic, order: Order, at: str, by: str, doubt: str = "") -> Traffic:
    """What becomes of the traffic; `by`: who ordered it. Raises Conflict, InvalidOption.

    `doubt`: what speaks against the version that gets callers by it, for the history.
    """
    why = Why(at, by, doubt)
    match order:
        case Switch(version=version):
            return traffic.switch(before, version, why)
        case StartCanary(canary=canary):
            return traffic.start_canary(before, canary, why)
        case Promote():
            return traffic.promote(before, why)
        case NextStep(now_s=now_s):
            return traffic.next_step(before, now_s, why)
        case DropStandby():
            return traffic.drop_standby(before, Why(at, by))
    return _rolled_back(before, order, Why(at, by, order.reason, order.figures))


def _rolled_back(before: Traffic, order: RollBack, why: Why) -> Traffic:
    """Whoever is no guard is told when nothing is there that the order could end."""
    running = before.canary
    if why.by == GUARD and (running is None or running.version != order.ends):
        return before
    return traffic.roll_back(before, why, order.ends)


def check_known(name: str, before: Traffic, figures: Sequence[VersionFigures]) -> None:
    """Whether anything is known of a shadow that is to be promoted. Raises Conflict."""
    canary = before.canary
    if canary is not None and canary.shadow and not any(e.compared for e in figures if e.version == canary.version):
        raise Conflict(
            f"shadow {canary.version} has answered no copy of a request yet, so nothing is known of it: wait until "
            f"`headrace traffic {name}` shows some as compared, or give it all callers all the same by --to "
            f"{canary.version}"
        )


def told(traffic: Traffic) -> dict[str, object]:
    """Who answers whom, for the log."""
    canary = traffic.canary
    words: dict[str, object] = {"current": traffic.current, "standby": traffic.standby}
    if canary is not None:
        words |= {"shadow" if canary.shadow else "canary": canary.version, "percent": canary.percent}
    return words
