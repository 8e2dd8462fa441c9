"""What the options of `headrace traffic` mean, and what is written when no server runs."""

import math
import time
from pathlib import Path

import pytest

from headrace.admin_orders import (
    OnDisk,
    Reached,
    Wanted,
    carried_out,
    changes_something,
    matched,
    planned,
    reached,
    seconds,
    server,
)
from headrace.admin_results import TrafficNow
from headrace.options import Target
from shared.errors import Conflict, ExitCode, InvalidOption, StartupError, UnknownModel, UnknownVersion
from shared.repository import Repository
from shared.traffic import Canary, Ramp, Traffic
from tests.support.fake_admin import repository, three_versions


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return repository(tmp_path / "models")


@pytest.fixture
def versions(root: Path) -> list[str]:
    return three_versions(root)


@pytest.mark.parametrize(
    ("text", "found"),
    [("90s", 90), ("10m", 600), ("1h", 3600), ("2d", 172800), ("1h30m", 5400), ("1.5h", 5400), ("0s", 0)],
)
def test_times_have_units(text: str, found: float) -> None:
    assert seconds(text, "--every") == found


@pytest.mark.parametrize(
    "text", ["", "10", "m", "10 m", "-5m", "10x", "1e3s", "nan", "10m ", "١٠m", "m10", "1..5h", "x" * 200]
)
def test_a_bad_time_is_told_with_an_example(text: str) -> None:
    with pytest.raises(StartupError, match=r"^--every .*must be a time with its unit.*e\.g\. 90s") as caught:
        seconds(text, "--every")
    assert caught.value.exit_code is ExitCode.BAD_SETTINGS
    assert len(caught.value.text) < 250


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (Wanted(canary="abcd"), "--canary needs --percent"),
        (Wanted(shadow="abcd"), "--shadow needs --percent"),
        (Wanted(canary="abcd", percent="x"), "--percent 'x': must be numbers"),
        (Wanted(canary="abcd", percent="0"), "above 0"),
        (Wanted(canary="abcd", percent="101"), "at most 100"),
        (Wanted(canary="abcd", percent="nan"), "must be numbers"),
        (Wanted(canary="abcd", percent="5,,25"), "must be numbers"),
        (Wanted(canary="abcd", percent="5,25"), "need --every"),
        (Wanted(canary="abcd", percent="5", every="10m"), "several steps of --percent"),
        (Wanted(canary="abcd", percent="5,25", every="10"), "with its unit"),
        (Wanted(canary="abcd", percent="5", by="ip"), "--by 'ip': must be routing_key or request_id"),
        (Wanted(canary="abcd", shadow="abcd", percent="5"), "--canary and --shadow do not go together"),
        (Wanted(promote=True, rollback=True), "--promote and --rollback do not go together"),
        (Wanted(to="abcd", promote=True), "do not go together"),
        (Wanted(percent="5"), "--percent goes with --canary or --shadow"),
        (Wanted(promote=True, every="5m"), "--every goes with"),
        (Wanted(by="request_id"), "--by goes with"),
        (Wanted(reason="why"), "--reason goes with --rollback"),
        (Wanted(ends="3f2a"), "--ends goes with --rollback"),
        (Wanted(drop_standby=True, rollback=True), "--rollback and --drop-standby do not go together"),
    ],
)
def test_options_that_make_no_sense_are_one_sentence(wanted: Wanted, told: str) -> None:
    with pytest.raises(StartupError) as caught:
        changes_something(wanted)
    assert told in caught.value.text
    assert caught.value.exit_code is ExitCode.BAD_SETTINGS


def test_no_option_changes_nothing() -> None:
    assert not changes_something(Wanted())
    assert changes_something(Wanted(rollback=True, reason="why"))


def test_options_become_a_canary() -> None:
    wanted = Wanted(shadow="abcd", percent="5,25,100", every="1h30m", by="request_id")
    ramp = Ramp(steps=[5, 25, 100], every_s=5400)
    assert planned(wanted, "v") == Canary(version="v", percent=5, by="request_id", shadow=True, ramp=ramp)
    assert planned(Wanted(canary="abcd", percent="2.5"), "v") == Canary(version="v", percent=2.5)


@pytest.mark.parametrize(
    ("prefix", "told"),
    [("abc", "4 digits"), ("", "4 digits"), ("abcd", "2 versions of m"), ("ffff", "has no such version")],
)
def test_a_prefix_must_name_one_version(prefix: str, told: str) -> None:
    with pytest.raises(UnknownVersion, match=told):
        matched(prefix, ["abcd000000000000", "abcd111111111111"], "m")


def test_a_unique_prefix_is_enough() -> None:
    assert matched("abcd1", ["abcd000000000000", "abcd111111111111"], "m") == "abcd111111111111"


