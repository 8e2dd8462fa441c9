import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest

from gateway.series import Counter, Histogram

BOUNDS = (1, 2.5, 10.0)
VALUES = (0.0, 1.0, 1.0001, 2.5, 9.0, 10.0, 11.0)

disable_created_metrics()  # type: ignore[no-untyped-call]


def text(counter: type, histogram: type) -> str:
    """What `/metrics` shows of the same numbers."""
    registry = CollectorRegistry()
    calls = counter("calls", "Calls.", ("model", "outcome"), registry=registry)
    calls.labels("a", "ok").inc()
    calls.labels("a", "ok").inc(3)
    calls.labels("b", "lost")
    seconds = histogram("seconds", "Seconds.", ("model",), buckets=BOUNDS, registry=registry)
    for value in VALUES:
        seconds.labels("a").observe(value)
    return generate_latest(registry).decode()


def test_metrics_show_what_the_libraries_own_classes_would_show() -> None:
    assert text(Counter, Histogram) == text(prometheus_client.Counter, prometheus_client.Histogram)


def test_a_wrong_number_of_labels_is_a_mistake() -> None:
    calls = Counter("calls", "Calls.", ("model", "outcome"), CollectorRegistry())
    with pytest.raises(ValueError, match="has labels"):
        calls.labels("a")


def test_series_end_by_their_first_labels_and_begin_again_at_nothing() -> None:
    registry = CollectorRegistry()
    calls = Counter("calls", "Calls.", ("model", "version", "outcome"), registry)
    seconds = Histogram("seconds", "Seconds.", ("model", "version"), BOUNDS, registry)
    for model, version in (("a", "1"), ("a", "2"), ("b", "1")):
        calls.labels(model, version, "ok").inc()
        calls.labels(model, version, "lost").inc()
        seconds.labels(model, version).observe(1.0)
    for series in (calls, seconds):
        series.forget("a", "1")
        series.forget("nobody")
    text = generate_latest(registry).decode()
    assert 'model="a",version="1"' not in text.replace('outcome="ok",', "").replace('outcome="lost",', "")
    assert text.count("calls_total{") == 4
    assert text.count("seconds_count{") == 2
    calls.labels("a", "1", "ok").inc()
    assert registry.get_sample_value("calls_total", {"model": "a", "version": "1", "outcome": "ok"}) == 1
