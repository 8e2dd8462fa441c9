"""How long a batch will take: an online straight line `a + b·rows` per queue. Pure policy of the gateway process.

Seeded by the worker's warm-up measurements, then fed with every finished batch. The fit is an exponentially weighted
least-squares line that always passes through the weighted mean of what was observed, so it follows the present level;
its slope leans on the seed as far as the observed batches have all had the same size and say nothing about it.
"""

from typing import NamedTuple, TypeAlias

MEMORY_BATCHES = 16.0
"""Weight of the past in batches: the level follows a lasting change within a few dozen batches."""
SEED_WEIGHT = 4.0
"""All warm-up measurements together count as this many batches."""
SLOPE_WEIGHT = 0.05
"""How hard the seed's slope holds on, against the spread of sizes (in squared mean rows) that was observed."""
OUTLIER_DEVIATIONS = 4.0
"""A batch counts as at most this many usual deviations away from its prediction."""
DEVIATION_FLOOR = 0.05
"""The usual deviation is at least this share of the prediction: a very steady device must not make every ripple an
outlier."""


class QueueKey(NamedTuple):
    """What may share a batch: the same model version and the same shape."""

    model: int
    """The gateway's number for (model name, version)."""
    bucket: tuple[int, ...] = ()
    """The input's free dimensions, rounded up; () when the shape is fixed."""


class CostLine(NamedTuple):
    """`fixed_s + row_s · rows` seconds; both at least 0."""

    fixed_s: float
    row_s: float


Measured: TypeAlias = list[tuple[int, float]]
"""(rows, seconds) of batches."""

MOST_BUCKETS = 64
"""Shapes of one model with figures of their own; more would only remember what nobody sends any more."""


