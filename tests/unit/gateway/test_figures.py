import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.figures import Latencies, VersionFigures, merged


@given(st.lists(st.floats(min_value=2e-4, max_value=900), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_quantiles_are_right_within_a_bucket(values: list[float], share: float) -> None:
    latencies = Latencies()
    for value in values:
        latencies.observe(value)
    rank = next(n for n in range(1, len(values) + 1) if n >= share * len(values) - 1e-9)
    assert latencies.quantile_ms(share) == pytest.approx(sorted(values)[rank - 1] * 1e3, rel=0.07)


def test_no_latency_is_too_strange_to_be_counted() -> None:
    latencies = Latencies()
    assert latencies.quantile_ms(0.99) == 0
    for value in (0.0, -1.0, 1e-9, 1e9, float("inf"), float("nan")):
        latencies.observe(value)
    assert latencies.total == 6
    assert 0 < latencies.quantile_ms(0.01) < 0.1
    assert latencies.quantile_ms(1.0) == pytest.approx(1e6, rel=0.1)


def test_several_gateways_add_up() -> None:
    one = VersionFigures(version="a", role="current", requests=30, errors=1, p50_ms=10.0, p99_ms=20.0, batches=3)
    two = VersionFigures(version="a", role="current", requests=10, errors=2, p50_ms=30.0, p99_ms=90.0, batches=4)
    new = VersionFigures(version="b", role="canary", requests=5)
    total, other = merged([[one, new], [two]])
    assert total == VersionFigures(
        version="a", role="current", requests=40, errors=3, p50_ms=15.0, p99_ms=90.0, batches=7
    )
    assert other == new
    assert one.requests == 30  # what was given is as it was
    assert merged([]) == []


def test_figures_travel() -> None:
    figures = VersionFigures(version="b", role="shadow", requests=5, compared=4)
    assert msgspec.json.decode(msgspec.json.encode(figures), type=VersionFigures) == figures
