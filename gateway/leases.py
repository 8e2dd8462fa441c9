"""Arena slots for items: the credit that bounds how far ahead of the worker the pool may decode.

Per model at most `staged_batches + 1` batches' worth of rows hold slots: one running, the rest staged, one being
prepared; with several workers `staged_batches` for each of them, and one being prepared. Everything else waits here,
still encoded, the earliest deadline first (ties in order of arrival). An item's slots are leased together, so that two
half-served items can never wait for each other.
"""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Self

from gateway.line import Line
from gateway.request import DEFAULT_PRIORITY
from gateway.served import ServedModel, SlotSizes, Terms
from shared.arena import Arena, Slot
from shared.clock import FOREVER_S
from shared.errors import TooLarge
from shared.pipeline import RawInput


class Lease:
    """The slots of one item. Leaving the `with` block gives everything back; slots still lent are quarantined."""

    __slots__ = ("_leases", "inputs", "model", "outputs", "payload", "preparing", "priority", "rows", "terms")

    def __init__(
        self, leases: "Leases", model: ServedModel, raw: RawInput, terms: Terms, slots: list[Slot], sizes: SlotSizes
    ) -> None:
        self._leases = leases
        self.model = model
        self.rows = raw.rows
        payload, inputs = len(sizes.payload), len(sizes.inputs)
        self.payload = slots[0] if payload else None
        self.inputs = slots[payload : payload + inputs]
        self.outputs = slots[payload + inputs :]
        self.preparing = True
        self.terms = terms
        self.priority = terms.priority

    @property
    def arena_memory(self) -> memoryview:
        """The whole arena, to read outputs from."""
        return self._leases.memory

    def prepared(self) -> None:
        """The tensors are in their slots: the encoded payload is not needed any more."""
        if self.preparing:
            self.preparing = False
            self.model.preparing_rows -= self.rows
            if self.payload is not None:
                self.payload.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.preparing:
            self.prepared()
            self._leases.nobody_comes()
        for slot in self.inputs:
            slot.close()
        for slot in self.outputs:
            slot.close()
        self._leases.released(self)


class _Waiter:
    __slots__ = ("future", "model", "rows", "sizes")

    def __init__(self, model: ServedModel, rows: int, sizes: list[int], future: "asyncio.Future[list[Slot]]") -> None:
        self.model = model
        self.rows = rows
        self.sizes = sizes
        self.future = future


class Leases:
    """Hands out leases within the arena and each model's window."""

    def __init__(self, arena: Arena, inline_bytes: int, batches_ahead: int) -> None:
        """`batches_ahead`: how many batches of a model may hold slots while one worker has it."""
        self._arena = arena
        self.memory = arena.memory
        self._inline_bytes = inline_bytes
        self._batches_ahead = batches_ahead
        self._held_rows: dict[int, int] = {}  # of models that hold any: versions come and go
        self.nobody_comes: Callable[[], None] = lambda: None
        """Called when an item leaves before it was prepared: a batch need not wait for it any more."""
        # Per model that somebody waits for, since a full window holds up nobody else: by priority, then the earliest
        # deadline first.
        self._waiting: dict[int, Line[_Waiter]] = {}
        self._tickets = count()

    async def acquire(self, model: ServedModel, raw: RawInput, terms: Terms | None = None) -> Lease:
        """Slots for an encoded payload, its prepared tensors and its outputs.

        Waits its turn for as long as the caller's own deadline lets it. Raises TooLarge when it could never fit.
        """
        rows = raw.rows
        terms = terms or Terms(FOREVER_S, DEFAULT_PRIORITY)
        kinds = model.slots_for(raw, self._inline_bytes)
        sizes = kinds.payload + kinds.inputs + kinds.outputs
        waiting = self._waiting.get(model.number)
        slots = self._try(model, rows, sizes) if waiting is None or waiting.first() is None else None
        if slots is None:
            needed = sum(map(_block, sizes))
            if needed > self._arena.nbytes:
                raise TooLarge(
                    f"the input needs {needed} bytes of shared memory; arena.budget_bytes is {self._arena.nbytes}"
                )
            slots = await self._wait(model, rows, sizes, terms)
        model.preparing_rows += rows
        return Lease(self, model, raw, terms, slots, kinds)

    def released(self, lease: Lease) -> None:
        """A lease ended; called by the lease itself."""
        self._give_back(lease.model.number, lease.rows)
        self.pump()

    def pump(self) -> None:
        """Serve those who wait, after anything came back (a lease, or a slot out of quarantine)."""
        for number, waiting in list(self._waiting.items()):
            while (first := waiting.first()) is not None:
                slots = self._try(first.model, first.rows, first.sizes)
                if slots is None:
                    break
                waiting.pop()
                first.future.set_result(slots)
            else:
                del self._waiting[number]

    def waiting_items(self) -> int:
        """Items that hold no slot yet."""
        return sum(len(waiting) for waiting in self._waiting.values())

    def _give_back(self, number: int, rows: int) -> None:
        held = self._held_rows.pop(number) - rows
        if held:
            self._held_rows[number] = held

    def _try(self, model: ServedModel, rows: int, sizes: list[int]) -> list[Slot] | None:
        held = self._held_rows.get(model.number, 0)
        ahead = 1 + (self._batches_ahead - 1) * model.workers
        if held and held + rows > ahead * model.limits.max_rows:
            return None
        slots: list[Slot] = []
        for size in sizes:
            slot = self._arena.lease(size)
            if slot is None:
                for taken in slots:
                    taken.close()
                return None
            slots.append(slot)
        self._held_rows[model.number] = held + rows
        return slots

    async def _wait(self, model: ServedModel, rows: int, sizes: list[int], terms: Terms) -> list[Slot]:
        future: asyncio.Future[list[Slot]] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(model, rows, sizes, future)
        line = self._waiting.get(model.number)
        if line is None:
            line = self._waiting[model.number] = Line(_has_left)
        line.push((terms.priority, terms.deadline_s, next(self._tickets)), waiter)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # served and cancelled in the same turn
                for slot in future.result():
                    slot.close()
                self._give_back(model.number, rows)
            self.pump()  # there may be room for who stood behind it
            raise


def _has_left(waiter: _Waiter) -> bool:
    return waiter.future.done()


def _block(nbytes: int) -> int:
    """What the arena's allocator takes for a slot: the next power of two."""
    return 1 << (nbytes - 1).bit_length()
