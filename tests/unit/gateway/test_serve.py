import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from gateway import serve as serve_module
from gateway.serve import Announcement, serve
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
