"""Identical requests: one is computed, and nobody's leaving hurts the others."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable

import pytest

from gateway.single_flight import SingleFlight
from shared.errors import DeadlineExceeded, HeadraceError, InternalFault, InvalidInput, Overloaded

LIMIT_S = 10.0


class Work:
    """What is computed: how often it began, and a way to end it from outside."""

    def __init__(self) -> None:
        self.begun: list[asyncio.Future[str]] = []
        self.changed = asyncio.Event()

    async def __call__(self) -> str:
        future = asyncio.get_running_loop().create_future()
        self.begun.append(future)
        self.changed.set()
        return await future

    async def until(self, count: int) -> "asyncio.Future[str]":
        """The run number `count`, once it has begun."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.begun) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.begun[count - 1]


def started(flight: SingleFlight[str], work: Work, count: int, key: bytes = b"k") -> "list[asyncio.Task[str]]":
    return [asyncio.ensure_future(flight.run(key, work)) for _ in range(count)]


async def turn() -> None:
    """Let everything that is able to go on do so: each waits for a future, and none for a time."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_hundred_identical_ones_are_computed_once() -> None:
    flight, work = SingleFlight[str](), Work()
    tasks = started(flight, work, 100)
    (await work.until(1)).set_result("answer")
    assert await asyncio.gather(*tasks) == ["answer"] * 100
    assert (len(work.begun), flight.led, flight.joined, len(flight)) == (1, 1, 99, 0)


async def test_others_are_computed_beside_it_and_the_next_one_anew() -> None:
    flight, work = SingleFlight[str](), Work()
    one, other = *started(flight, work, 1, b"a"), *started(flight, work, 1, b"b")
    await work.until(2)
    assert len(flight) == 2
    for number, future in enumerate(work.begun):
        future.set_result(str(number))
    assert [await one, await other] == ["0", "1"]
    again = started(flight, work, 1, b"a")
    (await work.until(3)).set_result("2")
    assert await again[0] == "2"
    assert (flight.led, flight.joined) == (3, 0)


async def test_a_waiter_that_leaves_hurts_nobody() -> None:
    flight, work = SingleFlight[str](), Work()
    tasks = started(flight, work, 3)
    future = await work.until(1)
    await turn()
    tasks[1].cancel()
    await turn()
    assert tasks[1].cancelled()
    assert not future.cancelled()
    future.set_result("answer")
    assert [await tasks[0], await tasks[2]] == ["answer"] * 2
    assert flight.joined == 1


async def test_a_waiter_whose_deadline_passes_hurts_nobody() -> None:
    flight, work = SingleFlight[str](), Work()
    (leader,) = started(flight, work, 1)
    future = await work.until(1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await flight.run(b"k", work)
    future.set_result("answer")
    assert await leader == "answer"


async def test_when_the_leader_is_cancelled_one_waiter_takes_over() -> None:
    flight, work = SingleFlight[str](), Work()
    tasks = started(flight, work, 10)
    await work.until(1)
    await turn()
    tasks[0].cancel()
    (await work.until(2)).set_result("second")
    assert await asyncio.gather(*tasks[1:]) == ["second"] * 9
    assert tasks[0].cancelled()
    assert (len(work.begun), flight.led, flight.joined, len(flight)) == (2, 2, 8, 0)


@pytest.mark.parametrize("own", [DeadlineExceeded("too late"), Overloaded("no room")])
async def test_when_the_leader_fails_for_its_own_reason_one_waiter_takes_over(own: HeadraceError) -> None:
    flight, work = SingleFlight[str](), Work()
    tasks = started(flight, work, 10)
    future = await work.until(1)
    await turn()
    future.set_exception(own)
    (await work.until(2)).set_result("second")
    with pytest.raises(type(own)):
        await tasks[0]
    assert await asyncio.gather(*tasks[1:]) == ["second"] * 9
    assert len(work.begun) == 2


async def test_leaders_may_be_lost_one_after_another() -> None:
    flight, work = SingleFlight[str](), Work()
    tasks = started(flight, work, 5)
    for number in range(1, 5):
        (await work.until(number)).set_exception(DeadlineExceeded("too late"))
    (await work.until(5)).set_result("last")
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(end) for end in ends] == [DeadlineExceeded] * 4 + [str]
    assert len(flight) == 0


async def test_nobody_is_left_when_all_leave() -> None:
    flight, work = SingleFlight[str](), Work()
    tasks = started(flight, work, 5)
    await work.until(1)
    await turn()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() for task in tasks)
    assert (len(work.begun), len(flight)) == (1, 0)


async def test_the_inputs_own_failure_is_everybodys_and_each_has_its_own_exception() -> None:
    flight, work = SingleFlight[str](), Work()
    tasks = started(flight, work, 10)
    future = await work.until(1)
    await turn()
    future.set_exception(InvalidInput("inputs[0] is no image"))
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, InvalidInput) and end.text == "inputs[0] is no image" for end in ends)
    assert len({id(end) for end in ends}) == 10
    assert (len(work.begun), flight.joined, len(flight)) == (1, 9, 0)


async def test_a_bug_is_everybodys_too() -> None:
    flight, work = SingleFlight[str](), Work()
    tasks = started(flight, work, 3)
    future = await work.until(1)
    await turn()
    future.set_exception(ZeroDivisionError())
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(end) for end in ends] == [ZeroDivisionError, InternalFault, InternalFault]
    assert len(work.begun) == 1


class Bug(Exception):
    """Of nobody's making."""


@pytest.mark.parametrize("error", [InvalidInput, Bug])
async def test_a_shared_failure_leaves_nothing_that_only_the_collector_finds(error: type[Exception]) -> None:
    flight: SingleFlight[str] = SingleFlight()
    raised: list[weakref.ref[Exception]] = []

    async def fails() -> str:
        await asyncio.sleep(0)
        failure = error("no")
        raised.append(weakref.ref(failure))
        try:
            raise failure
        finally:
            del failure  # the frame that raises may not be what keeps it

    async def asks() -> None:
        try:
            await flight.run(b"k", fails)
        except (HeadraceError, Bug) as caught:
            raised.append(weakref.ref(caught))

    gc.collect()
    gc.disable()
    try:
        await asyncio.gather(*(asks() for _ in range(3)))
        await turn()
        assert len(raised) == 4
        assert [each() for each in raised] == [None] * 4
    finally:
        gc.enable()


async def test_a_failure_that_nobody_waits_for_is_its_callers_alone() -> None:
    flight: SingleFlight[str] = SingleFlight()

    async def fails() -> str:
        raise InvalidInput("no")

    compute: Callable[[], Awaitable[str]] = fails
    with pytest.raises(InvalidInput):
        await flight.run(b"k", compute)
    assert (flight.led, flight.joined, len(flight)) == (1, 0, 0)
