import asyncio
import os
import time
from pathlib import Path

import msgspec
import pytest

from gateway import watch as module
from gateway.orders import NextStep, Order, StartCanary
from gateway.split import point
from gateway.watch import Watch
from shared.errors import HeadraceError, NotReady
from shared.repository_writer import change_traffic
from shared.traffic import Canary, Ramp, Traffic
from tests.support.lives_parts import LIMIT_S, MODEL_YAML, NAME, World, add, world


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


class Control:
    """Notes which models it is to look at again, and takes as long as the test says."""

    def __init__(self, *names: str) -> None:
        self.served = list(names)
        self.reconciled: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.can = self.whole = True

    def names(self) -> list[str]:
        """Models that are served."""
        return list(self.served)

    def traffic(self, _name: str) -> Traffic:
        """Nobody has a canary."""
        return Traffic(current="0" * 16)

    async def reconcile(self, name: str) -> bool:
        """See the class."""
        self.reconciled.append(name)
        await self.hold.wait()
        return self.can

    def is_whole(self, _name: str) -> bool:
        """As the test says."""
        return self.whole

    def unwritten(self) -> list[str]:
        """All is written."""
        return []


async def no_order(_name: str, _order: Order, _by: str) -> Traffic:
    raise AssertionError("nothing was to be ordered")


def watch_of(root: Path, control: Control) -> Watch:
    return Watch(root, control, no_order, leads=True)  # type: ignore[arg-type]  # a fake with the port's names


async def looks(watch: Watch, times: int = 1) -> None:
    """With what each look begins; the steps that are due are taken."""
    for _ in range(times):
        await watch.look()
        await asyncio.sleep(0)
        if watch._stepping:
            await asyncio.wait(watch._stepping.values(), timeout=LIMIT_S)
            await asyncio.sleep(0)


