"""Which floating-point width a version runs in, and when FP16 has failed it too often. Pure policy."""

from collections.abc import Callable
from typing import Literal

from workers.backends.base import Precision

Setting = Literal["auto", "fp16", "fp32"]

WINDOW_ROWS = 1024
"""Rows over which FP16's failures are counted."""
LIMIT_ROWS = 16
"""That many rows of a window that only FP32 could answer: running both costs more than it saves, and says that the
network's numbers do not fit."""


def choose(worker: Setting, model: Setting, *, on_cuda: bool) -> Precision:
    """The model's own wish, else the worker's, else FP16 on CUDA. A CPU always runs FP32: FP16 is slower there."""
    if not on_cuda:
        return "fp32"
    wish = model if model != "auto" else worker
    return "fp16" if wish == "auto" else wish


class OverflowGuard:
    """Counts, for one version, the rows that were not finite in FP16 and fine in FP32."""

    def __init__(self, on_trip: Callable[[int, int], None]) -> None:
        """`on_trip(rescued rows, of rows)` is called once, when FP16 should be given up."""
        self._on_trip = on_trip
        self._rows = 0
        self._rescued = 0
        self.total_rescued = 0
        self.tripped = False

    def record(self, rows: int, rescued: int) -> None:
        """`rows` ran in FP16; `rescued` of them had to run again in FP32, and were finite then."""
        self._rows += rows
        self._rescued += rescued
        self.total_rescued += rescued
        if not self.tripped and self._rescued >= LIMIT_ROWS:
            self.tripped = True
            self._on_trip(self._rescued, self._rows)
        elif self._rows >= WINDOW_ROWS:
            self._rows = self._rescued = 0

    def __repr__(self) -> str:
        return f"<OverflowGuard {self._rescued}/{self._rows} total={self.total_rescued} tripped={self.tripped}>"
