"""When would a request that comes now be answered? What can't be in time is refused at the door. Pure policy.

Two stages work side by side, the pool (per item) and the worker (per batch); the longer backlog decides:

    predicted = correction · max(pool backlog, worker backlog + own batch) + own preparation

`correction` is learned from what really happened: it takes in everything that the model leaves out (other load on the
same cores, transport, the gateway itself). Refusing costs microseconds; starting what can't finish costs everybody.
"""

from collections.abc import Iterable
from typing import Protocol

from shared.errors import DeadlineExceeded, Overloaded

CAUTION = 1.1
"""Refuse a little before the forecast says so: an answer that is late by a hair is as lost as any."""
LEARN = 0.05
"""Weight of the newest observation: about twenty answers change the mind."""
LEAST, MOST = 0.5, 4.0
"""Bounds of the correction, so that one bad second can't close the door for good."""
FLOOR_S = 0.005
"""Shorter forecasts are mostly noise, and teach nothing."""
RETRY_MS = (10, 2000)


class Load(Protocol):
    """What the forecast reads of a served model (`gateway.served.ServedModel`)."""

    @property
    def rows_in_flight(self) -> int:
        """Admitted and not yet answered by a worker."""

    @property
    def unprepared_items(self) -> int:
        """Admitted and not yet through a pool process."""

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
        self.correction = 1.0

    def predict_s(self, load: Load, rows: int) -> float:
        """Seconds until a request of `rows` rows would be answered, as the model says; not corrected."""
        own_s = load.prepare_s + load.batch_s(min(rows, load.max_rows))
        pool_s = sum(each.unprepared_items * each.prepare_s for each in self._loads) / self._processes
        worker_s = sum(_backlog_s(each) for each in self._loads)
        return max(pool_s, worker_s) + own_s

    def check(self, load: Load, rows: int, budget_s: float) -> float:
        """The uncorrected forecast (to `learn` from), when the corrected one is within the budget.

        Raises:
            DeadlineExceeded: the budget would be too small for an idle server.
            Overloaded: too much work is ahead; carries when to come back.
        """
        raw_s = self.predict_s(load, rows)
        predicted_s = raw_s * self.correction
        if predicted_s * CAUTION <= budget_s or load.rows_in_flight == 0:
            return raw_s  # with nothing in flight a wrong forecast must be able to prove itself wrong
        alone_s = load.prepare_s + load.batch_s(min(rows, load.max_rows))
        if alone_s > budget_s:
            raise DeadlineExceeded(
                f"the deadline leaves {max(0.0, budget_s) * 1e3:.0f} ms, and the model takes {alone_s * 1e3:.0f} ms "
                "alone"
            )
        excess_ms = round((predicted_s * CAUTION - budget_s) * 1e3)
        raise Overloaded(
            f"an answer would take about {predicted_s * 1e3:.0f} ms, the deadline leaves {budget_s * 1e3:.0f} ms",
            retry_after_ms=min(max(excess_ms, RETRY_MS[0]), RETRY_MS[1]),
        )

    def learn(self, predicted_s: float, actual_s: float) -> None:
        """A request with this uncorrected forecast took `actual_s`, or was given up after that time."""
        if predicted_s < FLOOR_S:
            return
        moved = self.correction + LEARN * (actual_s / predicted_s - self.correction)
        self.correction = min(max(moved, LEAST), MOST)

    def __repr__(self) -> str:
        return f"<Forecast correction={self.correction:.2f}>"


def _backlog_s(load: Load) -> float:
    rows = load.rows_in_flight
    if not rows:
        return 0.0
    full, rest = divmod(rows, load.max_rows)
    return (full * load.batch_s(load.max_rows) + (load.batch_s(rest) if rest else 0.0)) / load.workers
