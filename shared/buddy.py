"""A buddy allocator over plain numbers: power-of-two blocks that split on demand and merge when both halves are free.

Pure bookkeeping for `shared.arena` (gateway only): no memory is touched here. One thread.

Freed blocks of a size wait in a small stack before they merge, because the next lease usually asks for the same size:
that makes the common pair of calls two list operations instead of a walk over all sizes. `settle` merges what waits,
and a `take` that finds no room settles and tries once more, so a waiting block never causes a refusal.
"""

MIN_BLOCK = 4096
"""Bytes of the smallest block: one page, so that no two slots share one."""

_RECENT = 16
"""Freed blocks of one size kept unmerged: about a batch in the making; 17 sizes × 16 settle in well under 1 ms."""


def order_of(nbytes: int) -> int:
    """The smallest order (power of two of `MIN_BLOCK`) whose block holds `nbytes`; 0 bytes take a block, too."""
    return ((nbytes - 1) >> 12).bit_length() if nbytes else 0


class Buddy:
    """Hands out blocks of `MIN_BLOCK << order` bytes by their offset."""

    __slots__ = ("_free", "_recent", "nbytes", "top")

    def __init__(self, nbytes: int) -> None:
        """`nbytes` must be a power of two of at least `MIN_BLOCK`. Raises ValueError."""
        if nbytes < MIN_BLOCK or nbytes & (nbytes - 1):
            raise ValueError(f"{nbytes} is no power of two of at least {MIN_BLOCK}")
        self.nbytes = nbytes
        self.top = order_of(nbytes)
        self._free: list[set[int]] = [set() for _ in range(self.top + 1)]
        self._recent: list[list[int]] = [[] for _ in range(self.top + 1)]
        self._free[self.top].add(0)

    def take(self, order: int) -> int | None:
        """Offset of a free block of this order, or None when there is no room."""
        if order > self.top:
            return None
        recent = self._recent[order]
        if recent:
            return recent.pop()
        offset = self._split(order)
        if offset is None and any(self._recent):
            self.settle()
            offset = self._split(order)
        return offset

    def give(self, order: int, offset: int) -> None:
        """Take a block back. The caller gives each block back once, with the order it was taken with."""
        recent = self._recent[order]
        if len(recent) < _RECENT:
            recent.append(offset)
        else:
            self._merge(order, offset)

    def settle(self) -> None:
        """Merge everything that waits."""
        for order, recent in enumerate(self._recent):
            while recent:
                self._merge(order, recent.pop())

    def largest_free(self) -> int:
        """Bytes of the largest block that a `take` would find now."""
        self.settle()
        return max((MIN_BLOCK << order for order, blocks in enumerate(self._free) if blocks), default=0)

    def _split(self, order: int) -> int | None:
        free = self._free
        for found in range(order, self.top + 1):
            if free[found]:
                offset = free[found].pop()
                for smaller in range(found - 1, order - 1, -1):
                    free[smaller].add(offset + (MIN_BLOCK << smaller))
                return offset
        return None

    def _merge(self, order: int, offset: int) -> None:
        free = self._free
        while order < self.top:
            other = offset ^ (MIN_BLOCK << order)
            if other not in free[order]:
                break
            free[order].remove(other)
            offset &= ~(MIN_BLOCK << order)
            order += 1
        free[order].add(offset)
