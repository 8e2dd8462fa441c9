"""What each worker does at this moment, where its gateways can read it also when the worker can't say it any more.

The last page of a gateway's memory file (behind the arena's slots) has one record for each worker. The worker writes it
before and after each batch (a microsecond); the gateway reads it when a worker has died or seems to hang. A message
could be lost with the worker, and with several gateways on one worker nobody else could tell whose batch it was.
"""

import mmap
import struct
from typing import NamedTuple

BOARD_BYTES = 4096
IDLE, ELSEWHERE = 0, -1
"""In place of a batch's number: between two batches; at work for another gateway."""

_RECORD = struct.Struct("<qd")
_PLACES = BOARD_BYTES // _RECORD.size


class Doing(NamedTuple):
    """A worker's record."""

    batch: int
    """The reading gateway's number of it, IDLE or ELSEWHERE."""
    since_s: float
    """Monotonic."""


NOTHING = Doing(IDLE, 0.0)


def board_offset(arena_bytes: int) -> int:
    """Where the board begins in the memory file: the first page behind the slots."""
    return -(-arena_bytes // BOARD_BYTES) * BOARD_BYTES


class Board:
    """The page as one process maps it: the gateway, or a worker. The descriptor stays the caller's."""

    def __init__(self, fd: int, arena_bytes: int) -> None:
        """Raises OSError, ValueError when the file has no such page."""
        self._page = mmap.mmap(fd, BOARD_BYTES, flags=mmap.MAP_SHARED, offset=board_offset(arena_bytes))

    def write(self, worker: str, doing: Doing) -> None:
        """The worker's half; the gateway does it for a worker that has just come."""
        place = _place(worker)
        if place is not None:
            _RECORD.pack_into(self._page, place, *doing)

    def read(self, worker: str) -> Doing | None:
        """The gateway's half; None for a name that has no place. Batch and time may be of two different batches."""
        place = _place(worker)
        return None if place is None else Doing(*_RECORD.unpack_from(self._page, place))

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._page.close()


def _place(worker: str) -> int | None:
    """By the number at the end of its name: `worker-3`."""
    _, dash, number = worker.rpartition("-")
    if not dash or not number.isdecimal() or int(number) >= _PLACES:
        return None
    return int(number) * _RECORD.size
