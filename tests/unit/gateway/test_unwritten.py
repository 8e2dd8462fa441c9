"""A rollback while the disk refuses: in force at once, written when that can be, given up for what is newer."""

import errno
import shutil
import threading
from pathlib import Path

import msgspec
import pytest

from gateway import model_control, unwritten
from gateway.describe_lives import LivesShown
from gateway.figures import VersionFigures
from gateway.model_control import ModelControl
from gateway.orders import GUARD, RollBack, StartCanary, Switch
from gateway.unwritten import ChangedMeanwhile, Unwritten
from headrace.admin_orders import OnDisk
from shared import repository_writer
from shared.errors import Conflict, NotReady
from shared.repository_writer import change_traffic
from shared.traffic import Canary, Traffic, Why, roll_back, start_canary, switch
from shared.traffic_repair import set_aside
from tests.support.lives_parts import NAME, World, add, world

A, B, C = "a" * 16, "b" * 16, "c" * 16
FULL = "model words: can't be written: No space left on device"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


class Disk:
    """One that is full until it is told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = True
        self.tries = 0
        self._really = repository_writer._write
        monkeypatch.setattr(repository_writer, "_write", self._write)

    def _write(self, path: Path, content: bytes) -> None:
        self.tries += 1
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._really(path, content)


def canary(version: str, percent: float = 50.0) -> StartCanary:
    return StartCanary(Canary(version=version, percent=percent))


async def try_again(w: World) -> None:
    """As the watch does when it is time."""
    for each in w.control._disk._unwritten.values():
        each.again_s = 0.0
    await w.lives.watch.look()
    await w.until("the try", lambda: not w.lives.watch._writing)


@pytest.mark.parametrize("by", [GUARD, "admin"])
async def test_a_rollback_is_in_force_at_once_and_written_when_the_disk_lets_it(
    root: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(canary(new))
        disk = Disk(monkeypatch)
        after = await w.order(RollBack("bad", ends=new), by)
        assert (after.canary, w.roles()) == (None, {old: "current"})
        assert {(await w.answer(routing_key=str(each))).version for each in range(20)} == {old}
        assert w.on_disk().canary is not None
        assert w.control.standing(NAME).unwritten == w.current().state.unwritten == FULL
        await w.control.reconcile(NAME)
        assert w.roles() == {old: "current"}, "the old file does not bring it back"
        await try_again(w)
        assert (disk.tries, w.control.standing(NAME).unwritten) == (2, FULL)
        disk.full = False
        await try_again(w)
        assert w.on_disk() == after
        assert (w.control.standing(NAME).unwritten, w.current().state.unwritten) == ("", "")
        await try_again(w)
        assert disk.tries == 3, "once"
        assert w.control.traffic(NAME) == w.on_disk()


async def test_it_is_shown_in_debug_and_in_the_metrics_and_a_bug_in_writing_it_is_met_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        shown = LivesShown(w.lives, w.workers)
        shown.export(w.metrics)

        def told() -> tuple[object, float | None]:
            gauge = w.metrics.registry.get_sample_value("headrace_traffic_unwritten", {"model": NAME})
            return shown.describe()["traffic"][NAME]["unwritten"], gauge

        await w.order(canary(new))
        assert told() == ("", 0.0)
        really = w.control._disk._change
        monkeypatch.setattr(w.control._disk, "_change", None)  # can't be called
        await w.order(RollBack(ends=new))
        assert told() == ("the server failed to write it, see the log", 1.0)
        monkeypatch.setattr(w.control._disk, "_change", really)
        await try_again(w)
        assert (told(), w.on_disk().canary) == (("", 0.0), None)


async def test_two_rollbacks_that_could_not_be_written_are_written_as_two_changes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, third = add(root, b"1"), add(root, b"2"), add(root, b"3")
    async with world(root) as w:
        await w.order(Switch(new))
        await w.order(canary(third))
        disk, before = Disk(monkeypatch), w.on_disk()
        await w.order(RollBack(ends=third))
        await w.order(RollBack(ends=new))
        with pytest.raises(Conflict, match="is not in force any more"):
            await w.order(RollBack(ends=new))
        assert (w.current().version, w.on_disk()) == (old, before)
        disk.full = False
        await try_again(w)
        assert (w.on_disk().current, w.on_disk().standby, w.on_disk().canary) == (old, new, None)
        assert [each["from"] for each in w.on_disk().history[-2:]] == [third, new]
        assert w.on_disk().history[:-2] == before.history


async def test_other_orders_are_refused_while_the_disk_is_full_and_then_write_what_was_not_written_yet(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(canary(new))
        disk = Disk(monkeypatch)
        await w.order(RollBack(ends=new))
        with pytest.raises(NotReady, match="No space left"):
            await w.order(Switch(new))
        assert w.control.standing(NAME).unwritten == FULL
        disk.full = False
        await w.order(Switch(new))
        assert [each["action"] for each in w.on_disk().history[-3:]] == ["canary", "rollback", "switch"]
        assert w.control.standing(NAME).unwritten == ""


async def test_what_somebody_writes_meanwhile_is_newer_and_served(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, third = add(root, b"old"), add(root, b"new"), add(root, b"third")
    async with world(root) as w:
        await w.order(canary(new))
        await w.lives.watch.look()
        disk = Disk(monkeypatch)
        await w.order(RollBack(ends=new))
        disk.full = False
        change_traffic(root, NAME, lambda now: switch(now, third, Why("now", "by hand")))
        await w.lives.watch.look()
        await w.until("the newer one", lambda: w.current().version == third)
        await try_again(w)
        assert (w.control.standing(NAME).unwritten, w.on_disk().current, w.roles()[old]) == ("", third, "standby")


async def test_a_disk_that_hangs_delays_a_rollback_by_less_than_a_second(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(canary(new))
        really, goes_on = w.control._disk._change, threading.Event()

        def hangs(*given: object) -> Traffic:
            goes_on.wait(10.0)
            return really(*given)  # type: ignore[arg-type]  # as they came

        monkeypatch.setattr(w.control._disk, "_change", hangs)
        monkeypatch.setattr(model_control, "WRITE_LIMIT_S", 0.01)
        try:
            await w.order(RollBack(ends=new))
            assert (w.roles(), w.on_disk().canary is None) == ({old: "current"}, False)
            assert w.control.standing(NAME).unwritten == "the disk has not answered yet"
        finally:
            goes_on.set()
        await w.until("it to be written", lambda: w.control.standing(NAME).unwritten == "")
        assert w.on_disk().canary is None


async def test_another_gateway_follows_what_is_not_written_and_does_not_take_it_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as first, world(root) as second:
        await first.order(canary(new))
        await second.control.reconcile(NAME)
        assert second.roles() == {old: "current", new: "canary"}
        disk, others = Disk(monkeypatch), Follows(second.control)
        await first.control.order(NAME, RollBack("bad", ends=new), "admin", others)
        assert first.roles() == second.roles() == {old: "current"}
        await second.control.reconcile(NAME)
        assert second.roles() == {old: "current"}
        assert second.control.standing(NAME).unwritten == FULL
        disk.full = False
        await try_again(second)
        await try_again(first)
        assert first.on_disk() == first.control.traffic(NAME) == second.control.traffic(NAME)
        assert [each["action"] for each in first.on_disk().history[-2:]] == ["canary", "rollback"]
        assert first.control.standing(NAME).unwritten == second.control.standing(NAME).unwritten == ""


@pytest.mark.parametrize("looks", [True, False])
async def test_a_canary_that_is_started_again_is_newer_than_a_rollback_that_another_gateway_has_written(
    root: Path, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk says then what it said before the rollback. `looks`: whether the other one sees what is between."""
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as first, world(root) as second:
        await first.order(canary(new))
        await second.control.reconcile(NAME)
        disk = Disk(monkeypatch)
        await first.control.order(NAME, RollBack("bad", ends=new), "admin", Follows(second.control))
        disk.full = False
        await try_again(first)
        assert first.on_disk().canary is None
        if looks:
            await second.control.reconcile(NAME)
            assert second.control.standing(NAME).unwritten == second.current().state.unwritten == ""
        await first.order(canary(new))
        await second.control.reconcile(NAME)
        assert second.roles() == {old: "current", new: "canary"}
        await second.control.write(NAME)
        assert first.on_disk().canary is not None
        assert [each["action"] for each in first.on_disk().history[-3:]] == ["canary", "rollback", "canary"]


