import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from gateway import preparer
from gateway.figures import VersionFigures
from gateway.model_control import ModelControl
from gateway.orders import DropStandby, NextStep, Order, Promote, RollBack, StartCanary, Switch
from gateway.proof import Proof
from gateway.routing import Routing
from shared import repository_writer
from shared.errors import Conflict, HeadraceError, InvalidOption, NotReady, UnknownModel, UnknownVersion
from shared.messages import Failure, LoadModel, ModelFailed
from shared.repository_writer import change_traffic
from shared.settings import Settings
from shared.traffic import Canary, Traffic, Why, switch
from tests.support.lives_parts import LIMIT_S, MODEL_YAML, NAME, World, add, world


class Peers:
    """The other gateways; `fails` is what one of them says when it is to prepare."""

    def __init__(self, fails: HeadraceError | None = None) -> None:
        self.fails = fails
        self.told: list[str] = []
        self.figures: list[VersionFigures] = []

    async def prepare(self, name: str, traffic: Traffic, *, at_once: bool) -> None:
        """One of them may refuse."""
        self.told.append(f"prepare {name} {traffic.current} {len(traffic.history)}")
        if self.fails is not None:
            raise self.fails

    async def abandon(self, name: str, traffic: Traffic) -> None:
        """It is not written."""
        self.told.append(f"abandon {name} {traffic.current}")

    async def adopt(self, name: str, unwritten: Traffic | None) -> None:
        """It is written, or in force at least."""
        self.told.append(f"adopt {name}" + (f" unwritten {unwritten.current}" if unwritten is not None else ""))

    async def all_figures(self, name: str) -> list[VersionFigures]:
        """What they have seen of a shadow."""
        self.told.append(f"figures {name}")
        return self.figures


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


def canary(version: str, percent: float = 50.0, *, shadow: bool = False) -> StartCanary:
    return StartCanary(Canary(version=version, percent=percent, shadow=shadow))


def write(root: Path, traffic: Traffic) -> None:
    """As a command line, or another gateway, does."""
    change_traffic(root, NAME, lambda _before: traffic)


def yaml(root: Path, more: str = "") -> None:
    (root / NAME / "model.yaml").write_text(MODEL_YAML + more)


class Before:
    """What an order that failed must leave as it was."""

    def __init__(self, w: World) -> None:
        self._w = w
        self._now = self._look()

    @property
    def history(self) -> list[dict[str, Any]]:
        return self._now[0].history

    def _look(self) -> Any:  # noqa: ANN401 - a tuple
        w = self._w
        return (
            w.on_disk(),
            w.control.traffic(NAME),
            w.routing.split(NAME),
            [(m.number, m.state.role, m.state.refused) for m in w.routing.models()],
            set(w.workers._models),
            len(w.processes.opened) - len(w.processes.closed),
        )

    def check(self) -> None:
        assert self._look() == self._now


# ------------------------------------------------------------ orders


