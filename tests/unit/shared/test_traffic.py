"""Every change of a model's traffic, one by one and in any order."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared import traffic
from shared.errors import Conflict, InvalidOption
from shared.traffic import MAX_HISTORY, Canary, Ramp, Traffic, Why

A, B, C = "a" * 16, "b" * 16, "c" * 16
WHY = Why("2026-11-30T12:00:00Z", "test")
AT_A = Traffic(current=A)
WITH_STANDBY = Traffic(current=B, standby=A)


def canary(version: str = B, percent: float = 5.0, **more: object) -> Canary:
    return msgspec.structs.replace(Canary(version=version, percent=percent), **more)


def ramp(*steps: float, step: int = 0, every_s: float = 60.0, next_at_s: float = 1000.0) -> Ramp:
    return Ramp(steps=list(steps), every_s=every_s, step=step, next_at_s=next_at_s)


def last(after: Traffic) -> dict[str, object]:
    return {key: value for key, value in after.history[-1].items() if key not in {"at", "by"}}


def test_the_first_version_has_nothing_to_go_back_to() -> None:
    after = traffic.switch(Traffic(current=""), A, WHY)
    assert after.without_history() == Traffic(current=A)
    assert after.history == [{"at": WHY.at, "action": "switch", "from": "", "to": A, "by": "test"}]
    with pytest.raises(Conflict, match="neither a canary nor an earlier version"):
        traffic.roll_back(after, WHY)


def test_a_switch_keeps_the_version_before_as_standby() -> None:
    after = traffic.switch(AT_A, B, WHY)
    assert after.without_history() == WITH_STANDBY
    assert after.wanted() == [B, A]
    assert traffic.switch(after, B, WHY) is after, "to what is current already changes nothing"


def test_back_and_forth() -> None:
    back = traffic.roll_back(WITH_STANDBY, WHY)
    assert back.without_history() == Traffic(current=A, standby=B)
    assert last(back) == {"action": "rollback", "from": B, "to": A}
    assert traffic.roll_back(back, WHY).without_history() == WITH_STANDBY


def test_a_canary_stands_beside_current_and_standby() -> None:
    after = traffic.start_canary(WITH_STANDBY, canary(C), WHY)
    assert after.without_history() == Traffic(current=B, standby=A, canary=canary(C))
    assert after.wanted() == [B, C, A]
    assert last(after) == {"action": "canary", "from": B, "to": C, "percent": 5.0}


def test_the_standby_as_canary_is_the_standby_again_afterwards() -> None:
    after = traffic.start_canary(WITH_STANDBY, canary(A), WHY)
    assert after.wanted() == [B, A]
    assert traffic.promote(after, WHY).without_history() == Traffic(current=A, standby=B)
    ended = traffic.roll_back(after, WHY, ends=A)
    assert ended.without_history() == WITH_STANDBY
    assert traffic.roll_back(ended, WHY, ends=B).current == A, "and can be gone back to"


def test_a_rollback_that_comes_twice_goes_back_once() -> None:
    back = traffic.roll_back(WITH_STANDBY, WHY, ends=B)
    assert back.current == A
    with pytest.raises(Conflict, match=f"version {B} is not in force any more; current is {A}"):
        traffic.roll_back(back, WHY, ends=B)


def test_a_rollback_ends_what_it_names_or_nothing() -> None:
    running = traffic.start_canary(WITH_STANDBY, canary(C), WHY)
    with pytest.raises(Conflict, match=f"version {B} is current, and a rollback ends the canary first, which is {C}"):
        traffic.roll_back(running, WHY, ends=B)
    with pytest.raises(Conflict, match=f"{A} is not in force any more; current is {B}, canary is {C}; nothing was"):
        traffic.roll_back(running, WHY, ends=A)
    ended = traffic.roll_back(running, WHY, ends=C)
    with pytest.raises(Conflict, match=f"{C} is not in force any more; current is {B}; nothing was changed"):
        traffic.roll_back(ended, WHY, ends=C)
    shadow = traffic.start_canary(AT_A, canary(shadow=True), WHY)
    with pytest.raises(Conflict, match=f"ends the shadow first, which is {B}"):
        traffic.roll_back(shadow, WHY, ends=A)


def test_the_standby_can_be_given_up() -> None:
    after = traffic.drop_standby(WITH_STANDBY, WHY)
    assert after.without_history() == Traffic(current=B)
    assert last(after) == {"action": "drop_standby", "from": A, "to": ""}
    assert traffic.drop_standby(after, WHY) is after
    beside = traffic.start_canary(WITH_STANDBY, canary(A), WHY)
    assert traffic.drop_standby(beside, WHY).canary == canary(A), "a canary is more than that"


@pytest.mark.parametrize(
    ("change", "action"),
    [
        ({"percent": 20.0}, "share"),
        ({"by": "request_id"}, "share"),
        ({"shadow": True}, "shadow"),
        ({"percent": 20.0, "shadow": True}, "shadow"),
    ],
)
def test_the_same_canary_again_changes_its_share(change: dict[str, object], action: str) -> None:
    before = traffic.start_canary(AT_A, canary(), WHY)
    assert traffic.start_canary(before, canary(), WHY) is before, "with the share that it has: nothing"
    after = traffic.start_canary(before, canary(**change), WHY)
    assert after.canary == canary(**change)
    assert last(after)["action"] == action


def test_a_shadow_becomes_a_canary() -> None:
    before = traffic.start_canary(AT_A, canary(shadow=True), WHY)
    assert last(before)["action"] == "shadow"
    assert last(traffic.start_canary(before, canary(), WHY))["action"] == "canary"


def test_one_canary_at_a_time_and_never_the_current_version() -> None:
    before = traffic.start_canary(AT_A, canary(), WHY)
    with pytest.raises(Conflict, match=f"{B} is the canary already"):
        traffic.start_canary(before, canary(C), WHY)
    with pytest.raises(Conflict, match="is the current one already"):
        traffic.start_canary(AT_A, canary(A), WHY)
    with pytest.raises(Conflict, match="no current version"):
        traffic.start_canary(Traffic(current=""), canary(), WHY)


def test_promote_and_roll_back_of_a_canary() -> None:
    before = traffic.start_canary(WITH_STANDBY, canary(C), WHY)
    promoted = traffic.promote(before, WHY)
    assert promoted.without_history() == Traffic(current=C, standby=B)
    assert last(promoted) == {"action": "promote", "from": B, "to": C}
    why = Why(WHY.at, "guard", "too many errors", {"errors": 7})
    back = traffic.roll_back(before, why)
    assert back.without_history() == WITH_STANDBY, "the standby stays"
    assert last(back) == {
        "action": "rollback",
        "from": C,
        "to": B,
        "reason": "too many errors",
        "figures": {"errors": 7},
    }
    with pytest.raises(Conflict, match="no canary to promote"):
        traffic.promote(back, WHY)


def test_all_traffic_to_the_current_version_ends_the_canary() -> None:
    before = traffic.start_canary(AT_A, canary(), WHY)
    after = traffic.switch(before, A, WHY)
    assert after.without_history() == AT_A
    assert last(after)["action"] == "rollback"


@pytest.mark.parametrize(("to", "action"), [(B, "promote"), (C, "switch")])
def test_a_switch_while_a_canary_runs_ends_it(to: str, action: str) -> None:
    after = traffic.switch(traffic.start_canary(AT_A, canary(), WHY), to, WHY)
    assert after.without_history() == Traffic(current=to, standby=A)
    assert last(after)["action"] == action


def test_a_ramp_goes_up_step_by_step_and_ends_as_current() -> None:
    before = traffic.start_canary(AT_A, canary(ramp=ramp(5, 25, 50, 100)), WHY)
    assert traffic.next_step(before, 999.9, WHY) is before
    shares = []
    now_s = 1000.0
    while before.canary is not None:
        shares.append(before.canary.percent)
        before = traffic.next_step(before, now_s, WHY)
        assert traffic.next_step(before, now_s + 59.9, WHY) is before, "each step lasts its time, even a late one"
        now_s += 60.0
    assert shares == [5, 25, 50]
    assert before.without_history() == Traffic(current=B, standby=A)
    assert [change["action"] for change in before.history] == ["canary", "ramp", "ramp", "promote"]


def test_a_ramp_that_ends_below_100_stays_there() -> None:
    before = traffic.start_canary(AT_A, canary(ramp=ramp(5, 20)), WHY)
    after = traffic.next_step(before, 1000.0, WHY)
    assert after.canary == canary(percent=20)
    assert traffic.next_step(after, 1e9, WHY) is after


def test_a_shadows_ramp_never_answers() -> None:
    before = traffic.start_canary(AT_A, canary(shadow=True, ramp=ramp(5, 100)), WHY)
    after = traffic.next_step(before, 1000.0, WHY)
    assert (after.current, after.canary) == (A, canary(percent=100, shadow=True))


def test_a_ramp_of_one_step_is_a_share() -> None:
    after = traffic.start_canary(AT_A, canary(ramp=ramp(5)), WHY)
    assert after.canary == canary()
    assert traffic.next_step(after, 1e9, WHY) is after, "or its history would tell of a step that changed nothing"


@pytest.mark.parametrize("percent", [0, -1, 100.1, math.nan, math.inf])
def test_a_bad_share_is_refused(percent: float) -> None:
    with pytest.raises(InvalidOption, match=r"percent is .*above 0 and at most 100"):
        traffic.start_canary(AT_A, canary(percent=percent), WHY)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (ramp(), "1 to 100 steps"),
        (ramp(5, *range(6, 106)), "1 to 100 steps"),
        (ramp(5, 101), "at most 100"),
        (ramp(5, math.nan), "at most 100"),
        (ramp(5, 5), "must rise"),
        (ramp(5, 50, 20), "must rise"),
        (ramp(5, 50, every_s=0.5), "every is 0.5 s"),
        (ramp(5, 50, every_s=math.nan), "every is nan s"),
        (ramp(5, 50, every_s=1e9), "30 days"),
        (ramp(5, 50, step=2), "present step"),
        (ramp(5, 50, step=-1), "present step"),
        (ramp(5, 50, step=1), "present step"),
        (ramp(10, 50), "present step"),
    ],
)
def test_a_bad_ramp_is_refused(bad: Ramp, words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        traffic.start_canary(AT_A, canary(ramp=bad), WHY)


def test_the_history_keeps_the_latest_changes() -> None:
    after = AT_A
    for number in range(MAX_HISTORY + 5):
        after = traffic.switch(after, B if after.current == A else A, Why(str(number), "test"))
    assert len(after.history) == MAX_HISTORY
    assert [change["at"] for change in (after.history[0], after.history[-1])] == ["5", str(MAX_HISTORY + 4)]


@given(
    st.builds(
        Traffic,
        current=st.sampled_from(["", A]),
        standby=st.sampled_from(["", B]),
        canary=st.none() | st.just(canary(C, ramp=ramp(5, 50))),
        history=st.just([{"at": "x", "figures": {"p99_ms": 1.5}}]),
    )
)
def test_what_is_written_is_read_again(before: Traffic) -> None:
    assert msgspec.json.decode(msgspec.json.encode(before), type=Traffic) == before


class AnyOrder(RuleBasedStateMachine):
    """Whatever is ordered in whatever order: who answers is always one version, and every change is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.now = Traffic(current="")
        self.clock_s = 0.0

    def _becomes(self, after: Traffic) -> None:
        same = after.without_history() == self.now.without_history()
        assert (len(after.history) == len(self.now.history)) == same, "a change is noted, and nothing else"
        assert len(after.history) <= len(self.now.history) + 1
        self.now = after

    @rule(version=st.sampled_from([A, B, C]))
    def switch(self, version: str) -> None:
        self._becomes(traffic.switch(self.now, version, WHY))
        assert (self.now.current, self.now.canary) == (version, None)

    @rule(version=st.sampled_from([A, B, C]), percent=st.sampled_from([5.0, 50.0, 100.0]), shadow=st.booleans())
    def share(self, version: str, percent: float, shadow: bool) -> None:
        self._start(canary(version, percent, shadow=shadow))

    @rule(version=st.sampled_from([A, B, C]), steps=st.sampled_from([[5.0], [5.0, 100.0], [5.0, 50.0]]))
    def grow(self, version: str, steps: list[float]) -> None:
        self._start(canary(version, steps[0], ramp=ramp(*steps, next_at_s=self.clock_s + 60)))

    def _start(self, wanted: Canary) -> None:
        running = self.now.canary
        allowed = self.now.current not in {"", wanted.version} and (
            running is None or running.version == wanted.version
        )
        if allowed:
            self._becomes(traffic.start_canary(self.now, wanted, WHY))
            assert self.now.canary is not None
            assert self.now.canary.percent == wanted.percent
        else:
            with pytest.raises(Conflict):
                traffic.start_canary(self.now, wanted, WHY)

    @rule()
    def promote(self) -> None:
        running, before = self.now.canary, self.now.current
        if running is None:
            with pytest.raises(Conflict):
                traffic.promote(self.now, WHY)
            return
        self._becomes(traffic.promote(self.now, WHY))
        assert (self.now.current, self.now.standby) == (running.version, before)

    @rule()
    def roll_back(self) -> None:
        if self.now.canary is None and not self.now.standby:
            with pytest.raises(Conflict):
                traffic.roll_back(self.now, WHY)
            return
        had_canary, answers = self.now.canary is not None, self.now.current
        self._becomes(traffic.roll_back(self.now, WHY))
        assert (self.now.current == answers) == had_canary

    @rule(version=st.sampled_from([A, B, C]))
    def end(self, version: str) -> None:
        before = self.now
        if version != before.ending or (before.canary is None and not before.standby):
            with pytest.raises(Conflict):
                traffic.roll_back(before, WHY, ends=version)
            return
        self._becomes(traffic.roll_back(before, WHY, ends=version))
        assert version != self.now.ending, "so that the same order again is refused"

    @rule()
    def drop_standby(self) -> None:
        self._becomes(traffic.drop_standby(self.now, WHY))
        assert not self.now.standby

    @rule(passed_s=st.sampled_from([1.0, 30.0, 1000.0]))
    def time_passes(self, passed_s: float) -> None:
        self.clock_s += passed_s
        before = self.now.canary
        after = traffic.next_step(self.now, self.clock_s, WHY)
        if after is not self.now:
            assert before is not None
            assert after.canary is None or after.canary.percent > before.percent
        self._becomes(after)

    @invariant()
    def the_versions_differ(self) -> None:
        roles = [self.now.current, self.now.canary.version if self.now.canary else "", self.now.standby]
        assert self.now.current not in roles[1:] or not self.now.current
        assert self.now.wanted() == list(dict.fromkeys(version for version in roles if version))
        if self.now.canary is not None:
            traffic.check(self.now.canary)
            assert self.now.current


TestAnyOrder = AnyOrder.TestCase
