"""Several gateways' cores in one process over one repository, with the real sockets between them."""

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gateway import everywhere
from gateway.everywhere import Everywhere
from gateway.orders import Order, Promote, RollBack, StartCanary, Switch
from gateway.peers import Ask
from shared import repository_writer
from shared.errors import HeadraceError, InternalFault, NotReady
from shared.settings import Settings
from shared.traffic import Canary, Traffic
from tests.support.lives_parts import LIMIT_S, NAME, ROLLBACK_LOOK_S, World, add, given_up

COUNT = 3


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


class Gateway:
    """One of them."""

    def __init__(self, root: Path, index: int, sockets: list[Path]) -> None:
        self.sockets = sockets
        self.world = World(Settings(repository=root))
        self.everywhere = Everywhere(index, sockets, self.world.control)
        self.everywhere.connect(lambda: b"", lambda: {"ready": True, "reason": None})
        self.world.lives.begin(self.everywhere, leads=index == 0)

    async def start(self) -> None:
        """With a worker."""
        self.world.greet()
        await self.world.ready()
        await self.everywhere.start()

    def stop(self) -> None:
        """Answer the others no more."""
        self.everywhere.close()
        self.world.close()


@asynccontextmanager
async def gateways(root: Path) -> AsyncIterator[list[Gateway]]:
    with TemporaryDirectory(prefix="hr-") as folder:
        sockets = [Path(folder) / f"gateway-{each}.peer" for each in range(COUNT)]
        all_ = [Gateway(root, index, sockets) for index in range(COUNT)]
        try:
            async with asyncio.timeout(2 * LIMIT_S):
                for each in all_:
                    await each.start()
                yield all_
        finally:
            for each in all_:
                each.stop()


def seen(gateway: Gateway) -> object:
    """What one serves, and what it knows of traffic."""
    world = gateway.world
    split = world.routing.split(NAME)
    assert split is not None
    canary = split.canary.version if split.canary is not None else None
    return world.roles(), split.current.version, canary, split.percent, world.control.traffic(NAME).without_history()


@pytest.mark.parametrize("asked", range(COUNT))
async def test_an_order_through_any_gateway_is_loaded_proven_and_in_force_at_all(root: Path, asked: int) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with gateways(root) as all_:
        orders: list[tuple[Order, dict[str, str]]] = [
            (StartCanary(Canary(version=new, percent=50.0)), {old: "current", new: "canary"}),
            (Promote(), {old: "standby", new: "current"}),
            (RollBack(), {old: "current", new: "standby"}),
        ]
        for order, roles in orders:
            after = await all_[asked].everywhere.order(NAME, order, "admin")
            assert [each.world.roles() for each in all_] == [roles] * COUNT
            assert [seen(each) for each in all_] == [seen(all_[0])] * COUNT
            assert after.without_history() == all_[0].world.on_disk().without_history()
        loads = [each.world.router.loads().count(new) for each in all_]
        assert loads == [1] * COUNT, "going back and forth loads nothing again"
        assert len(all_[0].world.on_disk().history) == 1 + len(orders)


@pytest.mark.parametrize(("asked", "bad"), [(0, 1), (0, 2), (2, 0), (2, 1), (1, 1)])
async def test_one_that_can_not_load_it_ends_the_order_for_all_and_everything_stays(
    root: Path, asked: int, bad: int
) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with gateways(root) as all_:
        all_[bad].world.router.bad[new] = "no memory"
        before, disk = [seen(each)[1:] for each in all_], all_[0].world.on_disk()  # type: ignore[index]  # a tuple
        with pytest.raises(NotReady, match="no memory"):
            await all_[asked].everywhere.order(NAME, Switch(new), "admin")
        assert [seen(each)[1:] for each in all_] == before  # type: ignore[index]  # a tuple
        assert all_[0].world.on_disk() == disk
        assert all_[0].world.roles() == all_[bad].world.roles() == {old: "current"}
        for each in all_:
            assert (await each.world.answer()).version == old
        all_[bad].world.router.bad.clear()
        await all_[asked].everywhere.order(NAME, Switch(new), "admin")
        assert [each.world.roles() for each in all_] == [{old: "standby", new: "current"}] * COUNT