class Follows:
    """One other gateway, asked as over its socket: what is told it holds the last change only."""

    def __init__(self, control: ModelControl) -> None:
        self._control = control

    async def prepare(self, name: str, traffic: Traffic, *, at_once: bool) -> None:
        """It has all that is needed."""

    async def abandon(self, name: str, traffic: Traffic) -> None:
        """Nothing was prepared."""

    async def adopt(self, name: str, unwritten: Traffic | None) -> None:
        """By its control."""
        assert unwritten is not None
        await self._control.follow(name, msgspec.structs.replace(unwritten, history=unwritten.history[-1:]))

    async def all_figures(self, name: str) -> list[VersionFigures]:
        """Its own."""
        return self._control.figures(name)


# ------------------------------------------------------------ what is loading


@pytest.mark.parametrize("shadow", [False, True])
async def test_a_canary_that_is_still_loading_after_a_start_is_told_of_and_can_be_rolled_back(
    root: Path, shadow: bool
) -> None:
    old, new, before = add(root, b"old"), add(root, b"new"), add(root, b"before")
    coming = Traffic(current=old, standby=before, canary=Canary(version=new, percent=50.0, shadow=shadow))
    change_traffic(root, NAME, lambda _now: coming)
    async with world(root) as w:
        w.router.holds.update({new, before})
        await w.lives.watch.look()
        await w.until("its load", lambda: w.router.held)
        standing = w.control.standing(NAME)
        assert (standing.traffic.canary, standing.coming, standing.refused) == (None, coming, "")
        assert w.phases()[new] == ("coming", "loading")
        await w.order(RollBack("not now", ends=new))
        assert (w.on_disk().canary, w.on_disk().history[-1]["reason"]) == (None, "not now")
        assert (w.current().version, w.control.standing(NAME).coming) == (old, None)
        w.router.finish()
        await w.until("the load to end", lambda: not w.lives.watch._reconciling)
        for _ in range(2):  # the first one may have begun before the rollback was written
            await w.lives.watch.look()
            await w.until("it to be served", lambda: not w.lives.watch._reconciling)
        assert w.roles() == {old: "current", before: "standby"}
        assert w.control.standing(NAME).traffic == w.on_disk()


