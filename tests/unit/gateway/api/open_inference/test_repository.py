"""Load and unload go to the control only when the settings allow it and the model is known."""

import asyncio
from typing import get_args

import pytest

from gateway.api.open_inference.repository import Repository, state_word
from gateway.state import ModelState, Phase
from shared.errors import HeadraceError, InvalidInput, UnknownModel, Unsupported
from tests.support.fake_flow import State


class Control:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    async def load(self, name: str) -> None:
        self.told.append(("load", name))

    async def unload(self, name: str) -> None:
        self.told.append(("unload", name))

    def index(self) -> list[ModelState]:
        return [ModelState("a", "1", "ready"), ModelState("b", "2", "no_worker", "not loaded")]


async def test_an_allowed_control_is_told() -> None:
    control = Control()
    repository = Repository(State(), control, allowed=True)

    await repository.load("b")
    await repository.unload("a")

    assert repository.is_open
    assert control.told == [("load", "b"), ("unload", "a")]
    assert [one.name for one in repository.index(only_ready=False)] == ["a", "b"]
    assert [one.name for one in repository.index(only_ready=True)] == ["a"]


@pytest.mark.parametrize(
    ("repository", "name", "error", "part"),
    [
        (Repository(State(), Control(), allowed=False), "a", Unsupported, r"gateway\.repository_control"),
        (Repository(State(), None, allowed=True), "a", Unsupported, "while it runs"),
        (Repository(State(), Control(), allowed=True), "", InvalidInput, "names no model"),
        (Repository(State(), Control(), allowed=True), "nope", UnknownModel, "'nope'"),
    ],
)
async def test_what_is_refused(repository: Repository, name: str, error: type[HeadraceError], part: str) -> None:
    with pytest.raises(error, match=part):
        await repository.unload(name)


async def test_what_has_begun_goes_on_when_the_caller_leaves() -> None:
    control, go_on = Control(), asyncio.Event()
    really = control.load

    async def slow(name: str) -> None:
        await go_on.wait()
        await really(name)

    control.load = slow  # type: ignore[method-assign]  # as a large model's
    repository = Repository(State(), control, allowed=True)
    caller = asyncio.create_task(repository.load("b"))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go_on.set()
    await asyncio.gather(*repository._orders._tasks)
    assert control.told == [("load", "b")]


def test_without_a_control_the_index_is_what_is_served() -> None:
    repository = Repository(State("x"), None, allowed=True)

    assert [one.name for one in repository.index(only_ready=False)] == ["x"]
    assert not repository.is_open


def test_every_phase_has_a_word() -> None:
    assert {state_word(phase) for phase in get_args(Phase)} == {
        "READY",
        "LOADING",
        "UNAVAILABLE",
    }
