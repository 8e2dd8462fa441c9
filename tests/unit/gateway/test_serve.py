import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from gateway import serve as serve_module
from gateway.serve import Announcement, serve, unless_stopped, until_settled
from gateway.state import ModelState
from shared.child import Announcer
from shared.errors import ExitCode
from shared.settings import Settings

LIMIT_S = 5.0


class State:
    """The part of ServerState that an announcement reads."""

    def __init__(self, *models: ModelState) -> None:
        self._models = list(models)
        self.changed: Callable[[], None] = lambda: None

    def models(self) -> list[ModelState]:
        return self._models

    def not_ready_reason(self) -> str | None:
        return None

    def debug(self) -> dict[str, Any]:
        return {}

    def subscribe(self, changed: Callable[[], None]) -> None:
        self.changed = changed


class Told(Announcer):
    def __init__(self) -> None:
        super().__init__(None)
        self.lines: list[str] = []

    def ready(self, process: str, detail: str) -> None:
        self.lines.append(detail)


class Stop:
    """A stop signal whose descriptor never fires by itself."""

    def __init__(self) -> None:
        self.requested = False
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        return int(self._read)

    def ask(self) -> None:
        self.requested = True
        os.write(self._write, b"x")


def announcement(state: State, told: Told) -> Announcement:
    return Announcement(told, state, (8001, 8000), Settings(), "gateway")


async def test_ready_is_announced_once_and_names_what_failed() -> None:
    good, bad = ModelState("good", "v", "loading"), ModelState("bad", "v", "failed", "weights do not fit")
    state, told = State(good, bad), Told()
    announcement(state, told)
    state.changed()
    assert told.lines == []
    good.phase = "ready"
    state.changed()
    state.changed()
    (line,) = told.lines
    assert line.startswith("gRPC 127.0.0.1:8001, HTTP 127.0.0.1:8000, models good")
    assert "NOT ready: bad (weights do not fit)" in line


async def test_no_model_that_can_be_loaded_ends_the_start_with_exit_code_4() -> None:
    state, told = State(ModelState("bad", "v", "failed", "weights do not fit")), Told()
    made = announcement(state, told)
    state.changed()
    code = await asyncio.wait_for(serve(Stop(), made, lambda: None), LIMIT_S)  # type: ignore[arg-type]  # a fake
    assert code == ExitCode.MODEL_LOAD
    assert told.lines == []


async def test_a_failing_check_does_not_end_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module, "TICK_S", 0.001)
    stop, ticks = Stop(), []

    def tick() -> None:
        ticks.append(1)
        if len(ticks) == 3:
            stop.ask()
        raise OSError("too many open files")

    made = announcement(State(ModelState("good", "v", "ready")), Told())
    assert await asyncio.wait_for(serve(stop, made, tick), LIMIT_S) == ExitCode.OK  # type: ignore[arg-type]  # a fake
    assert len(ticks) >= 3


async def test_one_of_several_waits_for_its_models_before_it_listens() -> None:
    sim, other = ModelState("sim", "0" * 16, "loading"), ModelState("other", "0" * 16, "failed")
    state = State(sim, other)
    listens = asyncio.create_task(until_settled(state, Stop(), lambda: None))  # type: ignore[arg-type]  # a fake
    await asyncio.sleep(0)
    state.changed()
    await asyncio.sleep(0)
    assert not listens.done()
    sim.phase = "ready"
    state.changed()
    async with asyncio.timeout(LIMIT_S):
        await listens


async def test_it_waits_no_longer_than_its_limit_nor_after_a_stop_and_looks_after_hangs_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve_module, "TICK_S", 0.001)
    state, stop = State(ModelState("sim", "0" * 16, "loading")), Stop()

    def tick() -> None:
        stop.ask()

    async with asyncio.timeout(LIMIT_S):
        await until_settled(state, stop, tick)  # type: ignore[arg-type]  # a fake
        monkeypatch.setattr(serve_module, "LISTEN_LATEST_S", 0.01)
        await until_settled(state, Stop(), lambda: None)  # type: ignore[arg-type]  # a fake


async def test_a_stop_ends_what_the_start_waits_for_and_failures_come_out() -> None:
    given_up = asyncio.Event()

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    async def fail() -> None:
        raise KeyError("a bug of ours")

    stop: Any = Stop()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(KeyError):
            await unless_stopped(fail(), stop)
        starting = asyncio.create_task(unless_stopped(wait_for_ever(), stop))
        await asyncio.wait((starting,), timeout=0)
        assert not starting.done()
        stop.ask()
        await starting
        assert given_up.is_set()
        await unless_stopped(wait_for_ever(), stop)  # asked for before


def test_models_that_were_unloaded_elsewhere_are_no_reason_to_give_up() -> None:
    told = Told()

    async def announce() -> None:
        Announcement(told, State(ModelState("sim", "0" * 16, "unloaded")), (1, 2), Settings(), "gateway-1")

    asyncio.run(announce())
    assert told.lines == ["gRPC 127.0.0.1:1, HTTP 127.0.0.1:2, models none"]
