"""Several gateways' `Everywhere` in one process, over the real sockets between them."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from gateway import everywhere as module
from gateway import shielded, together
from gateway.everywhere import Everywhere
from gateway.orders import Order, Promote, RollBack, applied
from gateway.peers import Control as ControlAsk
from gateway.state import ModelState
from shared.errors import NotReady, Overloaded, UnknownModel
from shared.traffic import Canary, Traffic

LIMIT_S = 5.0


class Control:
    """Stands in for one gateway's model control."""

    def __init__(self, *served: str, broken: str = "") -> None:
        self.served = set(served)
        self.broken = broken
        self.done: list[tuple[str, str]] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.asked, self.loaded = asyncio.Event(), asyncio.Event()

    def index(self) -> list[ModelState]:
        return [ModelState(name, "0" * 16, "ready") for name in sorted(self.served)]

    async def load(self, name: str) -> None:
        await self._note("load", name)
        if name == "absent":
            raise UnknownModel("no model of that name")
        self.served.add(name)
        self.loaded.set()
        if name == self.broken:
            raise NotReady("its weights are gone")

    async def unload(self, name: str) -> None:
        await self._note("unload", name)
        if name not in self.served:
            raise UnknownModel("it is not served")
        self.served.discard(name)

    def kept(self) -> dict[str, Traffic]:
        return {}

    async def _note(self, verb: str, name: str) -> None:
        self.done.append((verb, name))
        self.asked.set()
        await self.hold.wait()


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="hr-") as name:
        yield Path(name)


def made(folder: Path, index: int, count: int, control: Control, ready: bool = True) -> Everywhere:
    one: Any = control
    everywhere = Everywhere(index, [folder / f"gateway-{each}.peer" for each in range(count)], one)
    text = f"# HELP number Its number.\n# TYPE number gauge\nnumber {index}.0\n".encode()
    reason = None if ready else "model 'sim' is not ready"
    everywhere.connect(lambda: text, lambda: {"ready": ready, "reason": reason, "index": index})
    return everywhere


@asynccontextmanager
async def running(folder: Path, *controls: Control) -> AsyncIterator[list[Everywhere]]:
    all_ = [made(folder, index, len(controls), control) for index, control in enumerate(controls)]
    for each in all_:
        await each.start()
    try:
        async with asyncio.timeout(LIMIT_S):
            yield all_
    finally:
        for each in all_:
            each.close()
            each.close()


async def test_a_version_that_any_gateway_holds_is_held_and_one_that_is_gone_keeps_nobody_waiting(folder: Path) -> None:
    async with running(folder, Control("one"), Control("two"), Control("three")) as (first, _, third):
        assert await first.held() == {(name, "0" * 16) for name in ("one", "two", "three")}
        third.close()
        assert await first.held() == {(name, "0" * 16) for name in ("one", "two")}


async def test_any_gateway_shows_all_and_names_who_does_not_answer(folder: Path) -> None:
    async with running(folder, Control(), Control(), Control()) as (first, second, third):
        for asked in (first, second, third):
            lines = (await asked.metrics()).decode().splitlines()
            assert [line for line in lines if line.startswith("number")] == [
                f'number{{gateway="{n}"}} {n}.0' for n in (0, 1, 2)
            ]
            shown = await asked.debug()
            assert (shown["ready"], shown["reason"]) == (True, None)
            assert {number: each["index"] for number, each in shown["gateways"].items()} == {"0": 0, "1": 1, "2": 2}
        second.close()
        assert 'headrace_gateway_up{gateway="1"} 0.0' in (await first.metrics()).decode()
        shown = await third.debug()
        assert (shown["ready"], shown["reason"]) == (False, "gateway 1: it does not answer")
        assert list(shown["gateways"]) == ["0", "1", "2"]


async def test_ready_is_only_when_all_are(folder: Path) -> None:
    first, second = made(folder, 0, 2, Control()), made(folder, 1, 2, Control(), ready=False)
    await first.start()
    await second.start()
    shown = await first.debug()
    assert (shown["ready"], shown["reason"]) == (False, "gateway 1: model 'sim' is not ready")
    first.close()
    second.close()