@pytest.mark.parametrize("asked", range(COUNT))
async def test_a_rollback_that_the_disk_refuses_is_in_force_at_all_and_outlives_the_one_that_led(
    root: Path, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with gateways(root) as all_:
        await all_[0].everywhere.order(NAME, StartCanary(Canary(version=new, percent=50.0)), "admin")
        really = repository_writer._write

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(repository_writer, "_write", full)
        await all_[asked].everywhere.order(NAME, RollBack("bad", ends=new), "admin")
        for each in all_:
            assert each.world.roles() == {old: "current"}
            assert "No space left" in each.everywhere.standing(NAME).unwritten
            await each.world.control.reconcile(NAME)
            assert each.world.roles() == {old: "current"}, "what the disk still says does not bring it back"
        again = Gateway(root, 0, all_[0].sockets)  # one that is started anew reads the old file
        all_[0].everywhere.close()
        try:
            await again.start()
            assert again.world.roles() == {old: "current"}
            await again.world.control.reconcile(NAME)
            assert again.world.roles() == {old: "current"}
        finally:
            again.stop()
        monkeypatch.setattr(repository_writer, "_write", really)
        last = all_[-1].world
        await last.control.write(NAME)
        assert (last.on_disk().canary, last.on_disk().history[-1]["reason"]) == (None, "bad")
        for each in all_:
            await each.world.control.write(NAME)
            await each.world.control.reconcile(NAME)
            assert (each.everywhere.standing(NAME).unwritten, each.world.roles()) == ("", {old: "current"})
            assert each.world.control.traffic(NAME) == last.on_disk()
        assert [change["action"] for change in last.on_disk().history[-2:]] == ["canary", "rollback"], "once"


def hang(some: list[Gateway], monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """They answer nobody until this is set."""
    goes_on = asyncio.Event()
    for each in some:

        async def hangs(
            asked: Ask, really: Callable[[Ask], Awaitable[bytes]] = each.everywhere._server._answer
        ) -> bytes:
            await goes_on.wait()
            return await really(asked)

        monkeypatch.setattr(each.everywhere._server, "_answer", hangs)
    return goes_on


async def test_one_that_hangs_is_not_waited_for_as_long_as_a_load_may_take(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with gateways(root) as all_:
        monkeypatch.setattr(everywhere, "CONTROL_LIMIT_S", 10 * LIMIT_S)
        for limit in ("FOLLOW_LIMIT_S", "SHOW_LIMIT_S"):
            monkeypatch.setattr(everywhere, limit, 0.2)
        goes_on = hang(all_[2:], monkeypatch)
        await all_[0].everywhere.order(NAME, Switch(new), "admin")
        await all_[1].world.until("the one that lives", lambda: all_[1].world.current().version == new)
        assert [each.world.current().version for each in all_] == [new, new, old]
        goes_on.set()
        await all_[2].world.lives.watch.look()  # as about once a second
        await all_[2].world.until("it to follow", lambda: seen(all_[2]) == seen(all_[0]))


@pytest.mark.parametrize(("asked", "hung"), [(0, [2]), (0, [1, 2]), (1, [0]), (2, [0]), (2, [0, 1])])
async def test_one_that_hangs_does_not_delay_a_rollback(
    root: Path, asked: int, hung: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with gateways(root) as all_:
        await all_[0].everywhere.order(NAME, StartCanary(Canary(version=new, percent=50.0)), "admin")
        for limit in ("FOLLOW_LIMIT_S", "SHOW_LIMIT_S"):  # what is waited for so long is not waited for before
            monkeypatch.setattr(everywhere, limit, 10 * LIMIT_S)
        goes_on = hang([all_[index] for index in hung], monkeypatch)
        order = asyncio.create_task(all_[asked].everywhere.order(NAME, RollBack("bad", ends=new), "admin"))
        for index in sorted({*range(COUNT)} - {*hung}):
            world = all_[index].world
            await world.until(f"gateway {index}", lambda world=world: world.roles() == {old: "current"})  # type: ignore[misc]  # a default
        assert not order.done(), "it waits until those that hang follow, or for its limit"
        goes_on.set()
        await order
        assert [seen(each) for each in all_] == [seen(all_[0])] * COUNT
        assert [change["action"] for change in all_[0].world.on_disk().history[-2:]] == ["canary", "rollback"], "once"


def test_a_rollback_is_in_force_within_a_second_though_a_gateway_hangs() -> None:
    looks = 3  # what is known before another one is asked to lead, what is changed, and whether it still is that
    assert everywhere.HURRY_LIMIT_S + looks * ROLLBACK_LOOK_S < 1.0


async def test_one_that_is_gone_is_done_without_and_follows_when_it_comes_back(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with gateways(root) as all_:
        first, second, third = all_
        third.everywhere.close()
        await second.everywhere.order(NAME, StartCanary(Canary(version=new, percent=5.0)), "admin")
        assert [each.world.roles() for each in all_] == [{old: "current", new: "canary"}] * 2 + [{old: "current"}]
        await third.world.lives.watch.look()  # as about once a second
        await third.world.until("it to follow", lambda: seen(third) == seen(second))
        first.everywhere.close()
        await second.everywhere.order(NAME, Promote(), "admin")
        await first.world.control.reconcile(NAME)
        assert seen(first) == seen(second)


@pytest.mark.parametrize("error", [InternalFault(), NotReady("busy")])
async def test_what_is_written_is_no_failure_though_one_says_so_afterwards(
    root: Path, error: HeadraceError, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with gateways(root) as all_:

        async def fails(_name: str) -> None:
            raise error

        monkeypatch.setattr(all_[1].world.control, "reconcile", fails)
        after = await all_[0].everywhere.order(NAME, Switch(new), "admin")
        assert (after.current, all_[0].world.on_disk().current) == (new, new)
        assert [each.world.current().version for each in all_] == [new, old, new]


async def test_two_admins_at_two_gateways_at_once_have_their_turns(root: Path) -> None:
    old, new, third = add(root, b"old"), add(root, b"new"), add(root, b"third")
    async with gateways(root) as all_:
        outcomes = await asyncio.gather(
            all_[1].everywhere.order(NAME, Switch(new), "one"),
            all_[2].everywhere.order(NAME, StartCanary(Canary(version=third, percent=5.0)), "two"),
            return_exceptions=True,
        )
        assert not [outcome for outcome in outcomes if isinstance(outcome, BaseException)], outcomes
        assert [seen(each) for each in all_] == [seen(all_[0])] * COUNT
        history = all_[0].world.on_disk().history
        assert {entry["by"] for entry in history} >= {"one", "two"}
        assert old in all_[0].world.roles()


async def test_the_guard_of_any_gateway_rolls_back_at_all(root: Path) -> None:
    old, new = add(root, b"old"), add(root, b"new")
    async with gateways(root) as all_:
        await all_[0].everywhere.order(NAME, StartCanary(Canary(version=new, percent=50.0)), "admin")
        follower = all_[2].world
        number = follower.model(new).number
        follower.router.answers = lambda b: given_up(b, "internal", "it raised") if b.model == number else None
        for each in range(200):
            try:
                await follower.answer(routing_key=str(each))
            except InternalFault:
                assert follower.control.traffic(NAME).canary is not None
            if follower.lives.judge._ordered:
                break
        await follower.until("the rollback", lambda: not follower.lives.judge._ordered)
        assert [each.world.roles() for each in all_] == [{old: "current"}] * COUNT
        entry = all_[0].world.on_disk().history[-1]
        assert (entry["action"], entry["by"], entry["from"], entry["to"]) == ("rollback", "guard", new, old)
        assert entry["figures"]["measure"] == "error rate"
        for each in all_:
            assert (await each.world.answer()).version == old


async def test_a_model_that_is_unloaded_at_all_takes_no_orders(root: Path) -> None:
    _, new = add(root, b"old"), add(root, b"new")
    async with gateways(root) as all_:
        await all_[1].everywhere.unload(NAME)
        before = all_[0].world.on_disk()
        for each in all_:
            with pytest.raises(HeadraceError, match="is not served"):
                await each.everywhere.order(NAME, Switch(new), "admin")
        assert all_[0].world.on_disk() == before == Traffic(current=before.current, history=before.history)
        await all_[2].everywhere.load(NAME)
        await all_[2].everywhere.order(NAME, Switch(new), "admin")
        assert [each.world.current().version for each in all_] == [new] * COUNT
