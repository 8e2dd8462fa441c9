"""When would a request that comes now be answered? What can't be in time is refused at the door. Pure policy.

Two stages work side by side, the pool (per item) and the worker (per batch); the longer backlog decides:

    predicted = correction · max(pool backlog, worker backlog) + own preparation and batch

The worker's backlog is what waits of the same model, and what others get meanwhile: their fair share of the time
(`gateway.fair_share`), but at least the batch that runs. In the pool others are ahead with what holds slots.

`correction` is learned from what really happened, for each model: it takes in everything that the prediction leaves
out (other load on the same cores, transport, the gateway itself). It follows the slowest answers, not the average: so
high that all but `LATE` of the requests take no longer than their corrected forecast. That makes the forecast the
limiter of what may be in flight: as long as answers come slower than promised it admits less, down to one full batch,
and as soon as they don't it admits more. Refusing costs a tenth of serving; starting what can't finish costs everybody.
"""

from collections.abc import Iterable
from typing import Protocol
from weakref import WeakKeyDictionary

from shared.errors import DeadlineExceeded, HeadraceError, Overloaded

LATE = 0.01
"""Share of requests that may take longer than their corrected forecast; half of what is promised (2 %)."""
LEARN = 0.05
"""Relative step up after a request that took longer; after one that didn't, `LATE` of it down. A server that has
become half as fast is known by fifteen late answers, and forgiven within some thousand good ones."""
RELEVANT = 0.25
"""Forecasts below this share of the budget are well inside whatever the correction is, and mostly noise."""
START = 1.1
"""Before anything was learned: a little careful, since an answer that is late by a hair is as lost as any."""
LEAST, MOST = 0.5, 4.0
"""Bounds of the correction, so that one bad second can't close the door for good."""
RETRY_MS = (10, 2000)
FLOODED = 2
"""Of so many full batches the backlog of a model does not end soon: it takes all of its share, not only what waits."""


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

    def batch_s(self, rows: int) -> float:
        """Seconds of a batch of `rows` rows."""


class Forecast:
    """One instance; asked at the door, taught by every answer."""

    def __init__(self, pool_processes: int, loads: Iterable[Load]) -> None:
        """`loads` is iterated anew for each question: all served models share the pool and the worker."""
        self._processes = pool_processes
        self._loads = loads
        self._corrections: WeakKeyDictionary[Load, float] = WeakKeyDictionary()

    def correction(self, load: Load) -> float:
        """What this model's forecasts are multiplied with."""
        return self._corrections.get(load, START)

    def predict_s(self, load: Load, rows: int) -> float:
        """Seconds until a request of `rows` rows would be answered, as the model says; not corrected."""
        own_s = load.prepare_s + load.batch_s(min(rows, load.max_rows))
        pool_s, ahead_s = load.unprepared_items * load.prepare_s, _backlog_s(load)
        running_s = later_s = 0.0
        for other in self._loads:
            if other is load or not other.rows_in_flight:
                continue
            pool_s += min(other.unprepared_items, other.preparing_rows) * other.prepare_s
            batch_s = other.batch_s(min(other.rows_in_flight, other.max_rows))
            share_s = ahead_s * other.weight / load.weight
            if other.rows_in_flight < FLOODED * other.max_rows:
                running_s = max(running_s, batch_s)
                later_s += min(_backlog_s(other), share_s)
            else:  # more of it keeps coming, and of the batch that runs a part is done
                running_s = max(running_s, batch_s / (1 + other.workers))
                later_s += share_s
        worker_s = ahead_s + max(running_s, later_s)
        return max(pool_s / self._processes, worker_s) + own_s

    def check(self, load: Load, rows: int, budget_s: float) -> float:
        """The uncorrected forecast (for `answered`), when the corrected one is within the budget.

        Raises:
            DeadlineExceeded: nothing is left of the budget, or it would be too small for an idle server.
            Overloaded: too much work is ahead; carries when to come back.
        """
        if budget_s <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        raw_s = self.predict_s(load, rows)
        if refusal := self._refusal(load, rows, raw_s, budget_s):
            raise refusal
        return raw_s

    def refusal(self, budget_s: float) -> HeadraceError | None:
        """Why one row more could not be answered within the budget, whichever model it is for; None when it could."""
        refusal = None
        for load in self._loads:
            found = self._refusal(load, 1, self.predict_s(load, 1), budget_s)
            if found is None:
                return None
            if refusal is None or _soonest(found) < _soonest(refusal):
                refusal = found
        return refusal

    def _refusal(self, load: Load, rows: int, raw_s: float, budget_s: float) -> HeadraceError | None:
        predicted_s = raw_s * self.correction(load)
        if predicted_s <= budget_s or load.rows_in_flight == 0:
            return None  # with nothing in flight a wrong forecast must be able to prove itself wrong
        alone_s = load.prepare_s + load.batch_s(min(rows, load.max_rows))
        if alone_s > budget_s:
            return DeadlineExceeded(
                f"the deadline leaves {max(0.0, budget_s) * 1e3:.0f} ms, and the model takes {alone_s * 1e3:.0f} ms "
                "alone"
            )
        if raw_s <= budget_s and load.rows_in_flight + rows <= load.max_rows:
            return None  # however slow the last answers were: less than a full batch in flight helps nobody
        return Overloaded(
            f"an answer would take about {predicted_s * 1e3:.0f} ms, the deadline leaves {budget_s * 1e3:.0f} ms",
            retry_after_ms=min(max(round((predicted_s - budget_s) * 1e3), RETRY_MS[0]), RETRY_MS[1]),
        )

    def answered(self, load: Load, predicted_s: float, actual_s: float, budget_s: float) -> None:
        """A request with this uncorrected forecast and budget was answered after `actual_s`."""
        correction = self.correction(load)
        if predicted_s * correction >= budget_s * RELEVANT:
            self._learn(load, correction, longer=actual_s > predicted_s * correction)

    def missed(self, load: Load) -> None:
        """A request was admitted, and not answered within its time."""
        self._learn(load, self.correction(load), longer=True)

    def _learn(self, load: Load, correction: float, *, longer: bool) -> None:
        step = LEARN * (1 - LATE) if longer else -LEARN * LATE
        self._corrections[load] = min(max(correction * (1 + step), LEAST), MOST)

    def __repr__(self) -> str:
        return f"<Forecast corrections={[round(found, 2) for found in self._corrections.values()]}>"


def _soonest(refusal: HeadraceError) -> float:
    """A budget that was too small from the start comes last: to come back later doesn't help."""
    return refusal.retry_after_ms if refusal.retry_after_ms is not None else float("inf")


def _backlog_s(load: Load) -> float:
    rows = load.rows_in_flight
    if not rows:
        return 0.0
    full, rest = divmod(rows, load.max_rows)
    full_s = full * load.batch_s(load.max_rows) if full else 0.0
    return (full_s + (load.batch_s(rest) if rest else 0.0)) / load.workers
