"""Who goes to the canary: the share, stickiness, and that a growing share moves nobody back."""

import math
import subprocess
import sys
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.split import Split, point
from gateway.state import ModelState, Phase

MANY = 100_000


class Version(NamedTuple):
    name: str
    version: str
    state: ModelState


def version(digits: str, phase: Phase = "ready") -> Version:
    return Version("photos", digits * 16, ModelState("photos", digits * 16, phase))


OLD, NEW = version("a"), version("b")
KEYS = st.text(max_size=40)
PERCENTS = st.floats(min_value=0, max_value=100)


def split(percent: float, canary: Version | None = NEW, *, shadow: bool = False) -> Split[Version]:
    return Split(OLD, canary, percent, shadow=shadow)


@pytest.mark.parametrize("percent", [0.1, 1.0, 5.0, 25.0, 50.0, 99.0])
def test_the_share_is_within_binomial_bounds(percent: float) -> None:
    divided = split(percent)
    got = sum(divided.answers(f"user-{number}") is NEW for number in range(MANY))
    p = percent / 100
    assert abs(got - MANY * p) < 4 * math.sqrt(MANY * p * (1 - p))


@given(KEYS, PERCENTS)
def test_a_key_always_goes_to_the_same_version(key: str, percent: float) -> None:
    assert split(percent).answers(key) is split(percent).answers(key)
    assert 0 <= point("photos", NEW.version, key) < 1


@given(KEYS, PERCENTS, PERCENTS)
@settings(max_examples=300)
def test_a_growing_share_moves_keys_to_the_canary_only(key: str, one: float, other: float) -> None:
    before, after = split(min(one, other)).answers(key), split(max(one, other)).answers(key)
    assert (before, after) != (NEW, OLD)


@given(KEYS)
def test_nobody_at_0_everybody_at_100(key: str) -> None:
    assert split(0).answers(key) is OLD
    assert split(100).answers(key) is NEW
    assert split(100, None).answers(key) is OLD


def test_other_canaries_and_other_models_are_tried_by_other_users() -> None:
    keys = [f"user-{number}" for number in range(10_000)]
    first = {key for key in keys if point("photos", NEW.version, key) < 0.05}
    for model, canary in (("photos", "c" * 16), ("texts", NEW.version)):
        other = {key for key in keys if point(model, canary, key) < 0.05}
        assert len(first & other) < 0.15 * len(first)  # chance alone makes it 5 %


def test_parts_do_not_run_into_each_other() -> None:
    assert point("ab", "c", "d") != point("a", "bc", "d")
    assert point("a", "bc", "d") != point("a", "b", "cd")


def test_any_key_has_a_point() -> None:
    for key in ("", "\ud800", "\0", "x" * 100_000):
        assert 0 <= point("photos", NEW.version, key) < 1


def test_the_point_is_the_same_in_every_process_and_release() -> None:
    code = "from gateway.split import point; print(point('photos', 'b' * 16, 'user-1'))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(told) == point("photos", "b" * 16, "user-1") == pytest.approx(EXPECTED, abs=0)


EXPECTED = 0.6654156440512327
"""Written down: another function would move users when the server is updated."""


@pytest.mark.parametrize("phase", ["no_worker", "loading", "proving", "failed", "unloaded"])
def test_while_the_canary_can_not_answer_the_current_version_does(phase: Phase) -> None:
    assert split(100, version("b", phase)).answers("anyone") is OLD
    assert split(100, version("b", phase), shadow=True).copies("anyone") is None


def test_a_canary_that_loads_when_it_is_asked_is_asked() -> None:
    sleeping = version("b", "on_demand")
    assert split(100, sleeping).answers("anyone") is sleeping


@given(KEYS, PERCENTS)
def test_a_shadow_gets_the_copies_that_it_would_answer_as_a_canary(key: str, percent: float) -> None:
    shadow = split(percent, shadow=True)
    assert shadow.answers(key) is OLD
    assert (shadow.copies(key) is NEW) == (split(percent).answers(key) is NEW)
    assert split(percent).copies(key) is None


def test_what_of_a_request_decides() -> None:
    assert split(5).key("alice", "r1") == "alice"
    assert split(5).key("", "r1") == "r1"
    assert Split(OLD, NEW, 5, by="request_id").key("alice", "r1") == "r1"
