from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared.board import Board, Doing
from shared.handover import Refusal
from shared.messages import PROTOCOL_VERSION, FromWorker, Hello, ToWorker, Welcome
from shared.transport import Dealer
from tests.support.worker_parts import TwoSidedArena
from workers import links
from workers.backends.base import Device, DeviceLost, NoDevice
from workers.links import GONE_LOOK_S, GREET_LIMIT_S, LEAVE_LIMIT_S, REFUSED_RETRY_S, RETRY_S, Links

STICKY = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
HELLO = Hello(PROTOCOL_VERSION, 1, "worker-0", "cpu")


class DeadDevice(Device):
    """After a sticky error every call raises, the one that lets go of the arena too."""

    name = "cuda:0"

    def attach(self, memory: memoryview) -> None:
        pass

    def detach(self, memory: memoryview | None = None) -> None:
        raise RuntimeError(STICKY)


class CountingDealer(Dealer[ToWorker, FromWorker]):
    closed = 0

    def close(self) -> None:
        CountingDealer.closed += 1
        super().close()


class Greeting(SimpleNamespace):
    """Of a gateway that lives until the test says otherwise."""

    alive = True
    closed = False

    def gateway_alive(self) -> bool:
        return self.alive

    def fileno(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True


class Gateways:
    """Who is there, by socket name, and how each answers; stands in for `Knock`."""

    def __init__(self) -> None:
        self.there: dict[str, Any] = {}
        self.knocks: list[str] = []

    def at(self, path: Path, hello: Hello) -> "Knock | None":
        assert hello == HELLO
        self.knocks.append(path.name)
        return Knock(self.there[path.name]) if path.name in self.there else None


class Knock:
    """An answer: a greeting, a refusal, None for a gateway that dies, or nothing at all for one that hangs."""

    HANGS = "hangs"

    def __init__(self, outcome: Any) -> None:  # noqa: ANN401 - see the class
        self.outcome = outcome

    def fileno(self) -> int:
        return 0

    def answered(self) -> bool:
        return self.outcome is not Knock.HANGS

    def answer(self) -> Any:  # noqa: ANN401 - see the class
        if isinstance(self.outcome, Refusal):
            raise self.outcome
        return self.outcome

    def close(self) -> None:
        pass


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def arena() -> Iterator[TwoSidedArena]:
    arena = TwoSidedArena()
    yield arena
    arena.close()


@pytest.fixture
def gateways(monkeypatch: pytest.MonkeyPatch) -> Gateways:
    CountingDealer.closed = 0
    gateways = Gateways()
    monkeypatch.setattr(links, "Knock", gateways)
    monkeypatch.setattr(links, "Dealer", CountingDealer)
    return gateways


@pytest.fixture
def clock() -> Clock:
    return Clock()


def greeting(arena: TwoSidedArena, folder: Path, *, arena_bytes: int = 0) -> Greeting:
    nbytes = arena_bytes or arena.owner.nbytes
    welcome = Welcome(PROTOCOL_VERSION, 1, f"ipc://{folder}/workers", b"worker-0.1", nbytes)
    return Greeting(arena_fd=arena.owner.fd, welcome=welcome)


def links_to(clock: Clock, *names: str, device: Device | None = None) -> Links:
    pool: Any = SimpleNamespace()
    return Links([Path(name) for name in names], HELLO, device or NoDevice(), pool, clock)


def looks(links_: Links, clock: Clock, step_s: float, count: int = 1) -> None:
    for _ in range(count):
        links_.find()
        clock.now_s += step_s


def test_a_gateway_is_found_served_and_let_go_and_its_next_life_found_at_once(
    arena: TwoSidedArena, tmp_path: Path, gateways: Gateways, clock: Clock
) -> None:
    tied = links_to(clock, "gateway.sock")
    looks(tied, clock, RETRY_S, 2)
    assert tied.sessions() == []
    gateways.there["gateway.sock"] = first = greeting(arena, tmp_path)
    looks(tied, clock, RETRY_S, 2)
    (session,) = tied.sessions()
    session.doing(Doing(5, 1.0))
    board = Board(arena.owner.fd, arena.owner.nbytes)
    assert board.read("worker-0") == Doing(5, 1.0)
    board.close()
    assert tied.gone() == []
    first.alive = False
    assert tied.gone() == [session]
    tied.leave(session)
    assert (first.closed, CountingDealer.closed, tied.sessions()) == (True, 1, [])
    gateways.there["gateway.sock"] = greeting(arena, tmp_path)
    looks(tied, clock, 0.0, 2)
    assert len(tied.sessions()) == 1
    tied.close()


def test_a_gateway_that_is_gone_and_whose_memory_is_still_read_is_served_no_more_and_not_for_ever(
    arena: TwoSidedArena, tmp_path: Path, gateways: Gateways, clock: Clock
) -> None:
    tied = links_to(clock, "gateway.sock")
    gateways.there["gateway.sock"] = first = greeting(arena, tmp_path)
    looks(tied, clock, RETRY_S, 2)
    (session,) = tied.sessions()
    first.alive = False
    for _ in range(2):
        assert tied.gone() == [session]
        assert (tied.sessions(), tied.watched()) == ([], [])
        assert tied.sleep_s() == GONE_LOOK_S
        looks(tied, clock, LEAVE_LIMIT_S / 2)
    assert gateways.knocks == ["gateway.sock"], "its place is taken as long"
    clock.now_s += 1.0
    with pytest.raises(DeviceLost, match="has not ended within 120 s"):
        tied.gone()
    tied.close()
    assert (first.closed, CountingDealer.closed) == (True, 1)


def test_one_that_hangs_or_refuses_or_is_missing_keeps_no_other_waiting(
    arena: TwoSidedArena, tmp_path: Path, gateways: Gateways, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    gateways.there = {"a": Knock.HANGS, "b": Refusal("the name is taken"), "d": greeting(arena, tmp_path)}
    tied = links_to(clock, "a", "b", "c", "d")
    looks(tied, clock, 0.0, 2)
    assert len(tied.sessions()) == 1
    steps = round(GREET_LIMIT_S / RETRY_S)
    looks(tied, clock, RETRY_S, steps + 3)
    knocks = {name: gateways.knocks.count(name) for name in "abcd"}
    assert knocks["a"] == 2, "given up after the limit, then tried again"
    assert knocks["b"] == pytest.approx(GREET_LIMIT_S / REFUSED_RETRY_S, abs=1)
    assert knocks["c"] == pytest.approx(steps, rel=0.1)
    assert knocks["d"] == 1
    tied.close()


def test_sleep_is_no_longer_than_the_next_look_and_for_ever_when_all_are_there(
    arena: TwoSidedArena, tmp_path: Path, gateways: Gateways, clock: Clock
) -> None:
    tied = links_to(clock, "gateway.sock")
    looks(tied, clock, 0.0)
    assert tied.sleep_s() == pytest.approx(RETRY_S)
    gateways.there["gateway.sock"] = greeting(arena, tmp_path)
    looks(tied, clock, RETRY_S, 3)
    assert tied.sleep_s() == RETRY_S, "it has not taken our first message yet"
    tied.close()


def test_an_arena_that_can_not_be_used_is_tried_again_later(
    arena: TwoSidedArena, tmp_path: Path, gateways: Gateways, clock: Clock
) -> None:
    gateways.there["gateway.sock"] = wrong = greeting(arena, tmp_path, arena_bytes=1 << 30)
    tied = links_to(clock, "gateway.sock")
    looks(tied, clock, 0.0, 5)
    assert (wrong.closed, tied.sessions(), gateways.knocks) == (True, [], ["gateway.sock"])
    assert tied.sleep_s() == pytest.approx(REFUSED_RETRY_S)
    tied.close()


def test_a_device_that_can_not_be_detached_is_lost(
    arena: TwoSidedArena, tmp_path: Path, gateways: Gateways, clock: Clock
) -> None:
    gateways.there["gateway.sock"] = greeting(arena, tmp_path)
    tied = links_to(clock, "gateway.sock", device=DeadDevice())
    looks(tied, clock, 0.0, 2)
    with pytest.raises(DeviceLost) as caught:
        tied.leave(tied.sessions()[0])
    assert str(caught.value) == "cuda:0: CUDA error: device-side assert triggered"
    assert CountingDealer.closed == 1
    tied.close()
