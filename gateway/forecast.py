"""When would a request that comes now be answered? What can't be in time is refused at the door. Pure policy.

Two stages work side by side, the pool (per item) and the worker (per batch); the longer backlog decides:

    predicted = correction · max(pool backlog, worker backlog) + own preparation and batch

The worker's backlog is what waits of the same model, and what others get meanwhile: their fair share of the time
(`gateway.fair_share`), but at least the batch that runs. In the pool others are ahead with what holds slots.

`correction` is learned from what really happened, for each model: it takes in everything that the prediction leaves
out (other load on the same cores, transport, the gateway itself). It follows the slowest answers, not the average: so
high that all but one in two hundred requests take no longer than their corrected forecast. That makes the forecast the
limiter of what may be in flight: as long as answers come slower than promised it admits less, down to one full batch,
and as soon as they don't it admits more. Refusing costs a tenth of serving; starting what can't finish costs everybody.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from gateway.book import Behind, Book
from gateway.correction import Correction, Promise
from shared.errors import DeadlineExceeded, HeadraceError, Overloaded

RETRY_MS = (10, 2000)
GLANCE_S = 0.001
"""In a millisecond a few calls come in; each is looked at again when its message has been read."""
COMMITTED = 3
"""Full batches that hold slots or run: they can't be overtaken any more."""
FLOODED = 2
"""Of so many full batches the backlog of a model does not end soon: it takes all of its share, not only what waits."""


class Place(NamedTuple):
    """Where a request stands in the order of service."""

    priority: int
    deadline_s: float


class Load(Protocol):
    """What the forecast reads of a served model (`gateway.served.ServedModel`)."""

    @property
    def rows_in_flight(self) -> int:
        """Admitted and not yet answered by a worker."""

    @property
    def unprepared_items(self) -> int:
        """Admitted and not yet through a pool process."""

    @property
    def preparing_rows(self) -> int:
        """Of these, rows that hold slots, so that a pool process may take them at any time."""

    @property
    def book(self) -> Book:
        """The rows in flight, in the order in which they are served."""

    @property
    def weight(self) -> float:
        """Its share of worker time, in relation to other models."""

    @property
    def workers(self) -> int:
        """How many workers run its batches side by side; at least 1."""

    @property
    def prepare_s(self) -> float:
        """Seconds that a pool process needs for one item, on average."""

    @property
    def max_rows(self) -> int:
        """Rows of a full batch."""

    @property
    def goes_on(self) -> bool:
        """Whether its rows take the worker again and again, for a short time each: texts, step by step."""

    def batch_s(self, rows: int) -> float:
        """Seconds of a batch of `rows` rows."""