async def test_an_order_loads_proves_writes_and_only_then_switches(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        w.router.holds.add(new)
        ordered = asyncio.create_task(w.order(Switch(new)))
        await w.until("the load to be asked for", lambda: w.router.held)
        assert (w.roles(), w.on_disk().current) == ({old: "current", new: "coming"}, old)
        assert (await w.answer()).version == old
        w.router.holds_batches = True
        w.router.finish()
        await w.until("its proof", lambda: w.router.held_batches)
        assert (w.current().version, w.on_disk().current) == (old, old), "loaded is not proven"
        w.router.run()
        after = await ordered
        assert (after.current, after.standby) == (w.on_disk().current, w.on_disk().standby) == (new, old)
        assert w.roles() == {old: "standby", new: "current"}
        assert (await w.answer()).version == new
        assert after.history[-1]["by"] == "admin"


async def test_a_canary_a_ramp_and_its_promotion(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(canary(new))
        versions = {(await w.answer(routing_key=str(each))).version for each in range(40)}
        assert versions == {old, new}
        split = w.routing.split(NAME)
        assert split is not None
        assert (split.percent, split.shadow) == (50.0, False)
        await w.order(canary(new, 100.0))
        assert {(await w.answer(routing_key=str(each))).version for each in range(20)} == {new}
        loads = len(w.router.loads())
        await w.order(Promote())
        assert (w.current().version, w.roles()) == (new, {old: "standby", new: "current"})
        assert len(w.router.loads()) == loads, "both are there already"


async def test_a_shadow_is_promoted_once_any_gateway_has_seen_it_answer(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(canary(new, 100.0, shadow=True))
        before, peers = Before(w), Peers()
        for others in (None, peers):
            with pytest.raises(Conflict, match=f"shadow {new} has answered no copy .*traffic words.* by --to {new}"):
                await w.control.order(NAME, Promote(), "admin", others)
        before.check()
        peers.figures = [VersionFigures(version=new, role="shadow", compared=1)]
        await w.control.order(NAME, Promote(), "admin", peers)
        assert w.roles() == {old: "standby", new: "current"}
        await w.order(canary(old, 100.0, shadow=True))
        await w.answer()
        await w.until("its copy", lambda: w.control.figures(NAME)[1].compared)
        await w.order(Promote())
        assert w.roles() == {old: "current", new: "standby"}


async def test_rolling_back_ends_the_canary_and_then_goes_back_to_the_standby_without_a_load(root: Path) -> None:
    first, second, third = add(root, b"1"), add(root, b"2"), add(root, b"3")
    async with world(root) as w:
        await w.order(Switch(second))
        await w.order(canary(third))
        assert w.roles() == {first: "standby", second: "current", third: "canary"}
        loads = len(w.router.loads())
        await w.order(RollBack("it was bad", {"rate": 0.5}))
        assert w.roles() == {first: "standby", second: "current"}, "the canary's memory is given back"
        await w.order(RollBack())
        assert w.roles() == {first: "current", second: "standby"}
        assert len(w.router.loads()) == loads
        assert [entry["action"] for entry in w.on_disk().history][-2:] == ["rollback", "rollback"]
        assert w.on_disk().history[-2]["figures"] == {"rate": 0.5}


async def test_a_rollback_that_names_another_canary_changes_nothing(root: Path) -> None:
    _, new, other = add(root, b"old"), add(root, b"new"), add(root, b"other")
    async with world(root) as w:
        await w.order(canary(new))
        before = Before(w)
        await w.order(RollBack("late", ends=other), "guard")
        before.check()


async def test_a_rollback_that_comes_twice_goes_back_once(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(Switch(new))
        await w.order(RollBack(ends=new))
        before = Before(w)
        with pytest.raises(Conflict, match=f"version {new} is not in force any more; current is {old}"):
            await w.order(RollBack(ends=new))
        before.check()
        assert w.roles() == {old: "current", new: "standby"}


async def test_a_canary_that_was_the_standby_is_the_standby_again_and_can_be_given_up(root: Path) -> None:
    first, second = add(root, b"1"), add(root, b"2")
    async with world(root) as w:
        await w.order(Switch(second))
        await w.order(canary(first))
        assert w.roles() == {first: "canary", second: "current"}
        loads = len(w.router.loads())
        await w.order(RollBack(ends=first))
        assert w.roles() == {first: "standby", second: "current"}
        assert len(w.router.loads()) == loads, "it was never given up"
        await w.order(DropStandby())
        assert w.roles() == {second: "current"}
        assert (w.on_disk().standby, w.on_disk().history[-1]["action"]) == ("", "drop_standby")


async def test_orders_that_change_nothing_write_nothing(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(canary(new))
        before, stamp = Before(w), (root / NAME / "traffic.json").stat()
        for order, by in ((canary(new), "admin"), (NextStep(0.0), "ramp"), (RollBack(ends=old), "guard")):
            await w.order(order, by)
        before.check()
        assert (root / NAME / "traffic.json").stat() == stamp


async def test_the_same_order_again_loads_what_could_not_be_loaded_then(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        w.router.bad[new] = "the disk hangs"
        write(root, Traffic(current=old, canary=Canary(version=new, percent=50.0)))
        await w.control.reconcile(NAME)
        assert "the disk hangs" in w.current().state.refused
        w.router.bad.clear()
        await w.order(canary(new))
        assert w.roles() == {old: "current", new: "canary"}
        assert w.current().state.refused == ""


@pytest.mark.parametrize(
    ("order", "error"),
    [
        (Switch("f" * 16), UnknownVersion),
        (Promote(), Conflict),
        (RollBack(), Conflict),
        (canary("f" * 16), UnknownVersion),
        (canary("f" * 16, 0.0), InvalidOption),
    ],
)
async def test_what_can_not_be_ordered_changes_nothing(root: Path, order: Order, error: type[HeadraceError]) -> None:
    add(root, b"old")
    async with world(root) as w:
        before = Before(w)
        with pytest.raises(error):
            await w.order(order)
        before.check()
        with pytest.raises(UnknownModel):
            await w.order(order, name="nobody")


@pytest.mark.parametrize("fault", ["load", "pipeline", "proof", "files", "peer", "disk"])
async def test_a_failure_at_any_step_leaves_everything_as_it_was(
    root: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        w.current().state.refused = "an edit of model.yaml"
        peers = Peers(NotReady("gateway 1 has no memory") if fault == "peer" else None)
        if fault == "load":
            w.router.bad[new] = "the weights do not fit"
        elif fault == "pipeline":
            w.processes.refused.add(new)
        elif fault == "proof":
            monkeypatch.setattr("gateway.readiness.prove", _fails)
        elif fault == "files":
            (root / NAME / "versions" / new / "meta.json").write_text("{}")
        elif fault == "disk":
            monkeypatch.setattr(repository_writer, "_write", _full)
        before = Before(w)
        with pytest.raises(NotReady) as caught:
            await w.control.order(NAME, canary(new), "admin", peers)
        assert caught.value.text.count("\n") == 0
        assert str(root) not in caught.value.text
        assert not any(each.startswith("adopt") for each in peers.told)
        before.check()
        assert (await w.answer()).version == old


async def test_an_order_that_another_one_overtook_is_looked_at_anew(root: Path) -> None:
    old, new, third = add(root, b"old"), add(root, b"new"), add(root, b"third")
    async with world(root) as w:
        peers = Peers()
        peers.prepare = _another_admin(root, old, third)  # type: ignore[method-assign]  # what it does meanwhile
        after = await w.control.order(NAME, canary(new), "admin", peers)
        assert [change["action"] for change in after.history[-2:]] == ["switch", "canary"]
        assert w.roles() == {third: "current", new: "canary", old: "standby"}


async def test_an_order_that_is_overtaken_again_and_again_is_refused_and_leaves_the_others(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        peers, turns = Peers(), iter(range(1, 100))

        async def prepare(_name: str, _traffic: Traffic, *, at_once: bool) -> None:
            write(root, Traffic(current=old, canary=Canary(version=new, percent=next(turns))))

        peers.prepare = prepare  # type: ignore[method-assign]  # what others do meanwhile
        with pytest.raises(Conflict, match="changed by somebody else"):
            await w.control.order(NAME, Switch(new), "admin", peers)
        assert w.roles() == {old: "current"}


async def _fails(_flow: object, _model: object) -> Proof:
    return Proof("its example failed")


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _another_admin(root: Path, old: str, third: str) -> Any:  # noqa: ANN401 - a coroutine function
    async def prepare(_name: str, _traffic: Traffic, *, at_once: bool) -> None:
        write(root, switch(Traffic(current=old), third, Why("now", "somebody")))

    return prepare


async def test_a_full_disk_is_told_in_one_sentence(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        monkeypatch.setattr(repository_writer, "_write", _full)
        with pytest.raises(NotReady) as caught:
            await w.order(Switch(new))
    assert caught.value.text == "model words: can't be written: No space left on device"
    assert list((root / NAME).glob(".new-*")) == []


async def test_the_others_prepare_before_it_is_written_and_adopt_it_afterwards(root: Path) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        peers = Peers()
        await w.control.order(NAME, Switch(new), "admin", peers)
        assert peers.told == [f"prepare {NAME} {new} 0", f"adopt {NAME}"]


async def test_a_standby_that_can_not_be_loaded_is_done_without(root: Path) -> None:
    first, second, third = add(root, b"1"), add(root, b"2"), add(root, b"3")
    write(root, Traffic(current=first, standby=second))
    async with world(root) as w:
        w.router.bad[second] = "its weights are gone"
        await w.control.reconcile(NAME)
        assert (w.roles(), w.current().state.refused) == ({first: "current"}, "")
        await w.order(canary(third))
        assert w.roles() == {first: "current", third: "canary"}
        with pytest.raises(NotReady, match="its weights are gone"):
            await _in_turn(w, RollBack(), RollBack())
        assert w.current().version == first


async def _in_turn(w: World, *orders: Order) -> None:
    for order in orders:
        await w.order(order)


async def test_a_failed_version_takes_over_from_one_that_answers_only_when_it_can_be_loaded_now(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(Switch(new))
        w.router.bad[old] = "no memory"
        w.workers.on_lost(next(iter(w.workers.workers())).identity)
        w.greet()
        await w.until("one to be back", lambda: w.phases()[new][1] == "ready" and w.phases()[old][1] == "failed")
        before = Before(w)
        with pytest.raises(NotReady, match="no memory"):
            await w.order(RollBack())
        before.check()
        assert (await w.answer()).version == new
        w.router.bad.clear()
        await w.order(RollBack())
        assert (await w.answer()).version == old


async def test_rolling_back_waits_for_nothing_where_nobody_can_answer_anyway(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(Switch(new))
        for worker in list(w.workers.workers()):
            w.workers.on_lost(worker.identity)
        await w.order(RollBack())
        assert w.current().version == old


async def test_a_rollback_does_not_wait_for_a_load_and_what_was_loaded_for_is_looked_at_anew(root: Path) -> None:
    old, new, third = add(root, b"old"), add(root, b"new"), add(root, b"third")
    async with world(root) as w:
        await w.order(canary(new))
        w.router.holds.add(third)
        slow = asyncio.create_task(w.order(Switch(third)))
        await w.until("its load", lambda: w.router.held)
        yaml(root, "batching: {max_rows: 2}\n")
        w.router.holds.update({old, new})
        look = asyncio.create_task(w.control.reconcile(NAME))
        await w.until("the edit's load", lambda: len(w.router.held) == 2)
        await w.order(RollBack(ends=new))
        assert (w.current().version, w.on_disk().canary) == (old, None)
        assert (slow.done(), look.done()) == (False, False)
        w.router.finish()
        await asyncio.gather(slow, look)
        await w.control.reconcile(NAME)
        assert w.roles() == {old: "standby", third: "current"}
        assert len(w.control._locks) == 0


async def test_two_who_need_the_same_version_share_its_load(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        w.router.holds.add(new)
        orders = [asyncio.create_task(w.order(order)) for order in (canary(new, 5.0), canary(new, 50.0))]
        await w.until("the load", lambda: w.router.held)
        await asyncio.wait(orders, timeout=0.02)
        orders[0].cancel()
        await asyncio.wait(orders[:1])
        w.router.finish()
        await orders[1]
        assert w.router.loads().count(new) == 1
        assert w.roles() == {old: "current", new: "canary"}


async def test_who_asks_for_a_version_just_when_its_load_is_given_up_has_it_loaded_anew(root: Path) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        w.router.holds.add(new)
        first = asyncio.create_task(w.control.prepare(NAME, Traffic(current=new)))
        await w.until("the load", lambda: w.router.held)
        first.cancel()
        second = asyncio.create_task(w.control.prepare(NAME, Traffic(current=new)))  # before the load has ended
        await w.until("another load", lambda: len(w.router.held) == 2 or second.done())
        w.router.finish()
        async with asyncio.timeout(LIMIT_S):
            await second
        assert (first.cancelled(), w.roles()[new]) == (True, "coming")


async def test_a_standby_gives_way_when_there_is_no_room_for_what_comes(root: Path) -> None:
    first, second, third = add(root, b"1"), add(root, b"2"), add(root, b"3")
    async with world(root) as w:
        await w.order(Switch(second))

        def load(identity: bytes, message: LoadModel) -> None:
            if len({model for worker in w.workers.workers() for model in worker.loaded}) >= 2:
                text = "model words needs 40 MB, and worker.memory_budget_bytes is 80 MB"
                w.workers.on_message(identity, ModelFailed(message.model, Failure("not_ready", text)))
            else:
                really(identity, message)

        really, w.router.load = w.router.load, load  # type: ignore[method-assign]  # room for two
        await w.order(Switch(third))
        assert w.roles() == {second: "standby", third: "current"}
        assert first not in w.roles()


async def test_what_was_prepared_for_another_gateway_s_order_is_let_go_when_that_does_not_come(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        monkeypatch.setattr(preparer, "UNUSED_S", 0.01)
        await w.control.prepare(NAME, Traffic(current=new))
        assert w.roles() == {old: "current", new: "coming"}
        await w.until("it to be let go", lambda: w.roles() == {old: "current"})
        monkeypatch.setattr(preparer, "UNUSED_S", 60.0)
        await asyncio.gather(*(w.control.prepare(NAME, Traffic(current=new)) for _ in range(2)))
        w.control.abandon(NAME, Traffic(current=new))
        assert w.roles() == {old: "current", new: "coming"}, "somebody else asked for it, too"
        w.control.abandon(NAME, Traffic(current=new))
        assert w.roles() == {old: "current"}
        w.control.abandon(NAME, Traffic(current=new))  # once more does no harm
        await w.control.prepare(NAME, Traffic(current=new))
        await w.order(Switch(new))
        assert (w.roles(), w.router.loads().count(new)) == ({old: "standby", new: "current"}, 3)


async def test_a_caller_that_leaves_leaves_nothing_half_done(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        before = Before(w)
        w.router.holds.add(new)
        ordered = asyncio.create_task(w.order(Switch(new)))
        await w.until("its load", lambda: w.router.held)
        ordered.cancel()
        await asyncio.wait((ordered,))
        before.check()
        w.router.holds.clear()
        await w.order(Switch(new))
        assert w.roles() == {old: "standby", new: "current"}


# ------------------------------------------------------------ load and unload


async def test_several_who_ask_for_an_unknown_model_at_once_are_all_told_so_and_its_name_is_forgotten(
    tmp_path: Path,
) -> None:
    nobody: Any = None
    control = ModelControl(Settings(repository=tmp_path), Routing([]), nobody)
    async with asyncio.timeout(LIMIT_S):
        outcomes = await asyncio.gather(*(control.load("absent") for _ in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [UnknownModel] * 3
    assert len(control._locks) == 0


async def test_an_unloaded_model_is_unknown_until_it_is_loaded_again_with_its_canary(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(canary(new))
        pointed: list[object] = []
        w.control.pointed = lambda name, split: pointed.append((name, split))
        await w.control.unload(NAME)
        assert pointed == [(NAME, None)]
        assert w.control.names() == []
        with pytest.raises(UnknownModel, match="load it first"):
            await w.answer()
        for ask in (w.control.traffic, w.control.figures):
            with pytest.raises(UnknownModel, match="is not served"):
                ask(NAME)
        assert set(w.workers._models) == set()
        await w.control.unload(NAME)  # again does no harm
        await w.control.load(NAME)
        assert w.roles() == {old: "current", new: "canary"}
        assert w.on_disk().canary is not None
        await w.answer()
    with pytest.raises(UnknownModel, match="is not served"):
        await w.control.unload("nobody")


async def test_loading_a_model_that_failed_tries_again(root: Path) -> None:
    version = add(root, b"old")
    async with world(root) as w:
        w.router.bad[version] = "no memory"
        for worker in list(w.workers.workers()):
            w.workers.on_lost(worker.identity)
        w.greet()
        await w.until("it to fail", lambda: w.current().state.phase == "failed")
        with pytest.raises(NotReady, match="no memory"):
            await w.control.load(NAME)
        w.router.bad.clear()
        await w.control.load(NAME)
        assert (await w.answer()).version == version


async def test_a_model_that_is_new_in_the_repository_can_be_loaded(root: Path) -> None:
    add(root, b"old")
    async with world(root) as w:
        version = add(root, b"other", "other")
        w.router.bad[version] = "no memory"
        with pytest.raises(NotReady, match="no memory"):
            await w.control.load("other")
        assert [model.state.phase for model in w.routing.of("other")] == ["failed"], "it is shown with the reason"
        w.router.bad.clear()
        await w.control.load("other")
        assert (await w.answer(model="other")).version == version


@pytest.mark.parametrize("order", [Switch, canary])
async def test_a_model_that_is_unloaded_while_an_order_runs_stays_unloaded(root: Path, order: Any) -> None:  # noqa: ANN401 - makes an order
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        peers = Peers()

        async def unload(_name: str, _traffic: Traffic, *, at_once: bool) -> None:
            await w.control.unload(NAME)

        peers.prepare = unload  # type: ignore[method-assign]  # what happens meanwhile
        await w.control.order(NAME, order(new), "admin", peers)
        assert w.control.names() == []
        assert w.phases() == {old: ("current", "unloaded")}
        assert set(w.workers._models) == set()
        await w.control.load(NAME)
        assert set(w.roles()) == {old, new}, "it was written: the next load serves it"


# ------------------------------------------------------------ files that change


async def test_a_changed_traffic_json_is_served_and_what_it_needs_no_more_is_let_go(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        write(root, Traffic(current=new))
        await w.control.reconcile(NAME)
        assert w.roles() == {new: "current"}
        assert w.control.traffic(NAME).current == new
        write(root, Traffic(current=new, canary=Canary(version=old, percent=10.0, shadow=True)))
        await w.control.reconcile(NAME)
        assert w.roles() == {new: "current", old: "shadow"}


async def test_an_edited_model_yaml_is_loaded_beside_the_old_one_and_takes_its_place(root: Path) -> None:
    version = add(root, b"old")
    async with world(root) as w:
        before = w.current()
        yaml(root, "batching: {max_rows: 2}\n")
        w.router.holds.add(version)
        look = asyncio.create_task(w.control.reconcile(NAME))
        await w.until("the load", lambda: w.router.held)
        await w.answer()
        w.router.finish()
        await look
        assert w.current() is not before
        assert (w.current().version, w.current().max_rows, w.current().state.role) == (version, 2, "current")
        assert list(w.routing.models()) == [w.current()]
        assert w.metrics.registry.get_sample_value(
            "headrace_version_requests_total", {"model": NAME, "version": version, "outcome": "ok"}
        ), "the same version goes on counting"


@pytest.mark.parametrize(
    ("more", "why"), [("colour: red\n", "colour"), ("batching: {max_rows: 0}\n", "max_rows"), (None, "is unknown")]
)
async def test_a_bad_model_yaml_is_noted_with_the_old_one_which_goes_on_and_a_good_one_clears_that(
    root: Path, more: str | None, why: str
) -> None:
    add(root, b"old")
    async with world(root) as w:
        changes: list[str] = []
        w.control.changed = lambda: changes.append(w.current().state.refused)
        before = w.current()
        await w.control.reconcile(NAME)
        changes.clear()
        (root / NAME / "model.yaml").unlink() if more is None else yaml(root, more)
        await w.control.reconcile(NAME)
        await w.control.reconcile(NAME)
        assert w.current() is before
        assert why in before.state.refused
        assert str(root) not in before.state.refused
        assert len(changes) == 1, "told once"
        await w.answer()
        yaml(root)  # as it was
        await w.control.reconcile(NAME)
        assert (w.current(), before.state.refused) == (before, "")
        yaml(root, "batching: {max_rows: 2}\n")
        await w.control.reconcile(NAME)
        assert (w.current().max_rows, w.current().state.refused) == (2, "")


async def test_orders_go_on_with_the_old_model_yaml_while_the_new_one_is_refused(root: Path) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        yaml(root, "colour: red\n")
        await w.control.reconcile(NAME)
        await w.order(Switch(new))
        assert (await w.answer()).version == new


async def test_a_traffic_json_that_can_not_be_served_is_noted_too(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        w.router.bad[new] = "no memory"
        write(root, Traffic(current=new))
        await w.control.reconcile(NAME)
        assert (w.current().version, w.roles()) == (old, {old: "current"})
        assert "no memory" in w.current().state.refused
        (root / NAME / "traffic.json").write_text("{")
        await w.control.reconcile(NAME)
        assert "traffic.json" in w.current().state.refused
        assert (await w.answer()).version == old


async def test_of_several_new_versions_none_stays_when_one_of_them_fails(root: Path) -> None:
    old, new, third = add(root, b"old"), add(root, b"new"), add(root, b"third")
    async with world(root) as w:
        before = Before(w)
        w.router.bad[third] = "no memory"
        write(root, Traffic(current=new, canary=Canary(version=third, percent=5.0)))
        await w.control.reconcile(NAME)
        assert w.router.loads() == [old, new, third]
        assert w.roles() == {old: "current"}
        w.current().state.refused = ""
        write(root, Traffic(current=old, history=before.history))
        before.check()


async def test_a_version_that_is_leaving_is_loaded_anew_when_it_is_ordered_again(root: Path) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with world(root) as w:
        await w.order(canary(new, 100.0))
        leaving = w.model(new)
        leaving.requests += 1  # as while one is under way
        await w.order(RollBack())
        assert leaving.state.role == "retiring"
        await w.order(canary(new, 100.0))
        split = w.routing.split(NAME)
        assert split is not None
        assert split.canary not in {None, leaving}
        leaving.requests -= 1
        w.versions.tidy()
        assert [model for model in w.routing.of(NAME) if model.version == new] == [split.canary]
        assert (await w.answer()).version == new


async def test_a_model_that_is_not_served_is_not_reconciled(root: Path) -> None:
    add(root, b"old")
    async with world(root) as w:
        await w.control.unload(NAME)
        await w.control.reconcile(NAME)
        await w.control.reconcile("nobody")
        assert w.control.names() == []
