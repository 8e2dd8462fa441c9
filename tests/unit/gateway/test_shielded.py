import asyncio

import pytest

from gateway.shielded import MAX_ORDERS, Shielded
from shared.errors import Conflict, Overloaded


async def test_an_order_goes_on_when_its_caller_has_left() -> None:
    orders, go_on, done = Shielded(), asyncio.Event(), asyncio.Event()

    async def order() -> None:
        await go_on.wait()
        done.set()

    caller = asyncio.create_task(orders.carried_out(order()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go_on.set()
    async with asyncio.timeout(5):
        await done.wait()


async def test_one_too_many_is_refused_at_once_until_another_has_ended() -> None:
    orders, go_on = Shielded(), asyncio.Event()
    callers = [asyncio.create_task(orders.carried_out(go_on.wait())) for _ in range(MAX_ORDERS)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="too many orders"):
        await orders.carried_out(go_on.wait())
    go_on.set()
    assert all(await asyncio.gather(*callers))
    assert await orders.carried_out(go_on.wait())


async def test_what_an_order_raises_reaches_its_caller_or_nobody() -> None:
    orders, go_on = Shielded(), asyncio.Event()

    async def order() -> None:
        await go_on.wait()
        raise Conflict("no")

    stays, leaves = (asyncio.create_task(orders.carried_out(order())) for _ in range(2))
    await asyncio.sleep(0)
    leaves.cancel()
    go_on.set()
    with pytest.raises(Conflict, match="no"):
        await stays
    with pytest.raises(asyncio.CancelledError):
        await leaves
