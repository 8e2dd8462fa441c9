"""The ledger closes: whatever callers and processes do, both sides count the same ends, by reason.

An open loop at more than twice what can be served, with short and long deadlines, callers that leave, inputs that are
bad, poison or malformed, unknown models, streams, and a kill -9 of the worker and of a pool process in between.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.ledger import compare, server_calls, server_drops, server_requests, server_rows
from tests.support.ledger import at_rest
from tests.support.mixed_load import Ask, MixedLoad, StreamAsk
from tests.support.simulation import repeatable
from tests.support.stack import Site, eventually, serving, simulated_repository

pytestmark = pytest.mark.alone

PIPELINE = """
import os
import numpy as np
from shared.errors import InvalidInput
from shared.pipeline import Options, Pipeline, PipelineSpec, Prepared, RawInput
from shared.results import Text
from shared.tensors import TensorSpec

class Words(Pipeline):
    postprocess_is_trivial = True

    @property
    def spec(self):
        tensor = TensorSpec(name="x", datatype="UINT8", shape=(4,))
        return PipelineSpec(kind="text", inputs=(tensor,), outputs=(tensor,))

    def preprocess(self, item, options, out):
        word = bytes(item.data)
        if word == b"poison":
            os._exit(9)
        if word == b"bad":
            raise InvalidInput("a bad word")
        return Prepared(tensors=[np.zeros((1, 4), np.uint8)])

    def postprocess(self, outputs, context, options):
        return [Text("done") for _ in outputs[0]]

    def example(self):
        return RawInput(kind="text", data=b"good")
"""
RATE, SECONDS = 350.0, 2.0
LIMIT_S = 20.0
POISON = Ask(0.0, text="poison", timeout_s=10.0)
GONE = ("cancelled", "deadline_exceeded")


@pytest.fixture
def words_site(tmp_path: Path) -> Site:
    """20 ms a batch and 2.5 ms a row, up to eight rows: 200 a second."""
    root = simulated_repository(tmp_path / "models", "words", a_ms=20.0, b_ms=2.5)
    (root / "words" / "words.py").write_text(PIPELINE)
    yaml = 'pipeline: words:Words\nbackend: simulated\nbatching: {"max_rows": 8, "max_wait_ms": 5}\n'
    (root / "words" / "model.yaml").write_text(yaml)
    return Site(tmp_path / "site", root, supervisor={"backoff_first_ms": 50}, admission={"max_requests": 64})


def mixed() -> list[Ask]:
    """Callers of all kinds, the same every time; who leaves does so long before its deadline, so that it is plain."""
    random = repeatable(4)
    asks: list[Ask] = []
    at_s = 0.0
    while (at_s := at_s + random.expovariate(RATE)) < SECONDS:
        kind = random.random()
        if kind < 0.03:
            asks.append(Ask(at_s, text="bad"))
        elif kind < 0.05:
            asks.append(Ask(at_s, model="nobody"))
        elif kind < 0.07:
            asks.append(Ask(at_s, malformed=True))
        elif kind < 0.20:
            asks.append(Ask(at_s, timeout_s=2.0, leaves_s=random.uniform(0.001, 0.08)))
        else:
            asks.append(Ask(at_s, timeout_s=random.choice([0.025, 0.1, 0.25, 0.25, 1.0])))
    return asks


def kill_one(pids: Callable[[], list[int]]) -> None:
    """The first one, as soon as there is one: others have died of poison meanwhile."""
    os.kill(eventually("a process to kill", pids, LIMIT_S)[0], signal.SIGKILL)


def test_the_ledger_closes_by_reason(words_site: Site) -> None:
    site, asks = words_site, mixed()
    with serving(site):
        load = MixedLoad(site.grpc)
        kills = [(0.6, lambda: kill_one(site.worker_pids)), (1.3, lambda: kill_one(site.pool_pids))]
        load.run([POISON], LIMIT_S)
        load.run([POISON], LIMIT_S)  # refused from now on
        eventually("a whole pool", lambda: len(site.pool_pids()) == 2, LIMIT_S)
        load.run(asks, LIMIT_S, kills, [StreamAsk(80), StreamAsk(60, leaves_s=0.1)])
        eventually("everything to be given back", lambda: at_rest(site), LIMIT_S)
        metrics = site.get("/metrics")[1]

    unary = compare(load.unary, server_calls(metrics, "Predict"))
    streamed = compare(load.streamed, server_calls(metrics, "PredictStream.answer"))
    assert unary.faults == (), f"{unary} of {load.unary}"
    assert streamed.faults == (), f"{streamed} of {load.streamed}"
    assert (unary.calls, streamed.calls) == (len(asks) + 2, 140)
    assert server_calls(metrics, "PredictStream") == {"ok": 1, "cancelled": 1}
    assert "headrace_calls_in_flight 0.0" in metrics
    assert {"ok", "overloaded", "invalid_input", "unknown_model", "model_disabled", "left"} <= set(load.unary)
    assert unary.mistaken <= 0.01 * unary.calls
    check_inside(metrics, load.malformed)


def check_inside(metrics: str, malformed: int) -> None:
    """The edge's counts against those behind it, and the drops against both."""
    calls = server_calls(metrics, "Predict", "PredictStream.answer")
    requests = server_requests(metrics)
    assert calls == requests + Counter(invalid_input=malformed)

    drops = {point: server_drops(metrics, point) for point in ("admission", "prepare", "batch", "copy")}
    door, inside = drops["admission"], drops["prepare"] + drops["batch"] + drops["copy"]
    computed, nobody = server_rows(metrics)
    assert set(inside) <= set(GONE)
    assert door["cancelled"] == 0
    assert sum(inside.values()) + nobody + door["deadline_exceeded"] == sum(requests[reason] for reason in GONE)
    assert nobody <= computed
    for reason in GONE:
        assert inside[reason] + door[reason] <= requests[reason]
    for reason in ("overloaded", "model_disabled"):
        assert door[reason] == requests[reason] > 0
