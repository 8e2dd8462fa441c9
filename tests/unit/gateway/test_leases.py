import asyncio
from collections.abc import Iterator

import pytest

from gateway.leases import Lease, Leases
from gateway.request import DEFAULT_PRIORITY
from gateway.served import Terms
from shared.arena import Arena
from shared.clock import FOREVER_S
from shared.errors import TooLarge
from shared.pipeline import RawInput
from tests.support.gateway_parts import served

INLINE = 1024


def text(nbytes: int) -> RawInput:
    return RawInput(kind="text", data=bytes(nbytes))


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(1 << 20)
    yield arena
    arena.close()


def leases_of(arena: Arena, batches_ahead: int = 2) -> Leases:
    return Leases(arena, INLINE, batches_ahead)


async def test_small_payloads_take_no_slot(arena: Arena) -> None:
    with await leases_of(arena).acquire(served(), text(INLINE)) as lease:
        assert lease.payload is None
        assert lease.inputs == lease.outputs == []
        assert arena.stats().leased_bytes == 0


async def test_large_ones_take_slots_for_payload_inputs_and_outputs(arena: Arena) -> None:
    with await leases_of(arena).acquire(served(nbytes=5000), text(INLINE + 1)) as lease:
        assert lease.payload is not None
        assert [slot.ref.nbytes for slot in (*lease.inputs, *lease.outputs)] == [5000, 5000]
        lease.prepared()
        assert arena.stats().leased_bytes == 2 * 8192
    assert arena.stats().leased_bytes == 0


async def test_the_window_bounds_what_is_decoded_ahead(arena: Arena) -> None:
    leases, model = leases_of(arena, batches_ahead=2), served(max_rows=4)
    held = [await leases.acquire(model, text(0)) for _ in range(8)]
    waiting = asyncio.ensure_future(leases.acquire(model, text(0)))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert leases.waiting_items() == 1
    held[0].__exit__(None, None, None)
    (await waiting).__exit__(None, None, None)


async def test_the_window_grows_with_the_workers_that_have_the_model(arena: Arena) -> None:
    leases, model = leases_of(arena, batches_ahead=3), served(max_rows=1)
    for _ in range(3):
        await leases.acquire(model, text(0))
    waiting = [asyncio.ensure_future(leases.acquire(model, text(0))) for _ in range(3)]
    await asyncio.sleep(0)
    assert leases.waiting_items() == 3
    model.workers = 2  # two batches for each, and one being prepared
    leases.pump()
    await asyncio.gather(*waiting[:2])
    assert leases.waiting_items() == 1
    waiting[2].cancel()


async def test_a_full_window_of_one_model_holds_up_no_other(arena: Arena) -> None:
    leases, slow, fast = leases_of(arena, batches_ahead=1), served(1, max_rows=2), served(2, name="fast")
    for _ in range(2):
        await leases.acquire(slow, text(0))
    waiting = asyncio.ensure_future(leases.acquire(slow, text(0)))
    await asyncio.sleep(0)
    assert isinstance(await leases.acquire(fast, text(0)), Lease)
    waiting.cancel()


