import asyncio

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from gateway.api.outcomes import Outcomes


async def test_counts_by_method_and_reason_and_shows_them_to_prometheus() -> None:
    outcomes = Outcomes()
    registry = CollectorRegistry()
    registry.register(outcomes)
    for reason in ("ok", "ok", "overloaded"):
        outcomes.started()
        outcomes.ended("Predict", reason)
    outcomes.started()

    text = generate_latest(registry).decode()

    assert 'headrace_calls_total{method="Predict",reason="ok"} 2.0' in text
    assert 'headrace_calls_total{method="Predict",reason="overloaded"} 1.0' in text
    assert "headrace_calls_in_flight 1.0" in text


async def test_wait_idle_ends_with_the_last_call_or_at_the_limit() -> None:
    outcomes = Outcomes()
    assert await outcomes.wait_idle(0.0)

    outcomes.started()
    assert not await outcomes.wait_idle(0.001)

    waiting = asyncio.create_task(outcomes.wait_idle(5.0))
    await asyncio.sleep(0)
    outcomes.ended("Predict", "ok")
    assert await waiting
    assert repr(outcomes) == "<Outcomes in_flight=0 {('Predict', 'ok'): 1}>"
