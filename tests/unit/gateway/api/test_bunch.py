import asyncio

from gateway.api.bunch import HOLD_S, SMALL_BYTES, Bunch
from tests.support import virtual_time


async def later(seconds: float) -> None:
    await asyncio.sleep(seconds)  # in virtual time


class Caller:
    """Sends on a stream; notes what begins together, and when."""

    def __init__(self) -> None:
        self.bunch: Bunch[str] = Bunch(self._begin)
        self.begun: list[tuple[float, str]] = []
        self.start_s = asyncio.get_running_loop().time()

    def send(self, *messages: str, nbytes: int = 1) -> None:
        for message in messages:
            self.bunch.add(message, nbytes, 0.0)

    def answered(self, count: int) -> None:
        for _ in range(count):
            self.bunch.answered()

    def together(self) -> list[tuple[float, str]]:
        """(seconds, messages) of each bunch so far."""
        found: dict[float, str] = {}
        for at_s, message in self.begun:
            found[at_s] = found.get(at_s, "") + message
        return [(round(at_s, 4), messages) for at_s, messages in found.items()]

    def _begin(self, message: str, _arrived_s: float) -> None:
        self.begun.append((asyncio.get_running_loop().time() - self.start_s, message))


def test_one_at_a_time_never_waits() -> None:
    async def main() -> None:
        caller = Caller()
        for message in "abc":
            caller.send(message)
            assert caller.begun[-1][1] == message
            caller.answered(1)
            await later(0.001)

    virtual_time.run(main)


def test_what_comes_while_others_are_open_begins_together_after_a_moment() -> None:
    async def main() -> list[tuple[float, str]]:
        caller = Caller()
        caller.send("a", "b")
        await later(HOLD_S / 2)
        caller.send("c")
        await later(HOLD_S)
        return caller.together()

    assert virtual_time.run(main) == [(0.0, "a"), (HOLD_S, "bc")]


def test_when_all_that_a_caller_keeps_open_are_held_nobody_else_is_waited_for() -> None:
    async def main() -> list[tuple[float, str]]:
        caller = Caller()
        caller.send("a", "b", "c")
        await later(2 * HOLD_S)  # from here on it is known to keep three open
        caller.answered(3)
        caller.send("d", "e")
        assert len(caller.begun) == 3
        caller.send("f")
        return caller.together()

    assert virtual_time.run(main) == [(0.0, "a"), (HOLD_S, "bc"), (2 * HOLD_S, "def")]


def test_a_caller_that_goes_on_one_at_a_time_waits_only_once() -> None:
    async def main() -> list[tuple[float, str]]:
        caller = Caller()
        caller.send("a", "b")
        await later(2 * HOLD_S)
        caller.answered(2)
        caller.send("c")
        await later(2 * HOLD_S)
        caller.answered(1)
        caller.send("d")
        return caller.together()[2:]

    assert virtual_time.run(main) == [(3 * HOLD_S, "c"), (4 * HOLD_S, "d")]


def test_large_messages_begin_at_once() -> None:
    async def main() -> None:
        caller = Caller()
        caller.send("a", "b", "c", nbytes=SMALL_BYTES + 1)
        assert len(caller.begun) == 3

    virtual_time.run(main)


def test_a_large_message_overtakes_nobody() -> None:
    async def main() -> list[tuple[float, str]]:
        caller = Caller()
        caller.send("a", "b", "c")
        caller.send("D", nbytes=SMALL_BYTES + 1)
        caller.send("e")
        await later(2 * HOLD_S)
        return caller.together()

    assert virtual_time.run(main) == [(0.0, "abcD"), (HOLD_S, "e")]


def test_what_is_held_begins_when_the_reading_ends_and_never_after_the_stream_has() -> None:
    async def main() -> None:
        caller = Caller()
        caller.send("a", "b")
        caller.bunch.flush()
        assert len(caller.begun) == 2
        caller.send("c")
        caller.bunch.drop()
        await later(2 * HOLD_S)
        assert (len(caller.begun), caller.bunch.open) == (2, 2)

    virtual_time.run(main)
