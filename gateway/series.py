"""Counters and histograms that cost a quarter of a microsecond: plain numbers, formatted only when `/metrics` is read.

They stand in for prometheus_client's own, with the same names and the same text on `/metrics`. Those take a lock and
check their labels with every number, and a request brings about a dozen. Event loop only.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Count:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, by: int = 1) -> None:
        """`by` more."""
        self.value += by


class Buckets:
    """One series of a histogram."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """One more value; a bucket holds those up to its bound, and the bound itself."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus's form: for each bound, how many values lie at or below it."""
        found, total = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            shown = floatToGoString(bound)  # type: ignore[no-untyped-call]
            found.append((shown, float(total)))
        return found


_Child = TypeVar("_Child", Count, Buckets)


class _Series(Generic[_Child]):
    """All series of one name, by their label values."""

    def __init__(self, labels: tuple[str, ...], new: Callable[[], _Child]) -> None:
        self._labels = labels
        self._new: Callable[[], _Child] = new
        self.by_values: dict[tuple[str, ...], _Child] = {}

    def of(self, values: tuple[str, ...]) -> _Child:
        if len(values) != len(self._labels):
            raise ValueError(f"a series has labels {self._labels}, not {values}")
        found = self.by_values.get(values)
        if found is None:
            found = self.by_values[values] = self._new()
        return found

    def forget(self, first: tuple[str, ...]) -> None:
        for values in [values for values in self.by_values if values[: len(first)] == first]:
            del self.by_values[values]


class Counter(Collector):
    """Counts by label values; `/metrics` shows the name with `_total`."""

    def __init__(self, name: str, help_text: str, labels: tuple[str, ...], registry: CollectorRegistry) -> None:
        self._facts = name, help_text, None, labels
        self._series = _Series(labels, Count)
        registry.register(self)

    def labels(self, *values: str) -> Count:
        """The series of these label values, to be kept by whoever counts. Raises ValueError for too few or many."""
        return self._series.of(values)

    def forget(self, *first: str) -> None:
        """End all series whose first label values are these."""
        self._series.forget(first)

    def collect(self) -> Iterable[Metric]:
        """Called when somebody reads `/metrics`."""
        family = CounterMetricFamily(*self._facts)
        for values, count in self._series.by_values.items():
            family.add_metric(values, count.value)
        yield family


class Histogram(Collector):
    """Values by label values, in buckets with rising upper bounds."""

    def __init__(
        self, name: str, help_text: str, labels: tuple[str, ...], buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._facts = name, help_text, None, None, labels
        bounds = tuple(float(bound) for bound in buckets)
        self._series = _Series(labels, lambda: Buckets(bounds))
        registry.register(self)

    def labels(self, *values: str) -> Buckets:
        """The series of these label values, to be kept by whoever observes. Raises ValueError for too few or many."""
        return self._series.of(values)

    def forget(self, *first: str) -> None:
        """End all series whose first label values are these."""
        self._series.forget(first)

    def collect(self) -> Iterable[Metric]:
        """Called when somebody reads `/metrics`."""
        family = HistogramMetricFamily(*self._facts)
        for values, series in self._series.by_values.items():
            family.add_metric(values, series.cumulative(), series.sum)
        yield family


Rows: TypeAlias = Iterable[tuple[tuple[str, ...], float]]
"""Label values and number, one for each series."""
_VERSION = ("model", "version")


class _ReadOnly(Collector):
    """Numbers that somebody else keeps, read when somebody looks."""

    def __init__(self, family: Callable[[], GaugeMetricFamily | CounterMetricFamily], read: Callable[[], Rows]) -> None:
        self._family = family
        self._read = read

    def collect(self) -> Iterable[Metric]:
        family = self._family()
        for labels, value in self._read():
            family.add_metric(labels, value)
        yield family


class Readings:
    """A registry, and numbers in it that others keep."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.seen: set[tuple[str, ...]] = set()
        """Name and version of all that have run, or were asked, since the start."""

    def gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """A value that is read when somebody looks."""
        self.gauges(name, help_text, (), lambda: [((), read())])

    def gauges(self, name: str, help_text: str, labels: tuple[str, ...], read: Callable[[], Rows]) -> None:
        """One value for each of a bounded set of labels, read when somebody looks.

        Of versions only those that have run, or were asked, since the start: a repository may hold hundreds that are
        loaded on demand, and nobody has wanted.
        """
        shown = self._of_seen(read) if labels[: len(_VERSION)] == _VERSION else read
        self.registry.register(_ReadOnly(lambda: GaugeMetricFamily(name, help_text, labels=labels), shown))

    def counter(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """A count that somebody else keeps, read when somebody looks."""
        self.counters(name, help_text, (), lambda: [((), read())])

    def counters(self, name: str, help_text: str, labels: tuple[str, ...], read: Callable[[], Rows]) -> None:
        """Counts that somebody else keeps, one for each of a bounded set of labels."""
        self.registry.register(_ReadOnly(lambda: CounterMetricFamily(name, help_text, labels=labels), read))

    def _of_seen(self, read: Callable[[], Rows]) -> Callable[[], Rows]:
        return lambda: [(labels, value) for labels, value in read() if labels[: len(_VERSION)] in self.seen]