async def test_one_that_hangs_costs_a_scrape_no_more_than_its_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "SHOW_LIMIT_S", 0.1)
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(folder / "gateway-1.peer"))
        hung.listen()
        monkeypatch.setattr(module, "ADOPT_LIMIT_S", 0.1)
        first = made(folder, 0, 2, Control())
        await first.start()
        async with asyncio.timeout(LIMIT_S):
            assert 'headrace_gateway_up{gateway="1"} 0.0' in (await first.metrics()).decode()
        first.close()


@pytest.mark.parametrize("asked", [0, 1, 2])
async def test_a_model_is_loaded_and_unloaded_at_all_whichever_was_asked(folder: Path, asked: int) -> None:
    controls = [Control("sim"), Control("sim"), Control("sim")]
    async with running(folder, *controls) as gateways:
        await gateways[asked].load("more")
        assert [control.served for control in controls] == [{"sim", "more"}] * 3
        await gateways[asked].unload("sim")
        assert [control.served for control in controls] == [{"more"}] * 3
        assert [control.done for control in controls] == [[("load", "more"), ("unload", "sim")]] * 3
        assert [state.name for state in gateways[asked].index()] == ["more"]


async def test_what_two_gateways_are_asked_at_once_ends_the_same_at_all(folder: Path) -> None:
    controls = [Control("sim"), Control("sim")]
    controls[0].hold.clear()
    async with running(folder, *controls) as (first, second):
        told = [asyncio.create_task(first.unload("sim")), asyncio.create_task(second.load("sim"))]
        await controls[0].asked.wait()
        controls[0].hold.set()
        await asyncio.gather(*told)
        assert controls[0].done == controls[1].done == [("unload", "sim"), ("load", "sim")]


async def test_failures_reach_the_caller_and_a_model_that_can_not_load_fails_everywhere(folder: Path) -> None:
    controls = [Control(broken="bad"), Control(broken="bad")]
    async with running(folder, *controls) as (_, second):
        with pytest.raises(UnknownModel, match="no model of that name"):
            await second.load("absent")
        assert controls[1].done == [], "the first one knows that there is none"
        with pytest.raises(NotReady, match="weights are gone"):
            await second.load("bad")
        assert controls[1].done == [("load", "bad")]


async def test_the_next_one_takes_over_when_the_first_is_gone(folder: Path) -> None:
    controls = [Control("sim"), Control("sim"), Control("sim")]
    async with running(folder, *controls) as (first, _, third):
        first.close()
        await third.unload("sim")
        assert [control.served for control in controls] == [{"sim"}, set(), set()]


async def test_a_gateway_that_starts_later_has_what_was_asked_before(folder: Path) -> None:
    controls = [Control("sim", "gone"), Control("sim", "gone")]
    async with running(folder, *controls) as (first, second):
        await first.unload("gone")
        await first.load("more")
        await first.load("twice")
        await first.unload("twice")
        second.close()
        again = Control("sim", "gone")
        newborn = made(folder, 1, 2, again)
        await newborn.start()
        assert again.served == {"sim", "more"} == controls[0].served
        first.close()
        await newborn.unload("sim")
        third = Control("sim", "gone")
        next_life = made(folder, 0, 2, third)
        await next_life.start()
        assert third.served == {"more"}, "it tells those that come after it"
        next_life.close()
        newborn.close()


async def test_a_load_that_takes_long_does_not_keep_a_new_gateway_from_starting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ADOPT_LIMIT_S", 0.1)
    async with running(folder, Control(), Control()) as (first, second):
        await first.load("slow")
        second.close()
        again = Control()
        again.hold.clear()
        newborn = made(folder, 1, 2, again)
        await newborn.start()
        assert again.served == set()
        again.hold.set()
        await again.loaded.wait()
        newborn.close()


@pytest.mark.parametrize("asked", [0, 1])
async def test_a_caller_that_gives_up_does_not_leave_the_gateways_different(folder: Path, asked: int) -> None:
    controls = [Control(), Control()]
    controls[0].hold.clear()
    async with running(folder, *controls) as gateways:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await gateways[asked].load("more")
        await controls[0].asked.wait()
        controls[0].hold.set()
        await controls[1].loaded.wait()
        assert controls[0].served == controls[1].served == {"more"}


