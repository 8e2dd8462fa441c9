"""One extension of many rows, whatever becomes of single ones: each row gets its logits, or a failure of its own.

- The network raises: the rows are halved, and halved again, until the culprit stands alone.
- The device has no memory: the same, and the number of rows that fit is remembered.
- Logits are not finite: the row is tried alone once more, and fails if they still are not.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from shared.clock import Clock
from shared.errors import Code, InternalFault
from shared.logs import get_logger
from shared.messages import Failure
from workers.backends.base import DeviceLost, OutOfMemory
from workers.generation.runner import Feed, GenerationRunner
from workers.loaded import LoadedVersion

NO_MEMORY = "the device has no memory left for this input"
NOT_FINITE = "the model's output is not finite for this input"

_log = get_logger()


class Extended(NamedTuple):
    """What has become of each row."""

    logits: Tensor
    """Float32 `[good, vocabulary]`, finite or -infinity; at least one of each row is finite."""
    good: list[int]
    """Which rows these are, rising."""
    failures: dict[int, Failure]
    """Of the other rows."""


class Isolation:
    """For one version."""

    def __init__(self, loaded: LoadedVersion, runner: GenerationRunner, clock: Clock) -> None:
        self._loaded = loaded
        self._runner = runner
        self._clock = clock

    def extend(self, first_row: int, feeds: Sequence[Feed]) -> Extended:
        """See `GenerationRunner.extend`. Raises DeviceLost."""
        cap = self._loaded.row_cap or len(feeds)
        parts: list[Tensor | Failure] = []
        for start in range(0, len(feeds), cap):
            parts += self._attempt(first_row + start, feeds[start : start + cap])
        good: list[int] = []
        failures: dict[int, Failure] = {}
        row = 0
        for part in parts:
            if isinstance(part, Failure):
                failures[row] = part
                row += 1
            else:
                good += range(row, row + len(part))
                row += len(part)
        logits = self._together([part for part in parts if isinstance(part, Tensor)])
        if logits is None:
            failures.update(dict.fromkeys(good, Failure(Code.OVERLOADED, NO_MEMORY)))
            good, logits = [], self._together([])
        return Extended(cast("Tensor", logits), good, failures)

    def _together(self, parts: Sequence[Tensor]) -> Tensor | None:
        """The rows as one tensor, which they are already where nothing has failed; None: there is no memory for it."""
        if len(parts) == 1:
            return parts[0]
        try:
            with self._runner.judged():
                return torch.cat([*parts]) if parts else torch.empty(0, self._runner.reader.vocabulary_size)
        except OutOfMemory:
            return None

    def _attempt(self, first_row: int, feeds: Sequence[Feed]) -> list[Tensor | Failure]:
        """Logits `[rows, vocabulary]` of one or more rows, or the failure of one, in the order of the feeds."""
        try:
            with self._runner.judged():
                logits = self._runner.extend(first_row, feeds)
                # Of a row with NaN the largest one is NaN; networks rule tokens out with -infinity, but not all.
                finite = logits.amax(-1).isfinite().tolist()
        except DeviceLost:
            raise
        except OutOfMemory:
            if len(feeds) > 1:
                self._loaded.lower_row_cap(len(feeds))
            return self._halved(first_row, feeds, Failure(Code.OVERLOADED, NO_MEMORY))
        except Exception as error:  # noqa: BLE001 - networks are users' code and may raise anything, on any input
            self._log_failure(len(feeds), error)
            return self._halved(first_row, feeds, Failure(Code.INTERNAL, InternalFault.TEXT))
        if all(finite):
            return [logits]
        return [
            logits[number : number + 1] if fine else self._again(first_row + number, feeds, number)
            for number, fine in enumerate(finite)
        ]

    def _again(self, row: int, feeds: Sequence[Feed], number: int) -> Tensor | Failure:
        """A row whose logits were not finite."""
        if len(feeds) == 1:
            return Failure(Code.NONFINITE_OUTPUT, NOT_FINITE)
        return self._attempt(row, [feeds[number]])[0]

    def _halved(self, first_row: int, feeds: Sequence[Feed], failure: Failure) -> list[Tensor | Failure]:
        if len(feeds) == 1:
            return [failure]
        middle = len(feeds) // 2
        return [*self._attempt(first_row, feeds[:middle]), *self._attempt(first_row + middle, feeds[middle:])]

    def _log_failure(self, rows: int, error: Exception) -> None:
        """One trace, and one line on halving, every few seconds, however many rows the network raises on."""
        model = self._loaded
        left_out = (model.failed_items if rows == 1 else model.failed_batches).due(self._clock())
        if left_out is None:
            return
        if rows == 1:
            _log.error("a text failed", model=model.key.name, left_out=left_out, exc_info=error)
        else:
            what = f"{type(error).__name__}: {str(error)[:300]}"
            _log.warning("a step failed and is halved", rows=rows, model=model.key.name, left_out=left_out, error=what)
