import msgspec
import pytest

from gateway.orders import (
    GUARD,
    DropStandby,
    NextStep,
    Order,
    Promote,
    RollBack,
    StartCanary,
    Switch,
    applied,
    told,
)
from shared.errors import Conflict
from shared.repository_writer import role_of
from shared.traffic import Canary, Ramp, Traffic

OLD, NEW, OTHER = "a" * 16, "b" * 16, "c" * 16
AT = "2026-01-01T00:00:00Z"

PLAIN = Traffic(current=OLD)
RUNNING = Traffic(current=OLD, standby=OTHER, canary=Canary(version=NEW, percent=5.0))


def after(before: Traffic, order: Order, by: str = "somebody") -> Traffic:
    return applied(before, order, AT, by)


def test_each_order_is_its_change_of_traffic_noted_with_who_and_when() -> None:
    ramp = Ramp(steps=[5.0, 50.0], every_s=60.0, next_at_s=100.0)
    ramping = Traffic(current=OLD, canary=Canary(version=NEW, percent=5.0, ramp=ramp))
    for before, order, action in (
        (PLAIN, Switch(NEW), "switch"),
        (PLAIN, StartCanary(Canary(version=NEW, percent=5.0)), "canary"),
        (PLAIN, StartCanary(Canary(version=NEW, percent=5.0, shadow=True)), "shadow"),
        (RUNNING, Promote(), "promote"),
        (RUNNING, RollBack(), "rollback"),
        (RUNNING, RollBack(ends=NEW), "rollback"),
        (RUNNING, DropStandby(), "drop_standby"),
        (ramping, NextStep(100.0), "ramp"),
    ):
        (entry,) = after(before, order).history
        assert (entry["action"], entry["by"], entry["at"]) == (action, "somebody", AT)
    assert after(ramping, NextStep(99.0)) is ramping


def test_a_rollback_keeps_its_reason_and_figures() -> None:
    (entry,) = after(RUNNING, RollBack("errors", {"canary_rate": 1.0})).history
    assert (entry["reason"], entry["figures"]) == ("errors", {"canary_rate": 1.0})


@pytest.mark.parametrize("before", [PLAIN, RUNNING, Traffic(current=NEW, standby=OLD)])
def test_the_guards_rollback_ends_no_other_canary_and_never_goes_back_to_the_standby(before: Traffic) -> None:
    assert after(before, RollBack("late", {}, OTHER), GUARD) is before
    ended = after(before, RollBack("in time", {}, NEW), GUARD)
    assert (ended.current, ended.canary) == (before.current, None)


def test_a_persons_rollback_of_what_has_ended_by_itself_is_refused() -> None:
    ended = after(RUNNING, RollBack("errors", {}, NEW), GUARD)
    with pytest.raises(Conflict, match=f"version {NEW} is not in force any more; current is {OLD}"):
        after(ended, RollBack("it looks bad", {}, NEW))


def test_what_is_not_there_can_not_be_ordered() -> None:
    for order in (Promote(), RollBack()):
        with pytest.raises(Conflict):
            after(PLAIN, order)


@pytest.mark.parametrize(
    "order",
    [
        Switch(NEW),
        StartCanary(Canary(version=NEW, percent=5.0, ramp=Ramp(steps=[5.0, 50.0], every_s=60.0))),
        Promote(),
        DropStandby(),
        RollBack("errors", {"measure": "error rate", "canary_rate": 0.5}, NEW),
        NextStep(12.5),
    ],
)
def test_an_order_goes_to_another_gateway_as_it_is(order: Order) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=Order) == order


def test_roles_and_the_words_for_the_log() -> None:
    assert [role_of(RUNNING, version) for version in RUNNING.wanted()] == ["current", "canary", "standby"]
    assert told(PLAIN) == {"current": OLD, "standby": ""}
    assert told(RUNNING) == {"current": OLD, "standby": OTHER, "canary": NEW, "percent": 5.0}
    shadowed = Traffic(current=OLD, canary=Canary(version=NEW, percent=5.0, shadow=True))
    assert (role_of(shadowed, NEW), told(shadowed)["shadow"]) == ("shadow", NEW)