async def test_a_canary_that_could_not_be_loaded_after_a_start_is_told_of_with_the_reason(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    change_traffic(root, NAME, lambda now: start_canary(now, Canary(version=new, percent=50.0), WHY))
    async with world(root) as w:
        w.router.bad[new] = "no memory"
        await w.control.reconcile(NAME)
        standing = w.control.standing(NAME)
        assert standing.coming is not None
        assert "no memory" in standing.refused
        await w.order(RollBack(ends=new))
        assert w.control.standing(NAME) == (w.on_disk(), None, "", "")
        assert w.roles() == {old: "current"}


# ------------------------------------------------------------ a repository that somebody has broken


def gone(root: Path, version: str) -> None:
    """As by hand."""
    shutil.rmtree(root / NAME / "versions" / version)


async def test_the_current_versions_files_are_gone_while_it_answers(root: Path) -> None:
    old, new, third = add(root, b"1"), add(root, b"2"), add(root, b"3")
    async with world(root) as w:
        await w.order(Switch(new))
        gone(root, new)
        await w.control.reconcile(NAME)
        await w.control.load(NAME)
        assert (w.current().version, w.current().state.refused) == (new, ""), "it is in memory"
        await w.order(canary(third))
        await w.order(RollBack(ends=third))
        await w.order(RollBack(ends=new))
        assert (w.current().version, w.on_disk().current) == (old, old)
        await w.order(Switch(third))
        assert (await w.answer()).version == w.on_disk().current == third


async def test_a_rollback_to_a_version_whose_files_are_gone_is_in_force_from_memory(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(Switch(new))
        gone(root, old)
        await w.order(RollBack(ends=new))
        assert (await w.answer()).version == old
        assert f"has no version '{old}'" in w.control.standing(NAME).unwritten


@pytest.mark.parametrize("content", ["{", '{"current": "ffffffffffffffff"}', '{"current": 7}', ""])
async def test_a_traffic_json_that_somebody_has_damaged_is_written_anew_by_the_next_order(
    root: Path, content: str
) -> None:
    old, new, third = add(root, b"1"), add(root, b"2"), add(root, b"3")
    for order, current in ((RollBack(ends=new), old), (Switch(third), third), (canary(third), new)):
        change_traffic(root, NAME, lambda now: switch(switch(now, old, WHY), new, WHY))
        async with world(root) as w:
            await w.control.reconcile(NAME)
            history = w.control.traffic(NAME).history
            (root / NAME / "traffic.json").write_text(content)
            await w.control.reconcile(NAME)
            way_out = "`headrace traffic words --to HASH` writes it anew"
            assert way_out in w.current().state.refused
            with pytest.raises(NotReady, match=way_out):
                await w.control.load(NAME)
            assert (await w.answer()).version == new
            await w.order(order)
            assert (w.current().version, w.on_disk().current) == (current, current)
            assert w.on_disk().history[:-1] == history
            await w.control.reconcile(NAME)
            assert (w.current().state.refused, w.control.standing(NAME).unwritten) == ("", "")
            w.versions.tidy()
        damaged = root / NAME / "traffic.json.damaged"
        assert not damaged.exists() or damaged.read_text() == content
        change_traffic(root, NAME, lambda now: roll_back(now, WHY) if now.canary is not None else now)


async def test_a_model_whose_current_version_is_gone_at_the_start_is_served_again_after_what_its_reason_says(
    root: Path,
) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    add(root, b"other", "other")
    change_traffic(root, NAME, lambda now: switch(now, new, WHY))
    gone(root, new)
    async with world(root) as w:
        (broken,) = [state for state in w.control.index() if state.name == NAME]
        assert "`headrace traffic words --to HASH` writes it anew" in broken.reason
        with pytest.raises(NotReady, match="`headrace traffic words --to HASH`"):
            await w.control.load(NAME)
        OnDisk(root).switch(NAME, old)
        await w.control.load(NAME)
        assert (await w.answer()).version == old


def test_a_file_that_can_be_understood_is_not_set_aside(root: Path) -> None:
    add(root, b"old")
    before = (root / NAME / "traffic.json").read_bytes()
    assert not set_aside(root, NAME)
    assert (root / NAME / "traffic.json").read_bytes() == before
    (root / NAME / "traffic.json").unlink()
    assert not set_aside(root, NAME)


# ------------------------------------------------------------ the record

WHY = Why("now", "test")
BASE = start_canary(Traffic(current=A), Canary(version=B, percent=5.0), WHY)
AFTER = roll_back(BASE, WHY)


def kept() -> Unwritten:
    return Unwritten(BASE, BASE, []).followed_by(AFTER)


def test_it_is_read_over_what_it_replaces_and_over_nothing_else() -> None:
    assert kept().over(BASE) == AFTER
    more = msgspec.structs.replace(BASE, history=[{"action": "noted"}, *BASE.history])
    assert kept().over(more).history == [*more.history, AFTER.history[-1]]
    newer = switch(BASE, C, WHY)
    assert kept().over(newer) is newer
    with pytest.raises(ChangedMeanwhile):
        kept().written(newer)
    assert kept().written(AFTER) is AFTER, "another gateway was faster"


def test_what_was_there_before_is_newer_when_the_history_says_that_this_was_written_meanwhile() -> None:
    again = msgspec.structs.replace(BASE, history=[*AFTER.history, BASE.history[-1]])
    assert kept().over(again) is again
    with pytest.raises(ChangedMeanwhile):
        kept().written(again)
    once_more = Unwritten(again, again, []).followed_by(roll_back(again, WHY))
    assert once_more.over(again).canary is None, "the same within the same second is another change"


def test_what_came_while_it_was_written_is_written_on_top_of_it() -> None:
    first = kept()
    second = first.followed_by(switch(AFTER, C, WHY))
    assert [each["action"] for each in second.entries] == ["rollback", "switch"]
    second.lands(first)
    assert (second.base, [each["action"] for each in second.entries]) == (AFTER, ["switch"])


def test_it_is_tried_again_after_longer_and_longer_up_to_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unwritten, "now_s", lambda: 100.0)
    each = kept()
    waits = []
    for _ in range(8):
        each.failed("full")
        waits.append(each.again_s - 100.0)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
