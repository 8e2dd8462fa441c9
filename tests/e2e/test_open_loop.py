"""The load generator against the whole server: both sides of the ledger, over both protocols."""

import asyncio

import pytest

from bench import payloads
from bench.arrivals import Phase
from bench.ledger import compare, server_calls, since
from bench.open_loop import Load, Sender
from bench.records import callers_words
from tests.support.stack import Site, eventually

pytestmark = pytest.mark.alone

METHODS = {"native": "Predict", "open-inference": "ModelInfer"}


def _counted(site: Site, method: str) -> dict[str, int]:
    """Calls by word, once none is in flight."""
    eventually("no call in flight", lambda: "headrace_calls_in_flight 0.0" in site.get("/metrics")[1], limit_s=5)
    return dict(server_calls(site.get("/metrics")[1], method))


@pytest.mark.parametrize(("protocol", "wire"), [("native", "grpc"), ("native", "http2"), ("open-inference", "grpc")])
def test_the_ledger_closes_over_a_burst_that_the_server_cant_answer_in_time(
    site: Site, protocol: str, wire: str
) -> None:
    requests = {size: payloads.request(protocol, "image", size, "sim") for size in ("short", "medium")}
    phases = (Phase("poisson", 50, 0.3), Phase("bursts", 1000, 0.3, burst=300))
    load = Load(
        site.grpc,
        payloads.METHODS[protocol],
        requests,
        dict.fromkeys(requests, 1.0),
        phases,
        0.1,
        channels=2,
        wire=wire,
    )
    before = _counted(site, METHODS[protocol])
    result = asyncio.run(Sender(load).run(lambda **_: None))
    counted = since(before, _counted(site, METHODS[protocol]))
    ledger = compare(callers_words(result["total"]["outcomes"]), counted)
    assert ledger.faults == ()
    assert result["phases"][0]["outcomes"]["ok"] > 0
    assert set(result["phases"][1]["outcomes"]) != {"ok"}
