"""The shared-memory data plane: one arena per gateway, an anonymous memory file without a name.

`Arena` and `Slot` live in the gateway (one owner, one thread); pool processes and workers map the same memory with
`AttachedArena` from the file descriptor they were handed. Only the owner leases and frees, so no lock is needed and
the death of a process frees nothing that another still uses.

All pages are allocated at start: a full machine is an error at start, never a SIGBUS later. The memory file is sealed
against shrinking and growing, so a mapping that was good once stays good.
"""

import contextlib
import errno
import fcntl
import math
import mmap
import os
from typing import NamedTuple, Self

import numpy as np

from shared.board import BOARD_BYTES, board_offset
from shared.buddy import MIN_BLOCK, Buddy, order_of
from shared.errors import ExitCode, StartupError
from shared.host_memory import available_bytes
from shared.tensors import DTYPES, Array, SlotRef

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class ArenaStats(NamedTuple):
    """A moment's state, in bytes of whole blocks."""

    leased_bytes: int
    """Held by requests."""
    quarantined_bytes: int
    """No request needs it any more, but a process that has not answered may still touch it."""
    free_bytes: int
    largest_free_bytes: int
    slots: int
    """Leased and quarantined slots together."""


class Slot:
    """A piece of the arena, owned by one request. Gateway only; made by `Arena.lease`."""

    __slots__ = ("_arena", "_closed", "_holders", "_order", "_view", "ref")

    def __init__(self, arena: "Arena", ref: SlotRef, order: int) -> None:
        self.ref = ref
        self._arena = arena
        self._order = order
        self._closed = False
        self._holders: list[str] | None = None
        self._view: memoryview | None = None

    @property
    def view(self) -> memoryview:
        """Writable memory, exactly as long as was asked for. Raises ValueError after `close`.

        The bytes are whatever the last owner left: write before you read, or let a process write.
        """
        view = self._view
        if view is None:
            if self._closed:
                raise ValueError("the slot is closed")
            ref = self.ref
            view = self._view = self._arena.memory[ref.offset : ref.offset + ref.nbytes]
        return view

    def lend(self, holder: str) -> None:
        """The named process works on the slot from now on. Lent twice, it must be given back twice."""
        if self._holders is None:
            self._holders = [holder]
        else:
            self._holders.append(holder)

    def give_back(self, holder: str) -> None:
        """The named process has answered, or is dead. One who does not hold the slot changes nothing."""
        holders = self._holders
        if holders and holder in holders:
            holders.remove(holder)
            if self._closed and not holders:
                self._arena._leave_quarantine(self._order, self.ref.offset)  # noqa: SLF001 - Slot is the arena's other half

    def close(self) -> None:
        """The request needs the slot no more: freed at once, or when the last holder gives it back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._view is not None:
            with contextlib.suppress(BufferError):  # someone still reads it: then only our reference goes
                self._view.release()
            self._view = None
        if self._holders:
            self._arena._quarantine(self._order)  # noqa: SLF001 - Slot is the arena's other half
        else:
            self._arena._free(self._order, self.ref.offset)  # noqa: SLF001 - Slot is the arena's other half

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<Slot {self.ref.offset}+{self.ref.nbytes} {state} holders={self._holders or []}>"


class Arena:
    """The owner's side. Gateway only, one thread."""

    def __init__(self, fd: int, nbytes: int, mapping: mmap.mmap) -> None:
        """Use `create`."""
        self.fd = fd
        self.nbytes = nbytes
        self.memory = memoryview(mapping)
        self._mapping = mapping
        self._buddy = Buddy(nbytes)
        self._leased_bytes = 0
        self._quarantined_bytes = 0
        self._slots = 0

    @classmethod
    def create(cls, budget_bytes: int) -> Self:
        """Allocate every page now; the budget is rounded up to a power of two.

        Raises StartupError (BAD_SETTINGS) when the memory is not there.
        """
        nbytes = max(MIN_BLOCK, 1 << (budget_bytes - 1).bit_length())
        room = available_bytes()
        if room is not None and nbytes > room:
            raise _too_big(nbytes, f"{room} are available")
        fd = os.memfd_create("headrace-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # ftruncate alone would succeed on a full machine and the first write would then be a SIGBUS.
            os.posix_fallocate(fd, 0, _file_bytes(nbytes))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            os.close(fd)
            raise _too_big(nbytes, errno.errorcode.get(error.errno or 0, str(error))) from error
        return cls(fd, nbytes, mapping)

    def lease(self, nbytes: int) -> Slot | None:
        """A slot of `nbytes`, or None when there is no room now. Never blocks."""
        order = order_of(nbytes)
        offset = self._buddy.take(order)
        if offset is None:
            return None
        self._leased_bytes += MIN_BLOCK << order
        self._slots += 1
        return Slot(self, SlotRef(offset, nbytes), order)

    def stats(self) -> ArenaStats:
        """For metrics and tests; merges free blocks first, so not for every request."""
        return ArenaStats(
            leased_bytes=self._leased_bytes,
            quarantined_bytes=self._quarantined_bytes,
            free_bytes=self.nbytes - self._leased_bytes - self._quarantined_bytes,
            largest_free_bytes=self._buddy.largest_free(),
            slots=self._slots,
        )

    def close(self) -> None:
        """Give the memory back to the system as soon as no view of it is left. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            _unmap(self.memory, self._mapping)

    def _free(self, order: int, offset: int) -> None:
        self._leased_bytes -= MIN_BLOCK << order
        self._slots -= 1
        self._buddy.give(order, offset)

    def _quarantine(self, order: int) -> None:
        self._leased_bytes -= MIN_BLOCK << order
        self._quarantined_bytes += MIN_BLOCK << order

    def _leave_quarantine(self, order: int, offset: int) -> None:
        self._quarantined_bytes -= MIN_BLOCK << order
        self._slots -= 1
        self._buddy.give(order, offset)

    def __repr__(self) -> str:
        return f"<Arena {self.nbytes} leased={self._leased_bytes} quarantined={self._quarantined_bytes}>"


class AttachedArena:
    """The other side: a pool process or a worker, which writes and reads where a message tells it to."""

    def __init__(self, mapping: mmap.mmap) -> None:
        """Use `attach`."""
        self.memory = memoryview(mapping)
        self._mapping = mapping

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Self:
        """Map the gateway's arena. The descriptor stays the caller's, who may close it at once.

        Raises ValueError when it is not a sealed memory file of exactly `nbytes` and the board.
        """
        size, expected = os.fstat(fd).st_size, _file_bytes(nbytes)
        if size != expected:
            raise ValueError(f"the arena's file has {size} bytes, expected {expected}")
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if seals & _SEALS != _SEALS:
            raise ValueError("the arena is not sealed: it could shrink under its readers")
        return cls(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED))

    def array(self, ref: SlotRef, datatype: str, shape: tuple[int, ...]) -> Array:
        """A writable numpy view (no copy) of `shape` at the start of a slot.

        The caller must let go of it before it answers. Raises ValueError when the slot lies outside the arena or is
        too small for the shape, KeyError for an unknown datatype.
        """
        dtype = DTYPES[datatype]
        count = math.prod(shape)
        if ref.offset < 0 or ref.nbytes < 0 or ref.offset + ref.nbytes > len(self.memory) or min(shape, default=0) < 0:
            raise ValueError(f"slot {ref.offset}+{ref.nbytes} of shape {shape} is outside the arena")
        if count * dtype.itemsize > ref.nbytes:
            raise ValueError(f"shape {shape} of {datatype} needs {count * dtype.itemsize} bytes, slot has {ref.nbytes}")
        return np.frombuffer(self.memory, dtype, count, ref.offset).reshape(shape)

    def close(self) -> None:
        """Unmap as soon as no array points into the arena any more. Idempotent."""
        _unmap(self.memory, self._mapping)


def _unmap(memory: memoryview, mapping: mmap.mmap) -> None:
    # With arrays still alive both calls refuse; the mapping then goes with the last of them.
    with contextlib.suppress(BufferError):
        memory.release()
        mapping.close()


def _file_bytes(nbytes: int) -> int:
    """The slots, and a page for `shared.board`."""
    return board_offset(nbytes) + BOARD_BYTES


def _too_big(nbytes: int, why: str) -> StartupError:
    return StartupError(
        ExitCode.BAD_SETTINGS,
        f"arena.budget_bytes needs {nbytes} bytes of shared memory, which can't be allocated ({why}); lower it",
    )
