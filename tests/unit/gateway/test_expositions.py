from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.expositions import merged


def text_of(count: int, model: str = "sim") -> str:
    """One gateway's page: a family of each kind, with and without labels, and a help text with everything in it."""
    registry = CollectorRegistry()
    Counter("calls", 'Help with {braces} and "quotes".', ("model",), registry=registry).labels(model).inc(count)
    Gauge("plain", "No labels.", registry=registry).set(count)
    Histogram("spent_seconds", "Time.", ("model",), buckets=(0.1, 1.0), registry=registry).labels(model).observe(0.5)
    return generate_latest(registry).decode()


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), "each family once"
    found = [
        (sample.name, frozenset(sample.labels.items()), sample.value) for each in families for sample in each.samples
    ]
    assert len({(name, labels) for name, labels, _ in found}) == len(found), "each series once"
    return {(name, labels): value for name, labels, value in found}


def test_every_sample_of_every_gateway_is_there_with_its_number() -> None:
    texts = {"0": text_of(3), "1": text_of(5, 'other {}, \\ " model')}
    together = samples(merged(dict(texts)))
    for number, text in texts.items():
        for (name, labels), value in samples(text).items():
            assert together[name, labels | {("gateway", number)}] == value
    ups = {labels: value for (name, labels), value in together.items() if name == "headrace_gateway_up"}
    assert ups == {frozenset({("gateway", "0")}): 1.0, frozenset({("gateway", "1")}): 1.0}
    assert len(together) == 2 + sum(len(samples(text)) for text in texts.values())


def test_types_and_help_survive() -> None:
    families = {
        family.name: family for family in text_string_to_metric_families(merged({"0": text_of(1), "1": text_of(2)}))
    }
    assert {name: family.type for name, family in families.items()} == {
        "headrace_gateway_up": "gauge",
        "calls": "counter",
        "plain": "gauge",
        "spent_seconds": "histogram",
    }
    assert families["calls"].documentation == 'Help with {braces} and "quotes".'


def test_one_that_does_not_answer_is_left_out_and_shown_as_down() -> None:
    together = samples(merged({"0": text_of(1), "1": None}))
    assert together["headrace_gateway_up", frozenset({("gateway", "1")})] == 0.0
    assert {dict(labels)["gateway"] for name, labels in together if name != "headrace_gateway_up"} == {"0"}


def test_a_family_that_only_one_has_stays_whole() -> None:
    registry = CollectorRegistry()
    Gauge("lonely", "Only here.", registry=registry).set(7)
    together = samples(merged({"0": text_of(1), "1": generate_latest(registry).decode()}))
    assert together["lonely", frozenset({("gateway", "1")})] == 7.0
