"""Prepared items whose model no worker has now: they wait for one to load it, or to come back, up to a limit."""

import asyncio
from collections.abc import Callable

from gateway.served import ServedModel
from gateway.work import Work, fail
from shared.errors import ProcessLost


class Parked:
    """By item number; lives on the event loop."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s` is `worker.return_limit_ms`: what has waited for that long in one go is answered: ProcessLost."""
        self._limit_s = limit_s
        self._works: dict[int, tuple[Work, asyncio.TimerHandle]] = {}
        self.wanted: Callable[[ServedModel], None] = lambda _model: None
        """Told of the version of everything that begins to wait here: it may have to be loaded."""

    def add(self, work: Work) -> None:
        """Let an item wait."""
        self._wait(work)
        self.wanted(work.model)

    def pop(self, number: int) -> Work | None:
        """Take one item out; None when it does not wait here."""
        found = self._works.pop(number, None)
        if found is None:
            return None
        found[1].cancel()
        return found[0]

    def take(self, model: int) -> list[Work]:
        """Take out all items of a model, in order of arrival."""
        numbers = [number for number, (work, _) in self._works.items() if work.model.number == model]
        return [work for number in numbers if (work := self.pop(number)) is not None]

    def rows(self, model: int) -> int:
        """Rows of a model that wait here."""
        return sum(work.queued.rows for work, _ in self._works.values() if work.model.number == model)

    def models(self) -> set[ServedModel]:
        """The versions that something here waits for."""
        return {work.model for work, _ in self._works.values()}

    def __len__(self) -> int:
        return len(self._works)

    def _wait(self, work: Work) -> None:
        number = work.queued.item
        self._works[number] = work, asyncio.get_running_loop().call_later(self._limit_s, self._expire, number)

    def _expire(self, number: int) -> None:
        work = self.pop(number)
        if work is not None and work.model.waits_for_load:  # a worker is there, and loads it: its deadline is the limit
            self._wait(work)
        elif work is not None:
            fail(work, ProcessLost("the worker was lost and did not come back within worker.return_limit_ms"))