class CostModel:
    """Predicts the seconds of a batch; used by the batcher (when to go) and at the door (what can't finish).

    A queue without figures of its own borrows those of its model as a whole, `QueueKey(model, ())`, which all of the
    model's batches teach; with none at all the prediction is 0.0: nothing is held against a deadline before something
    is known.
    """

    __slots__ = ("_fits",)

    def __init__(self) -> None:
        self._fits: dict[QueueKey, _Fit] = {}

    def seed(self, key: QueueKey, batches: Measured) -> None:
        """Start afresh from warm-up measurements: (rows, seconds) of one batch per allowed size.

        The slowest batch so far is kept. Measurements that are no positive numbers are left out; without any left,
        nothing changes.
        """
        usable = [(rows, seconds) for rows, seconds in batches if _usable(rows, seconds)]
        if not usable:
            return
        fit = _Fit(usable)
        fit.slowest_s = max(fit.slowest_s, self.slowest(key))
        self._fits[key] = fit

    def seed_model(self, model: int, batches: Measured, buckets: list[tuple[tuple[int, ...], Measured]]) -> None:
        """Start a model afresh; `buckets`: the measurements of each, where its rows differ in length, shortest first.

        The middle one then stands for the model as a whole, until batches have shown which lengths come.
        """
        for bucket, measured in buckets:
            self.seed(QueueKey(model, tuple(bucket)), measured)
        self.seed(QueueKey(model), buckets[len(buckets) // 2][1] if buckets else batches)

    def observe(self, key: QueueKey, rows: int, seconds: float) -> None:
        """Learn from one finished batch; a measurement that is no positive number is ignored."""
        self._learn(key, rows, seconds)
        if key.bucket:
            self._learn(QueueKey(key.model), rows, seconds)

    def _learn(self, key: QueueKey, rows: int, seconds: float) -> None:
        if not _usable(rows, seconds):
            return
        fit = self._fits.get(key)
        if fit is None:
            if key.bucket:
                self._make_room(key.model)
            fit = self._fits[key] = _Fit([(rows, seconds)], prior=self.line(key))
        else:
            fit.observe(rows, seconds)

    def _make_room(self, model: int) -> None:
        """Callers choose shapes: keep the newest buckets of a model, the others borrow its line again."""
        buckets = [key for key in self._fits if key.model == model and key.bucket]
        if len(buckets) >= MOST_BUCKETS:
            del self._fits[buckets[0]]

    def predict(self, key: QueueKey, rows: int) -> float:
        """Expected seconds of a batch of so many rows."""
        fit = self._fits.get(key) or self._fits.get(QueueKey(key.model))
        return fit.fixed_s + fit.row_s * rows if fit is not None else 0.0

    def line(self, key: QueueKey) -> CostLine:
        """The present line, for predictions elsewhere, metrics and debug; zeros when nothing is known."""
        fit = self._fits.get(key) or self._fits.get(QueueKey(key.model))
        return CostLine(fit.fixed_s, fit.row_s) if fit is not None else CostLine(0.0, 0.0)

    def slowest(self, key: QueueKey) -> float:
        """Seconds of the slowest batch of this queue so far, warm-up included; 0.0 before the first one."""
        fit = self._fits.get(key)
        return fit.slowest_s if fit is not None else 0.0

    def keys(self) -> list[QueueKey]:
        """The queues with figures of their own."""
        return list(self._fits)

    def forget(self, model: int) -> None:
        """Drop everything known about a model version."""
        for key in [key for key in self._fits if key.model == model]:
            del self._fits[key]

    def __repr__(self) -> str:
        lines = (
            f"{key.model}{key.bucket or ''}: {fit.fixed_s * 1e3:.2f} + {fit.row_s * 1e3:.3f}·rows ms"
            for key, fit in self._fits.items()
        )
        return f"<CostModel {', '.join(lines) or 'empty'}>"


class _Fit:
    """One queue's line and the weighted sums behind it."""

    __slots__ = (
        "_deviation_s", "_prior", "_weight", "_x", "_xx", "_xy", "_y", "fixed_s", "row_s", "slowest_s",
    )  # fmt: skip

    def __init__(self, batches: list[tuple[int, float]], prior: CostLine | None = None) -> None:
        each = SEED_WEIGHT / len(batches)
        self._weight = SEED_WEIGHT
        self._x = each * sum(rows for rows, _ in batches)
        self._y = each * sum(seconds for _, seconds in batches)
        self._xx = each * sum(rows * rows for rows, _ in batches)
        self._xy = each * sum(rows * seconds for rows, seconds in batches)
        self._deviation_s = 0.0
        self.slowest_s = max(seconds for _, seconds in batches)
        self.fixed_s, self.row_s = prior or CostLine(0.0, 0.0)
        if len({rows for rows, _ in batches}) > 1:
            self._solve(hold=0.0)
        elif not prior or prior == (0.0, 0.0):
            # One size says nothing about the slope: half of the time is taken as fixed, half as growing with rows.
            mean_rows, mean_s = self._x / self._weight, self._y / self._weight
            self.fixed_s, self.row_s = mean_s / 2, mean_s / 2 / mean_rows
        self._prior = CostLine(self.fixed_s, self.row_s)
        self._solve()

    def observe(self, rows: int, seconds: float) -> None:
        self.slowest_s = max(self.slowest_s, seconds)
        expected_s = self.fixed_s + self.row_s * rows
        off_s = seconds - expected_s
        usual_s = max(self._deviation_s, DEVIATION_FLOOR * expected_s)
        bound_s = OUTLIER_DEVIATIONS * usual_s
        # One stray batch is cut to the bound. A lasting change widens the bound with every batch, so it gets through.
        off_s = min(max(off_s, -bound_s), bound_s)
        self._deviation_s = usual_s + (abs(off_s) - usual_s) * (2 / MEMORY_BATCHES)
        keep = 1 - 1 / MEMORY_BATCHES
        self._weight = self._weight * keep + 1
        self._x = self._x * keep + rows
        self._y = self._y * keep + expected_s + off_s
        self._xx = self._xx * keep + rows * rows
        self._xy = self._xy * keep + rows * (expected_s + off_s)
        self._solve()

    def _solve(self, hold: float = SLOPE_WEIGHT) -> None:
        mean_rows = self._x / self._weight
        mean_s = self._y / self._weight
        spread = max(self._xx / self._weight - mean_rows * mean_rows, 0.0)
        together = self._xy / self._weight - mean_rows * mean_s
        if hold:
            # The prior gives the line's shape; its height is scaled to the present level.
            fixed_s, row_s = self._prior
            hold *= mean_rows * mean_rows
            spread += hold
            together += hold * row_s * mean_s / (fixed_s + row_s * mean_rows)
        # Between flat and through the origin, both ends are at least 0.
        self.row_s = min(max(together / spread, 0.0), mean_s / mean_rows)
        self.fixed_s = max(mean_s - self.row_s * mean_rows, 0.0)


def _usable(rows: int, seconds: float) -> bool:
    return rows > 0 and 0.0 < seconds < float("inf")