def test_without_a_server_the_same_transitions_are_written(root: Path, versions: list[str]) -> None:
    disk = OnDisk(root, by="me")
    ramp = Ramp(steps=[5, 100], every_s=60)
    after = disk.canary("m", Canary(version=versions[1], percent=5, ramp=ramp))
    assert after.canary is not None
    assert after.canary.ramp is not None
    assert 50 < after.canary.ramp.next_at_s - time.time() <= 60
    with pytest.raises(Conflict):
        disk.canary("m", Canary(version=versions[2], percent=5))
    assert disk.promote("m").current == versions[1]
    assert disk.roll_back("m", "because").standby == versions[1]
    assert disk.switch("m", versions[2]).current == versions[2]
    assert Repository(root).traffic("m") == disk.traffic("m").traffic
    last = disk.traffic("m").traffic.history
    assert [(each["action"], each["by"]) for each in last[1:]] == [
        ("canary", "me"),
        ("promote", "me"),
        ("rollback", "me"),
        ("switch", "me"),
    ]
    assert last[-2]["reason"] == "because"


def test_without_a_server_no_shadow_is_promoted(root: Path, versions: list[str]) -> None:
    disk = OnDisk(root)
    disk.canary("m", Canary(version=versions[1], percent=5, shadow=True))
    with pytest.raises(Conflict, match=f"how shadow {versions[1]} has answered.* by --to {versions[1]}"):
        disk.promote("m")
    assert disk.switch("m", versions[1]).current == versions[1]


def test_a_rollback_names_what_it_ends(root: Path, versions: list[str]) -> None:
    at = Reached(OnDisk(root), versions)
    at.orders.switch("m", versions[1])
    assert carried_out(Wanted(rollback=True), "m", at).current == versions[0], "what was in force as it looked"
    with pytest.raises(Conflict, match=f"version {versions[1]} is not in force any more; current is {versions[0]}"):
        carried_out(Wanted(rollback=True, ends=versions[1][:6]), "m", at)
    assert carried_out(Wanted(rollback=True, ends=versions[0]), "m", at).current == versions[1]
    assert carried_out(Wanted(drop_standby=True), "m", at).standby == ""


def test_a_rollback_right_after_another_one_names_what_it_ends_or_is_refused(root: Path, versions: list[str]) -> None:
    at = Reached(OnDisk(root), versions)
    at.orders.switch("m", versions[1])
    at.orders.roll_back("m", "the guard was faster", versions[1])
    before = at.orders.traffic("m")
    told = f"by headrace traffic\\): {versions[0]} answers all callers; .*--ends {versions[0]}.*--to HASH"
    with pytest.raises(Conflict, match=told):
        carried_out(Wanted(rollback=True), "m", at)
    with pytest.raises(Conflict, match=told):
        at.orders.roll_back("m")
    assert at.orders.traffic("m") == before
    at.orders.canary("m", Canary(version=versions[2], percent=5))
    assert carried_out(Wanted(rollback=True), "m", at).canary is None, "there is a canary to end"
    with pytest.raises(Conflict, match="was a rollback already"):
        carried_out(Wanted(rollback=True), "m", at)
    assert carried_out(Wanted(rollback=True, ends=versions[0]), "m", at).current == versions[1]


def test_a_rollback_ends_a_canary_that_is_loading() -> None:
    old, new = "a" * 16, "b" * 16
    rolled_back = Traffic(current=old, standby=new, history=[{"action": "rollback"}])
    coming = Traffic(current=old, canary=Canary(version=new, percent=5))
    assert TrafficNow(rolled_back, coming=coming).ending == new
    for other in (
        Traffic(current=new),
        Traffic(current=old),
        Traffic(current=new, canary=Canary(version=old, percent=5)),
    ):
        assert TrafficNow(Traffic(current=old, standby=new), coming=other).ending == old, "what is in force"


@pytest.mark.parametrize("every_s", [math.nan, math.inf, 0.0])
def test_a_ramp_that_never_steps_is_refused(root: Path, versions: list[str], every_s: float) -> None:
    with pytest.raises(InvalidOption, match="every is"):
        OnDisk(root).canary("m", Canary(version=versions[1], percent=5, ramp=Ramp(steps=[5, 9], every_s=every_s)))


def test_the_disk_is_reached_when_nobody_runs_here(root: Path, tmp_path: Path, versions: list[str]) -> None:
    config = tmp_path / "headrace.yaml"
    config.write_text(f"repository: {root}\nruntime_dir: {tmp_path}/run\n")
    at = reached(Target(config), "m")
    assert isinstance(at.orders, OnDisk)
    assert sorted(at.versions) == sorted(versions)
    assert at.note == "no server runs: written to traffic.json, the next start takes it up"
    with pytest.raises(UnknownModel):
        reached(Target(config), "nobody")


def test_options_of_tcp_are_checked(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--token-file and --ca go with --address"):
        server(Target(token_file=tmp_path / "t"))
    with pytest.raises(StartupError, match=r"--token-file .* can't be read"):
        server(Target(address="localhost:1", token_file=tmp_path / "t"))
    (tmp_path / "t").write_bytes(b"a\x00b")
    with pytest.raises(StartupError, match="--token-file holds no token"):
        server(Target(address="localhost:1", token_file=tmp_path / "t"))