async def test_what_goes_on_for_callers_that_have_left_is_bounded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shielded, "MAX_ORDERS", 2)
    control = Control()
    control.hold.clear()
    async with running(folder, control) as (only,):
        for _ in range(2):
            leaving = asyncio.create_task(only.load("more"))
            await asyncio.wait((leaving,), timeout=0)
            leaving.cancel()
            await asyncio.wait((leaving,))
        with pytest.raises(Overloaded):
            await only.load("more")
        control.hold.set()
        await control.loaded.wait()
        while only._orders._tasks:
            await asyncio.wait(only._orders._tasks)
        await only.unload("more")
        assert control.done == [("load", "more")] * 2 + [("unload", "more")]


async def test_several_who_ask_for_an_unknown_model_at_once_are_all_told_so(folder: Path) -> None:
    controls = [Control(), Control()]
    controls[0].hold.clear()
    async with running(folder, *controls) as (first, second):
        told = [asyncio.create_task(each.load("absent")) for each in (first, first, second)]
        await controls[0].asked.wait()
        await asyncio.wait(told, timeout=0.05)
        controls[0].hold.set()
        outcomes = await asyncio.gather(*told, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [UnknownModel] * 3


async def test_a_new_gateway_asks_all_at_once_and_takes_the_first_that_knows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ADOPT_LIMIT_S", 60.0)
    knows, newborn = Control(), Control("gone")
    with socket.socket(socket.AF_UNIX) as hung, socket.socket(socket.AF_UNIX) as also_hung:
        for index, each in enumerate((hung, also_hung)):
            each.bind(str(folder / f"gateway-{index}.peer"))
            each.listen()
        third, fourth, last = made(folder, 2, 5, Control()), made(folder, 3, 5, knows), made(folder, 4, 5, newborn)
        third_starts = asyncio.create_task(third.start())  # hangs at those that hang: it knows nothing
        await asyncio.wait((third_starts,), timeout=0.05)
        fourth._caught_up = True
        await fourth._server.start()
        await fourth._answer(ControlAsk("load", "more", everywhere=False))
        async with asyncio.timeout(LIMIT_S):
            await last.start()
        assert newborn.served == {"gone", "more"}
        assert not third_starts.done()
        third_starts.cancel()
        for gateway in (third, fourth, last):
            gateway.close()


class Disk:
    """One model's traffic.json."""

    def __init__(self) -> None:
        canary = Canary(version="b" * 16, percent=5)
        self.traffic = Traffic(current="a" * 16, standby="c" * 16, canary=canary)


class Traffics(Control):
    """Carries orders out on the disk; one that `dies` is gone before it can say so."""

    def __init__(self, disk: Disk, *, dies: bool = False) -> None:
        super().__init__("sim")
        self.disk = disk
        self.in_force = disk.traffic
        self.dies = dies
        self.die: Callable[[], None] = lambda: None

    async def history(self, _name: str, _limit_s: float | None = None) -> list[dict[str, Any]]:
        return self.disk.traffic.history

    async def order(self, _name: str, order: Order, by: str, _others: object) -> Traffic:
        self.disk.traffic = applied(self.disk.traffic, order, "2026-01-01T00:00:00Z", by)
        if self.dies:
            self.die()
            await asyncio.Event().wait()
        self.in_force = self.disk.traffic
        return self.in_force

    async def reconcile(self, _name: str) -> None:
        self.in_force = self.disk.traffic

    def traffic(self, _name: str) -> Traffic:
        return self.in_force


@pytest.mark.parametrize("order", [RollBack(), Promote()])
@pytest.mark.parametrize("dies", [True, False])
async def test_an_order_is_carried_out_once_though_the_gateway_that_did_it_dies(
    folder: Path, order: Order, dies: bool
) -> None:
    disk = Disk()
    once = applied(disk.traffic, order, "2026-01-01T00:00:00Z", "tester")
    controls = Traffics(disk, dies=dies), Traffics(disk)
    async with running(folder, *controls) as (first, second):
        controls[0].die = first.close
        told = await second.order("sim", order, "tester")
    assert told == disk.traffic == once
    assert controls[1].in_force == (once if dies else Disk().traffic), "else it is told to adopt by the other"


async def test_an_order_that_a_dead_gateway_never_heard_is_carried_out(folder: Path) -> None:
    disk = Disk()
    async with running(folder, Traffics(disk), Traffics(disk)) as (first, second):
        first.close()
        await second.order("sim", RollBack(), "tester")
        assert disk.traffic.canary is None
        told = await second.order("sim", RollBack(), "tester")
    assert (told.current, told.standby) == ("c" * 16, "a" * 16)
    assert [change["action"] for change in told.history] == ["rollback"], "the last one"