async def test_first_come_first_served_and_the_departed_are_skipped(arena: Arena) -> None:
    leases, model = leases_of(arena, batches_ahead=1), served(max_rows=2)
    held = [await leases.acquire(model, text(0)) for _ in range(2)]
    first, second, third = (asyncio.ensure_future(leases.acquire(model, text(0))) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    held[0].__exit__(None, None, None)
    await second
    assert not third.done()
    held[1].__exit__(None, None, None)
    await third


async def test_served_and_cancelled_in_the_same_turn_gives_everything_back(arena: Arena) -> None:
    leases, model = leases_of(arena, batches_ahead=1), served(max_rows=2, nbytes=5000)
    held = [await leases.acquire(model, text(0)) for _ in range(2)]
    waiting = asyncio.ensure_future(leases.acquire(model, text(0)))
    await asyncio.sleep(0)
    held[0].__exit__(None, None, None)  # serves the waiter …
    waiting.cancel()  # … which is cancelled before it wakes up
    with pytest.raises(asyncio.CancelledError):
        await waiting
    held[1].__exit__(None, None, None)
    assert arena.stats().leased_bytes == 0
    assert [await leases.acquire(model, text(0)) for _ in range(2)]  # the window is whole again


async def test_a_full_arena_makes_wait_and_a_returning_slot_serves(arena: Arena) -> None:
    leases = leases_of(arena, batches_ahead=100)
    big = served(nbytes=400_000)
    first = await leases.acquire(big, text(0))
    waiting = asyncio.ensure_future(leases.acquire(big, text(0)))
    await asyncio.sleep(0)
    assert not waiting.done()
    first.__exit__(None, None, None)
    (await waiting).__exit__(None, None, None)


async def test_what_never_fits_is_refused_naming_the_setting(arena: Arena) -> None:
    with pytest.raises(TooLarge, match=r"arena\.budget_bytes"):
        await leases_of(arena).acquire(served(), text(2 << 20))


async def test_rows_that_are_being_prepared_are_expected(arena: Arena) -> None:
    leases, model = leases_of(arena), served()
    told: list[int] = []
    leases.nobody_comes = lambda: told.append(model.preparing_rows)
    with await leases.acquire(model, text(0)) as lease:
        assert model.preparing_rows == 1
        lease.prepared()
        assert model.preparing_rows == 0
    assert told == []
    with await leases.acquire(model, text(0)):
        pass  # failed before it was prepared: a waiting batch need not expect it any more
    assert told == [0]


async def test_the_smaller_priority_number_is_served_first(arena: Arena) -> None:
    leases, model = leases_of(arena, batches_ahead=1), served(max_rows=1)
    held = await leases.acquire(model, text(0))
    order: list[str] = []

    async def wait(name: str, priority: int) -> None:
        with await leases.acquire(model, text(0), Terms(FOREVER_S, priority)) as lease:
            order.append(name)
            assert lease.priority == priority

    waiting = [asyncio.ensure_future(wait(name, priority)) for name, priority in (("b", 100), ("c", 200), ("a", 1))]
    await asyncio.sleep(0)
    held.__exit__(None, None, None)
    await asyncio.gather(*waiting)
    assert order == ["a", "b", "c"]


async def test_the_earliest_deadline_is_served_first_and_ties_in_order_of_arrival(arena: Arena) -> None:
    leases, model = leases_of(arena, batches_ahead=1), served(max_rows=1)
    held = await leases.acquire(model, text(0))
    order: list[str] = []

    async def wait(name: str, deadline_s: float) -> None:
        with await leases.acquire(model, text(0), Terms(deadline_s, DEFAULT_PRIORITY)):
            order.append(name)

    callers = (("patient", 9.0), ("first", 5.0), ("second", 5.0), ("urgent", 1.0))
    waiting = [asyncio.ensure_future(wait(*caller)) for caller in callers]
    await asyncio.sleep(0)
    held.__exit__(None, None, None)
    await asyncio.gather(*waiting)
    assert order == ["urgent", "first", "second", "patient"]


async def test_who_stands_behind_one_that_has_left_takes_its_place_at_once(arena: Arena) -> None:
    leases, model = leases_of(arena, batches_ahead=100), served()
    held = await leases.acquire(model, text(INLINE + 1))
    large = asyncio.ensure_future(leases.acquire(model, text(1 << 20)))  # the whole arena
    small = asyncio.ensure_future(leases.acquire(model, text(INLINE + 1)))
    await asyncio.sleep(0)
    assert leases.waiting_items() == 2
    large.cancel()
    with await asyncio.wait_for(small, 1.0), held:
        assert leases.waiting_items() == 0


async def test_nobody_stands_behind_one_that_has_left(arena: Arena) -> None:
    leases, model = leases_of(arena, batches_ahead=100), served()
    with await leases.acquire(model, text(INLINE + 1)):
        large = asyncio.ensure_future(leases.acquire(model, text(1 << 20)))
        await asyncio.sleep(0)
        large.cancel()
        with pytest.raises(StopIteration):  # served without a turn of the loop
            leases.acquire(model, text(0)).send(None)


async def test_versions_that_have_gone_leave_no_entry_behind(arena: Arena) -> None:
    leases = leases_of(arena, batches_ahead=1)
    for number in range(1, 20):
        model = served(number, max_rows=1)
        with await leases.acquire(model, text(0)):
            served_later, leaves = (asyncio.ensure_future(leases.acquire(model, text(0))) for _ in range(2))
            await asyncio.sleep(0)
            leaves.cancel()
        (await served_later).__exit__(None, None, None)
        too_late = asyncio.ensure_future(leases.acquire(model, text(0)))
        await asyncio.sleep(0)
        with await too_late:
            pass
    assert (leases._held_rows, leases._waiting) == ({}, {})
