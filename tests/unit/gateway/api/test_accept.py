"""The acceptor over a core that a test plays: what is asked for, begun, and in which order."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from gateway.api import accept
from gateway.api.accept import LINGER_S, OUTSTANDING, PER_TURN, Acceptor
from gateway.api.interceptors import Refusal

METHODS = ("/a.B/One", "/a.B/Two")
ONE = METHODS[0].encode()
REFUSED = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room", ())


class State:
    """A call as core hands it over, with the seconds that are left for it."""

    def __init__(self, number: int, remaining_s: float | None = None) -> None:
        self.number = number
        self.remaining_s = remaining_s


class Core:
    """gRPC's core: it hands over what a test lets come in."""

    def __init__(self) -> None:
        self.asked: Counter[bytes] = Counter()
        self.coming: asyncio.Queue[State | Exception] = asyncio.Queue()
        self.running = True

    def is_running(self) -> bool:
        return self.running

    async def _request_registered_call(self, name: bytes) -> State:
        self.asked[name] += 1
        if name != ONE:
            await asyncio.Event().wait()
        came = await self.coming.get()
        if isinstance(came, Exception):
            raise came
        return came


class Server:
    """What the acceptor needs of a grpc.aio server."""

    def __init__(self) -> None:
        self._server = Core()
        self.registered: list[str] = []

    def add_registered_method_handlers(self, service: str, methods: dict[str, Any]) -> None:
        self.registered += [f"/{service}/{method}" for method in methods]


class Context:
    """Stands for gRPC's own, made from a state; an abort ends at once."""

    def __init__(self, state: State, *_: object) -> None:
        self.state = state

    def time_remaining(self) -> float | None:
        return self.state.remaining_s

    async def abort(self, *_: object) -> None:
        raise grpc.aio.AbortError


class Door:
    """Refuses everything, and notes it."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.turns: list[int] = []
        self.expirations = 0

    def unread(self, _method: str, context: Any, _reading: int) -> Refusal:  # noqa: ANN401 - the fake above
        self.begun.append(context.state.number)
        return REFUSED

    def expired(self, _method: str) -> None:
        self.expirations += 1


@pytest.fixture
def acceptor(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Acceptor, Core, Door]]:
    """Not started yet."""

    async def handle(raw: bytes, _context: object) -> bytes:
        return raw

    monkeypatch.setattr(accept.cygrpc, "_ServicerContext", Context)
    monkeypatch.setattr(accept, "_unusable", lambda *_: None)
    server, door = Server(), Door()
    handlers = dict.fromkeys(METHODS, grpc.unary_unary_rpc_method_handler(handle))
    made = Acceptor(server, handlers, door)  # type: ignore[arg-type]  # fakes with the ports' names
    assert sorted(server.registered) == sorted(METHODS)
    yield made, server._server, door
    for task in made._tasks:
        with contextlib.suppress(RuntimeError):  # the loop is closed by now
            task.cancel()


async def turn() -> None:
    await asyncio.sleep(0)


async def test_some_calls_of_each_method_are_asked_for_at_a_time_and_the_rest_stays_in_core(
    acceptor: tuple[Acceptor, Core, Door],
) -> None:
    made, core, _ = acceptor
    assert made.start()
    await turn()
    assert core.asked == dict.fromkeys([name.encode() for name in METHODS], OUTSTANDING)


async def test_a_turn_begins_a_bounded_number_of_calls_and_then_the_newest_go_first(
    acceptor: tuple[Acceptor, Core, Door],
) -> None:
    made, core, door = acceptor
    made.start()
    await turn()
    for number in range(PER_TURN + 10):
        core.coming.put_nowait(State(number))
    async with asyncio.timeout(5):
        while not door.begun:
            await turn()
    assert door.begun == list(range(PER_TURN))
    async with asyncio.timeout(5):
        while len(door.begun) < PER_TURN + 10:
            await turn()
    assert door.begun[PER_TURN:] == list(reversed(range(PER_TURN, PER_TURN + 10)))
    assert door.expirations == 0


async def test_what_runs_out_of_time_before_it_begins_is_counted_and_held_until_its_caller_has_left(
    acceptor: tuple[Acceptor, Core, Door],
) -> None:
    made, core, door = acceptor
    made.start()
    await turn()
    for number in range(PER_TURN + 3):
        core.coming.put_nowait(State(number, remaining_s=0.0 if number >= PER_TURN else None))
    async with asyncio.timeout(5):
        while not door.expirations:
            await turn()
    assert (door.expirations, door.begun) == (3, list(range(PER_TURN)))
    assert len(made._over) == 3
    async with asyncio.timeout(LINGER_S + 5):
        while made._turning:
            await turn()
    assert not made._over, "nothing is left to look after"


async def test_a_call_that_ended_before_it_was_ours_is_no_reason_to_stop_asking(
    acceptor: tuple[Acceptor, Core, Door],
) -> None:
    made, core, door = acceptor
    made.start()
    for _ in range(2 * OUTSTANDING):
        core.coming.put_nowait(accept.cygrpc._RequestCallError())
    core.coming.put_nowait(State(7))
    async with asyncio.timeout(5):
        while not door.begun:
            await turn()
    assert door.begun == [7]


async def test_any_other_error_ends_that_request_for_calls_with_a_word_in_the_log(
    acceptor: tuple[Acceptor, Core, Door],
) -> None:
    made, core, door = acceptor
    made.start()
    core.coming.put_nowait(KeyError("a release that asks in another way"))
    core.coming.put_nowait(State(7))
    with capture_logs() as logs:
        async with asyncio.timeout(5):
            while not door.begun:
                await turn()
    assert core.asked[ONE] == OUTSTANDING + 1, "the one that got the call asked again, the other one did not"
    assert [line["event"] for line in logs] == ["gRPC takes no more requests for calls"]


def test_a_release_that_calls_its_parts_differently_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.new_event_loop()
    core = Core()
    assert accept._unusable(core, loop) is None

    async def of_another_release(_coro: object, _state: object, _loop: object) -> None:
        return

    monkeypatch.setattr(accept.cygrpc, "_schedule_rpc_coro", of_another_release)
    assert "positional" in (accept._unusable(core, loop) or "")
    monkeypatch.delattr(accept.cygrpc, "_schedule_rpc_coro")
    assert "_schedule_rpc_coro" in (accept._unusable(core, loop) or "")
    loop.close()
