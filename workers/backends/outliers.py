"""Which passes are so much larger than the others that the memory they took should be given back. Pure policy.

A runtime's arena keeps what its largest pass needed. Where every pass is alike that is right; after a single text of
ten times the usual length it is memory that nobody uses again.
"""

from collections import deque

WINDOW = 64
"""Passes that tell what is usual. Giving memory back costs time, and at most every so many passes do it."""
FACTOR = 2.0
"""An outlier's input has more than this times the bytes of the largest of them."""


class Outliers:
    """Remembers the input bytes of the last passes."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=WINDOW)

    def saw(self, nbytes: int) -> bool:
        """Count a pass of that many input bytes; whether it is an outlier. The first passes never are."""
        usual = max(self._last) if len(self._last) == WINDOW else None
        self._last.append(nbytes)
        return usual is not None and nbytes > FACTOR * usual

    def __repr__(self) -> str:
        return f"<Outliers {len(self._last)} passes, largest {max(self._last, default=0)} bytes>"
