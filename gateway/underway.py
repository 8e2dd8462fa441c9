"""Items on their way: counted in their model's figures, wherever they end. Event loop only."""

import asyncio
from types import TracebackType
from typing import Self

from gateway.drops import Drops, Point
from gateway.served import ServedModel, Terms
from shared.clock import now_s
from shared.errors import Code, DeadlineExceeded
from shared.pipeline import RawInput


class Coming:
    """Counts the items of a request from the door on: their tasks begin on the loop's next turn.

    Until then the forecast would not know of them, and let everybody in who comes in this turn. An item takes over its
    part when it begins; the parts of those that never do are given back in the end.
    """

    __slots__ = ("_model", "_terms")

    def __init__(self, model: ServedModel, terms: Terms, items: list[RawInput]) -> None:
        self._model = model
        self._terms = terms
        terms.coming_items, terms.coming_rows = len(items), sum(raw.rows for raw in items)

    def __enter__(self) -> None:
        self._model.enter(self._terms, self._terms.coming_rows)
        self._model.unprepared_items += self._terms.coming_items

    def __exit__(self, *_: object) -> None:
        model, terms = self._model, self._terms
        model.leave(terms, terms.coming_rows)
        model.unprepared_items -= terms.coming_items
        terms.coming_items = terms.coming_rows = 0


class Underway:
    """Counts one item in its model's figures, wherever it ends; dropped before it was prepared, among the drops."""

    __slots__ = ("_drops", "_model", "_rows", "_terms", "_unprepared")

    def __init__(self, model: ServedModel, rows: int, terms: Terms, drops: Drops) -> None:
        self._model = model
        self._rows = rows
        self._terms = terms
        self._drops = drops
        self._unprepared = True

    def __enter__(self) -> Self:
        if self._terms.coming_items:  # counted at the door
            self._terms.coming_items -= 1
            self._terms.coming_rows -= self._rows
        else:
            self._model.enter(self._terms, self._rows)
            self._model.unprepared_items += 1
        return self

    def prepared(self, seconds: float) -> None:
        """The item came out of the pool after so many seconds of work."""
        self._model.prepared_in(seconds)
        self._no_longer_unprepared()

    def ran(self) -> None:
        """The worker has answered."""
        self._model.leave(self._terms, self._rows)
        self._rows = 0

    def _no_longer_unprepared(self) -> None:
        if self._unprepared:
            self._unprepared = False
            self._model.unprepared_items -= 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unprepared and isinstance(error, asyncio.CancelledError | DeadlineExceeded):
            late = isinstance(error, DeadlineExceeded)
            reason = Code.DEADLINE_EXCEEDED if late else self._terms.why_left(now_s())
            self._drops.add(self._model.name, Point.PREPARE, reason, self._terms.priority)
        self._no_longer_unprepared()
        self.ran()
