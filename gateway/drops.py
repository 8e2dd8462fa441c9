"""Work that was dropped before it was computed: counted once for each item, where it happened and why.

An item is what waits by itself in every queue: an input of a request, or a piece of one with more rows than a batch may
have; a call that was refused before it was read counts as one, of the model `unknown`. The four points are how far it
had come:

    admission  refused at the door: no room, no time, held in quarantine
    prepare    waiting for a slot or a pool process, or in one, when its time was over or its caller had left
    batch      prepared, waiting for company or for a worker
    copy       in the hands of a worker, and skipped there before the copy to the device

Plain numbers, on the gateway's event loop only. Readiness's batches and copies for shadows are no caller's work, and
never counted.
"""

from collections.abc import Iterator
from enum import StrEnum

from gateway.request import is_own
from shared.errors import Code


class Point(StrEnum):
    """Where work is dropped; the words of metrics, logs and `/debug`."""

    ADMISSION = "admission"
    PREPARE = "prepare"
    BATCH = "batch"
    COPY = "copy"


class Drops:
    """Counts by model, point and reason: three closed sets."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, Point, Code], int] = {}
        self.rows_for_nobody: dict[str, int] = {}
        """By model: rows that were computed all the same."""

    def add(self, model: str, point: Point, reason: Code, priority: int, items: int = 1) -> None:
        """Items of a served model (or of `unknown`, when it was not looked up yet) were dropped here."""
        if not is_own(priority):
            key = model, point, reason
            self._counts[key] = self._counts.get(key, 0) + items

    def computed(self, model: str, rows: int) -> None:
        """Rows were computed that nobody waits for."""
        if rows:
            self.rows_for_nobody[model] = self.rows_for_nobody.get(model, 0) + rows

    def rows(self) -> Iterator[tuple[tuple[str, str, str], int]]:
        """Label values and number, one for each series of `headrace_dropped_total`."""
        for (model, point, reason), items in sorted(self._counts.items()):
            yield (model, point.value, reason.value), items

    def of(self, model: str) -> dict[str, dict[str, int]]:
        """By point and reason, for `/debug`."""
        found: dict[str, dict[str, int]] = {}
        for (name, point, reason), items in self.rows():
            if name == model:
                found.setdefault(point, {})[reason] = items
        return found

    def __repr__(self) -> str:
        counts = ", ".join(f"{'/'.join(labels)}: {items}" for labels, items in self.rows())
        return f"<Drops {counts or 'none'}>"
