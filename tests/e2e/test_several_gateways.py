"""`headrace serve` with two gateways on one port: they share the callers and the worker, and one can die alone."""

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace import Client
from tests.support.ledger import Load
from tests.support.stack import START_LIMIT_S, Site, eventually, serving, simulated_repository

BACK_S = 15.0
CONNECTIONS, CALLERS = 12, 2
"""The kernel deals them out: that all go to one gateway happens once in 2048 times."""
GATEWAY = {"processes": 2, "max_message_bytes": 4 * 1024 * 1024, "repository_control": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_repository(tmp_path_factory.mktemp("gateways") / "models", "sim", "second", a_ms=50, b_ms=0)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Site]:
    """A server that the tests with it leave ready."""
    # Small batches that take their time: callers keep the worker busy, and leave the CPU to the gateway that starts.
    site = Site(tmp_path_factory.mktemp("two"), models, gateway=GATEWAY, batching={"max_rows": 4})
    with serving(site) as server:
        yield site
        assert '"child":"worker-0"' not in "".join(line for line in server.lines if '"failures"' in line)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert not site.runtime.exists()


def gateways(site: Site) -> dict[str, Any]:
    return dict(site.debug().get("gateways", {}))


def pid_of(site: Site, number: str) -> int:
    lock = "gateway.lock" if number == "0" else f"gateway-{number}.lock"
    return int((site.runtime / lock).read_text())


def answered(site: Site) -> dict[str, float]:
    """Calls of the model that each gateway has answered, from one scrape."""
    families = {family.name: family for family in text_string_to_metric_families(site.get("/metrics")[1])}
    return {
        sample.labels["gateway"]: sample.value
        for sample in families["headrace_requests"].samples
        if sample.labels["model"] == "sim" and sample.labels["outcome"] == "ok"
    }


def all_ready(site: Site) -> bool:
    return bool(site.debug().get("ready"))


def control(site: Site, model: str, verb: str) -> None:
    url = f"http://{site.http}/v2/repository/models/{model}/{verb}"
    with urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=10) as answer:
        assert json.loads(answer.read()) == {}


def statuses(site: Site, model: str) -> set[int]:
    """What fresh connections are told of a model."""
    return {site.get(f"/v2/models/{model}/ready")[0] for _ in range(CONNECTIONS)}


@pytest.mark.parametrize("processes", [1, 2])
def test_another_server_on_the_ports_is_in_use(two: Site, models: Path, tmp_path: Path, processes: int) -> None:
    second = Site(tmp_path / "second", models, gateway={**GATEWAY, "processes": processes})
    settings = json.loads(second.config.read_text())
    settings["gateway"] |= {"grpc_address": two.grpc, "http_address": two.http}
    second.config.write_text(json.dumps(settings))
    with second.serve() as refused:
        assert refused.wait(START_LIMIT_S) == 3, refused.output()
        assert f"{two.grpc} can't be bound" in refused.output()
    assert all_ready(two)
    second.kill_all()


def each_has_ok(loads: list[Load], more: int) -> None:
    """Every client has had so many further answers."""
    wanted = [load.outcomes["ok"] + more for load in loads]
    eventually(
        f"{more} more answers at each of {len(loads)} clients",
        lambda: all(load.outcomes["ok"] >= least for load, least in zip(loads, wanted, strict=True)),
        START_LIMIT_S,
    )


def test_two_gateways_share_the_callers_and_one_dies_and_returns_alone(two: Site, jpeg: bytes) -> None:
    assert all_ready(two)
    before = answered(two)
    with ExitStack() as stack:
        loads = [stack.enter_context(Load(two.grpc, jpeg, model="sim", callers=CALLERS)) for _ in range(CONNECTIONS)]
        each_has_ok(loads, 3)
        shares = {number: count - before.get(number, 0.0) for number, count in answered(two).items()}
        assert set(shares) == {"0", "1"}
        assert all(count > 0 for count in shares.values()), shares
        victim, other = sorted(shares, key=shares.__getitem__)
        killed, spared, worker = pid_of(two, victim), pid_of(two, other), gateways(two)[other]["workers"][0]["pid"]
        os.kill(killed, signal.SIGKILL)
        each_has_ok(loads, 3)
        eventually("the killed gateway to be back", lambda: all_ready(two), BACK_S)
    assert [load.wrong + load.overdue for load in loads] == [[]] * CONNECTIONS
    hit = [load.outcomes for load in loads if set(load.outcomes) != {"ok"}]
    assert 0 < len(hit) < CONNECTIONS, "calls of one gateway end, those of the other don't notice"
    assert set().union(*hit) == {"ok", "unreachable"}, hit
    assert max(each["unreachable"] for each in hit) <= 2 * CALLERS, "what was in flight, and no long time after it"
    shown = gateways(two)
    assert pid_of(two, victim) != killed
    assert pid_of(two, other) == spared
    assert {each["workers"][0]["pid"] for each in shown.values()} == {worker}
    assert f'headrace_gateway_up{{gateway="{victim}"}} 1.0' in two.get("/metrics")[1]


def test_a_model_is_unloaded_and_loaded_at_both_whichever_was_asked(two: Site) -> None:
    control(two, "second", "unload")
    assert statuses(two, "second") == {404}
    control(two, "second", "load")
    assert statuses(two, "second") == {200}


def test_gateways_by_themselves_each_with_its_number(models: Path, tmp_path: Path, jpeg: bytes) -> None:
    two = Site(tmp_path / "by hand", models, gateway=GATEWAY, models=["sim"])
    with two.module("workers"), two.module("gateway") as first, two.module("gateway", "--index", "1") as second:
        for gateway in (first, second):
            gateway.wait_line('"event":"ready"')
        assert all_ready(two)
        assert [pid_of(two, number) for number in ("0", "1")] == [first.pid, second.pid]
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
        with Client(two.grpc) as client:
            assert client.classify(jpeg, model="sim").labels
        assert gateways(two)["0"] == {"ready": False, "reason": "it does not answer"}
        assert 'headrace_gateway_up{gateway="0"} 0.0' in two.get("/metrics")[1]
        with two.module("gateway"):
            eventually("the first gateway to be back", lambda: all_ready(two), BACK_S)
    two.kill_all()