def touch(path: Path) -> None:
    """The same content, written again."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    os.utime(path, ns=(time.time_ns(), time.time_ns()))


async def test_a_model_is_looked_at_once_and_then_when_one_of_its_two_files_has_changed(root: Path) -> None:
    for name in ("one", "two"):
        add(root, name.encode(), name)
    control = Control("one", "two")
    watch = watch_of(root, control)
    await looks(watch, 3)
    assert control.reconciled == ["one", "two"]
    touch(root / "one" / "traffic.json")
    await looks(watch, 2)
    assert control.reconciled == ["one", "two", "one"]
    (root / "two" / "model.yaml").write_text(MODEL_YAML + "\n")
    await looks(watch, 2)
    assert control.reconciled == ["one", "two", "one", "two"]
    (root / "two" / "notes.txt").write_text("nothing of ours")
    await looks(watch)
    (root / "two" / "model.yaml").unlink()
    await looks(watch, 2)
    assert control.reconciled == ["one", "two", "one", "two", "two"], "gone is a change, once"


async def test_one_look_at_a_model_at_a_time_and_what_changed_meanwhile_is_seen_afterwards(root: Path) -> None:
    for name in ("one", "two"):
        add(root, name.encode(), name)
    control = Control("one", "two")
    control.hold.clear()
    watch = watch_of(root, control)
    await looks(watch)
    touch(root / "one" / "traffic.json")
    await looks(watch, 3)
    assert control.reconciled == ["one", "two"]
    control.hold.set()
    while watch._reconciling:
        await asyncio.wait(watch._reconciling.values())
        await asyncio.sleep(0)
    await looks(watch, 2)
    assert control.reconciled == ["one", "two", "one"]


async def test_nothing_is_kept_of_models_that_are_served_no_more(root: Path) -> None:
    add(root, b"one", "one")
    control = Control("one")
    watch = watch_of(root, control)
    await looks(watch)
    control.served.clear()
    await looks(watch)
    assert (watch._seen, watch._reconciling) == ({}, {})
    control.served.append("one")
    await looks(watch)
    assert control.reconciled == ["one", "one"]


class Orders:
    """Where steps are ordered."""

    def __init__(self, w: World, fails: HeadraceError | None = None) -> None:
        self._w = w
        self.fails = fails
        self.given: list[tuple[str, Order, str]] = []

    async def order(self, name: str, order: Order, by: str) -> Traffic:
        """As it comes."""
        self.given.append((name, order, by))
        if self.fails is not None:
            raise self.fails
        return await self._w.control.order(name, order, by)


def ramp(version: str, *steps: float, in_s: float = 0.0) -> StartCanary:
    schedule = Ramp(steps=list(steps), every_s=60.0, next_at_s=time.time() + in_s)
    return StartCanary(Canary(version=version, percent=steps[0], ramp=schedule))


@pytest.mark.parametrize("leads", [True, False])
async def test_only_the_one_that_leads_takes_a_ramp_s_due_steps(root: Path, leads: bool) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        orders = Orders(w)
        watch = Watch(root, w.control, orders.order, leads=leads)
        await w.order(ramp(new, 5.0, 50.0, 100.0))
        await looks(watch, 3)
        canary = w.control.traffic(NAME).canary
        assert canary is not None
        assert (canary.percent, len(orders.given)) == ((50.0, 1) if leads else (5.0, 0))
        assert all(by == "ramp" and isinstance(order, NextStep) for _, order, by in orders.given)
        watch.close()


async def test_a_step_that_is_not_due_waits_and_the_last_one_promotes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        watch = Watch(root, w.control, w.control.order, leads=True)
        await w.order(ramp(new, 5.0, 100.0, in_s=100.0))
        await looks(watch, 2)
        assert w.roles() == {old: "current", new: "canary"}
        later = time.time() + 101.0
        monkeypatch.setattr(module.time, "time", lambda: later)
        await looks(watch)
        assert w.roles() == {old: "standby", new: "current"}
        watch.close()


async def test_a_step_that_can_not_be_taken_is_tried_again(root: Path) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        orders = Orders(w, NotReady("the disk is full"))
        watch = Watch(root, w.control, orders.order, leads=True)
        await w.order(ramp(new, 5.0, 50.0))
        await looks(watch, 2)
        orders.fails = None
        await looks(watch, 2)
        assert len(orders.given) == 3
        watch.close()


async def test_a_step_that_takes_long_keeps_no_other_model_waiting_and_is_taken_once(root: Path) -> None:
    for content in (b"old", b"new"):
        add(root, content, "one")
    new = add(root, b"third", "one")
    add(root, b"two", "two")
    async with world(root) as w:
        hold, given = asyncio.Event(), []

        async def slow(name: str, order: Order, by: str) -> Traffic:
            given.append(name)
            await hold.wait()
            return await w.control.order(name, order, by)

        watch = Watch(root, w.control, slow, leads=True)
        await w.order(ramp(new, 5.0, 50.0), name="one")
        for _ in range(3):
            await watch.look()
            await asyncio.sleep(0)
        (root / "two" / "model.yaml").write_text(MODEL_YAML + "batching: {max_rows: 2}\n")
        for _ in range(1000):  # a look leaves out a model at which the one before still works
            await watch.look()
            if w.current("two").max_rows == 2:
                break
        assert w.current("two").max_rows == 2
        assert given == ["one"]
        hold.set()
        await looks(watch)
        canary = w.control.traffic("one").canary
        assert canary is not None
        assert canary.percent == 50.0
        watch.close()


async def test_a_bug_in_one_look_at_a_model_is_noted_and_the_next_change_is_looked_at(root: Path) -> None:
    add(root, b"one", "one")
    control = Control("one")
    watch = watch_of(root, control)
    looked = control.reconcile

    async def buggy(name: str) -> bool:
        await looked(name)
        raise KeyError("bug")

    control.reconcile = buggy  # type: ignore[method-assign]  # each time
    await looks(watch)
    await asyncio.sleep(0)
    touch(root / "one" / "traffic.json")
    await looks(watch)
    assert control.reconciled == ["one", "one"]


@pytest.mark.parametrize("lack", ["can", "whole"])
async def test_what_could_not_be_served_is_tried_again_after_longer_and_longer(
    root: Path, lack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(root, b"one", "one")
    control = Control("one")
    setattr(control, lack, False)
    watch, now = watch_of(root, control), 100.0
    monkeypatch.setattr(module, "now_s", lambda: now)
    tries = []
    for second in range(60):
        now = 100.0 + second
        before = len(control.reconciled)
        await looks(watch)
        tries += [second] * (len(control.reconciled) - before)
    assert tries == [0, 5, 15, 35]
    touch(root / "one" / "traffic.json")
    await looks(watch)
    assert len(control.reconciled) == 5, "a change is looked at at once"
    setattr(control, lack, True)
    now += 5.0
    await looks(watch)
    now += 1000.0
    await looks(watch, 3)
    assert len(control.reconciled) == 6, "all is well"


async def test_a_served_model_that_lacks_its_standby_is_looked_at_again(root: Path) -> None:
    first, second, third = (add(root, content) for content in (b"1", b"2", b"3"))
    async with world(root) as w:
        await w.order(StartCanary(Canary(version=second, percent=1.0)))
        w.router.bad[first] = "no memory"
        watch = watch_of(root, w.control)  # type: ignore[arg-type]  # the real one
        await looks(watch)
        change_traffic(root, NAME, lambda _before: Traffic(current=third, standby=first))
        w.versions.let_go(w.model(first))
        for _ in range(1000):
            await watch.look()
            if w.roles() == {third: "current"}:
                break
        assert w.roles() == {third: "current"}
        w.router.bad.clear()
        watch._again_s[NAME] = 0.0
        for _ in range(1000):
            await watch.look()
            if set(w.roles().values()) == {"current", "standby"}:
                break
        assert w.roles() == {third: "current", first: "standby"}


async def test_a_ramp_waits_until_enough_is_known_of_its_canary(root: Path) -> None:
    add(root, b"old")
    new = add(root, b"new")
    async with world(root) as w:
        given: list[str] = []

        async def order(name: str, order: Order, by: str) -> Traffic:
            given.append(name)
            return await w.control.order(name, order, by)

        watch = Watch(root, w.control, order, leads=True)
        known = False
        watch.has_evidence = lambda _name: known
        await w.order(ramp(new, 5.0, 50.0))
        await looks(watch, 3)
        assert given == []
        known = True
        await looks(watch, 2)
        assert given == [NAME]


async def test_a_ramp_waits_for_answers_of_its_canary_with_each_share(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root, guard={"min_samples": 5}) as w:
        await w.order(ramp(new, 50.0, 60.0, 100.0))
        for percent in (50.0, 60.0):
            canary = w.control.traffic(NAME).canary
            assert canary is not None
            due = msgspec.structs.replace(canary, ramp=msgspec.structs.replace(canary.ramp, next_at_s=0.0))
            change_traffic(root, NAME, lambda now, due=due: msgspec.structs.replace(now, canary=due))
            await w.control.reconcile(NAME)
            await looks(w.lives.watch, 3)
            assert (canary.percent, w.roles()[new]) == (percent, "canary"), "nobody has asked since"
            for key in [key for key in map(str, range(100)) if point(NAME, new, key) < 0.5][:5]:
                assert (await w.answer(routing_key=key)).version == new
            await looks(w.lives.watch, 3)
        assert w.roles() == {old: "standby", new: "current"}
        w.lives.watch.close()


async def test_it_begins_by_loading_canary_and_standby_and_goes_on_until_it_is_closed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.01)
    old, new, third = add(root, b"old"), add(root, b"new"), add(root, b"third")
    whole = Traffic(current=old, standby=third, canary=Canary(version=new, percent=5.0))
    change_traffic(root, NAME, lambda _before: whole)
    async with world(root) as w, asyncio.timeout(LIMIT_S):
        w.lives.watch.start()
        await w.until("all three", lambda: w.roles() == {old: "current", new: "canary", third: "standby"})
        assert w.control.traffic(NAME) == whole
        change_traffic(root, NAME, lambda _before: Traffic(current=new))
        await w.until("the change", lambda: w.roles() == {new: "current"})
        task = w.lives.watch._task
        w.lives.watch.close()
        w.lives.watch.close()
        assert task is not None
        await asyncio.wait((task,))
        assert task.cancelled()


async def test_a_bug_while_looking_does_not_end_the_watch(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(module.asyncio, "sleep", lambda _s, sleep=asyncio.sleep: sleep(0))
    add(root, b"one", "one")
    control = Control("one")
    watch = watch_of(root, control)
    names = control.names
    bugs = iter((KeyError("bug"), ValueError("bug")))

    def buggy() -> list[str]:
        if (bug := next(bugs, None)) is not None:
            raise bug
        return names()

    control.names = buggy  # type: ignore[method-assign]  # twice
    watch.start()
    async with asyncio.timeout(LIMIT_S):
        while not control.reconciled:  # noqa: ASYNC110 - turns of the loop, not time
            await asyncio.sleep(0)
    watch.close()