class Forecast:
    """One instance; asked at the door, taught by every answer."""

    def __init__(self, pool_processes: int, loads: Iterable[Load]) -> None:
        """`loads` is iterated anew for each question: all served models share the pool and the worker."""
        self._processes = pool_processes
        self._loads = loads
        self._corrections: WeakKeyDictionary[Load, Correction] = WeakKeyDictionary()
        self._soonest: _Soonest | None = None
        self._glance_until_s = float("-inf")
        self._ticked_s = float("inf")

    def correction(self, load: Load) -> float:
        """What this model's forecasts are multiplied with."""
        return self._of(load).factor

    def tick(self, now_s: float) -> None:
        """Time passes."""
        elapsed_s, self._ticked_s = max(0.0, now_s - self._ticked_s), now_s
        for correction in self._corrections.values():
            correction.forget(elapsed_s)

    def predict_s(self, load: Load, rows: int, overtaken: int = 0) -> float:
        """Seconds until a request of `rows` rows would be answered, as the model says; not corrected.

        `overtaken` rows in flight would be served after it.
        """
        own_s = load.prepare_s + load.batch_s(min(rows, load.max_rows))
        ahead = load.rows_in_flight - overtaken
        unprepared = load.unprepared_items * ahead / load.rows_in_flight if overtaken else load.unprepared_items
        pool_s, ahead_s = unprepared * load.prepare_s, _backlog_s(load, ahead)
        running_s = later_s = 0.0
        for other in self._loads:
            if other is load or not other.rows_in_flight:
                continue
            pool_s += min(other.unprepared_items, other.preparing_rows) * other.prepare_s
            batch_s = other.batch_s(min(other.rows_in_flight, other.max_rows))
            share_s = ahead_s * other.weight / load.weight
            if other.rows_in_flight < FLOODED * other.max_rows and not other.goes_on:
                running_s = max(running_s, batch_s)
                later_s += min(_backlog_s(other, other.rows_in_flight), share_s)
            else:  # more of it keeps coming, and of the batch that runs a part is done
                running_s = max(running_s, batch_s / (1 + other.workers))
                later_s += share_s
        worker_s = ahead_s + max(running_s, later_s)
        return max(pool_s / self._processes, worker_s) + own_s

    def check(self, load: Load, rows: int, budget_s: float, place: Place | None = None) -> Promise:
        """What is promised to a request that may come in; for `answered` or `missed`.

        With a `place` in the order of service it overtakes what comes after it, if what has the same priority is still
        in time behind it; a better priority goes at the expense of the others.

        Raises:
            DeadlineExceeded: nothing is left of the budget, or too little for what the request needs by itself.
            Overloaded: too much work is ahead; carries when to come back.
        """
        if budget_s <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        behind = load.book.behind(*place) if place else []
        overtaken = self._overtaken(load, behind)
        raw_s = self.predict_s(load, rows, overtaken)
        if budget_s < self._least_s(load, rows, raw_s, overtaken):
            raise self._refusal(load, rows, raw_s, budget_s)
        if overtaken and place and not self._in_time(load, raw_s, behind, place, budget_s):
            raise self._refusal(load, rows, self.predict_s(load, rows), budget_s)
        return self._of(load).promise(raw_s, budget_s)

    def _overtaken(self, load: Load, behind: list[Behind]) -> int:
        """Of the rows behind, those that hold no slots yet; the others are as good as ahead."""
        return max(0, sum(one.rows for one in behind) - COMMITTED * load.max_rows * load.workers) if behind else 0

    def _in_time(self, load: Load, raw_s: float, behind: list[Behind], place: Place, budget_s: float) -> bool:
        """Whether those behind would be in time if one more went before them (the test of a schedule by deadline)."""
        factor, row_s, at_s = self._of(load).factor, self._row_s(load), raw_s
        for one in behind:
            if one.priority != place.priority:
                break
            at_s += one.rows * row_s
            if at_s * factor > one.deadline_s - place.deadline_s + budget_s:
                return False
        return True

    def refusal(self, budget_s: float, coming: int, now_s: float) -> HeadraceError | None:
        """Why one row more could not be answered within the budget, whichever model it is for; None when it could.

        `coming` rows are on their way here, of models that nobody knows yet: of the one that could be soonest, it is
        supposed. Looks at the models once in `GLANCE_S`, however many calls ask.
        """
        if now_s >= self._glance_until_s:
            self._glance_until_s, self._soonest = now_s + GLANCE_S, self._look()
        found = self._soonest
        if found is None or not found.least_s or budget_s >= found.least_s + coming * found.row_s:
            return None
        if any(self._could_overtake(load, budget_s, now_s + budget_s) for load in self._loads):
            return None
        return self._refusal(found.load, 1, found.raw_s + coming * found.row_s, budget_s)

    def _could_overtake(self, load: Load, budget_s: float, deadline_s: float) -> bool:
        """Whether a call of which only the time is known might be served before what waits.

        It may have the best priority that any caller has used.
        """
        priority = load.book.first_priority
        behind = [] if priority is None else load.book.behind(priority, deadline_s)
        overtaken = self._overtaken(load, behind)
        if not overtaken:
            return False
        return budget_s >= self._least_s(load, 1, self.predict_s(load, 1, overtaken), overtaken)

    def _look(self) -> "_Soonest | None":
        soonest = None
        for load in self._loads:
            raw_s = self.predict_s(load, 1)
            least_s = self._least_s(load, 1, raw_s, 0)
            if soonest is None or least_s < soonest.least_s:
                soonest = _Soonest(load, raw_s, least_s, self._row_s(load))
            if not least_s:
                break
        return soonest

    def _row_s(self, load: Load) -> float:
        """Seconds that one row more adds to what the next one waits for."""
        return max(load.prepare_s / self._processes, load.batch_s(load.max_rows) / load.max_rows / load.workers)

    def _least_s(self, load: Load, rows: int, raw_s: float, overtaken: int) -> float:
        """The smallest budget with which a request is let in."""
        if not load.rows_in_flight:
            return 0.0  # with nothing in flight a wrong forecast must be able to prove itself wrong
        if load.rows_in_flight - overtaken + rows <= load.max_rows:
            return raw_s  # however slow the last answers were: less than a full batch in flight helps nobody
        return raw_s * self._of(load).factor

    def _refusal(self, load: Load, rows: int, raw_s: float, budget_s: float) -> HeadraceError:
        alone_s = load.prepare_s + load.batch_s(min(rows, load.max_rows))
        if alone_s > budget_s:
            return DeadlineExceeded(
                f"the deadline leaves {max(0.0, budget_s) * 1e3:.0f} ms, and the model takes {alone_s * 1e3:.0f} ms "
                "alone"
            )
        predicted_s = raw_s * self._of(load).factor
        return Overloaded(
            f"an answer would take about {predicted_s * 1e3:.0f} ms, the deadline leaves {budget_s * 1e3:.0f} ms",
            retry_after_ms=min(max(round((predicted_s - budget_s) * 1e3), RETRY_MS[0]), RETRY_MS[1]),
        )

    def answered(self, load: Load, promise: Promise, actual_s: float) -> None:
        """A request was answered after `actual_s`."""
        self._of(load).answered(promise, actual_s)

    def missed(self, load: Load, promise: Promise) -> None:
        """A request was let in, and not answered within its time."""
        self._of(load).missed(promise)

    def _of(self, load: Load) -> Correction:
        found = self._corrections.get(load)
        if found is None:
            found = self._corrections[load] = Correction()
        return found

    def __repr__(self) -> str:
        return f"<Forecast corrections={[round(found.factor, 2) for found in self._corrections.values()]}>"


class _Soonest(NamedTuple):
    """The model that could answer one row more first."""

    load: Load
    raw_s: float
    least_s: float
    row_s: float


def _backlog_s(load: Load, rows: int) -> float:
    if not rows:
        return 0.0
    full, rest = divmod(rows, load.max_rows)
    full_s = full * load.batch_s(load.max_rows) if full else 0.0
    return (full_s + (load.batch_s(rest) if rest else 0.0)) / load.workers
