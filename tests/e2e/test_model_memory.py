"""More models than memory: everything is answered, nothing in use is given up, the budget holds, nothing leaks."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace import Client, InferenceError
from headrace.admin_client import AdminClient
from protos.headrace.v1 import inference_pb2 as pb
from protos.headrace.v1 import inference_pb2_grpc as pb_grpc
from shared.errors import NotReady
from shared.settings_loader import load
from tests.support.ledger import at_rest
from tests.support.scarce_memory import (
    MB,
    Said,
    Witness,
    broken_model,
    random_traffic,
    resident_mb,
    simulated_models,
    simulated_version,
    torch_models,
)
from tests.support.stack import Site, eventually, serving

NAMES = ("one", "two", "three")
BUDGET = 250 * MB
WAIT_S = 15.0


@contextmanager
def scarce(folder: Path, repository: Path, budget_bytes: int = BUDGET, **groups: dict[str, Any]) -> Iterator[Site]:
    """A server whose worker has so much memory."""
    worker = {"memory_budget_bytes": budget_bytes, "threads": 1, **groups.pop("worker", {})}
    site = Site(folder / "site", repository, worker=worker, **groups)
    with serving(site):
        yield site


def memory(site: Site) -> dict[str, int]:
    """What the first worker says of its memory, to the first gateway that answers."""
    with AdminClient.connect(load(site.config).settings) as admin:
        (said,) = admin.models().memory
    return {"models": said.models_bytes, "loads": said.loads, "evictions": said.evictions, "budget": said.budget_bytes}


def answered(said: Said, calls: int) -> None:
    assert said.outcomes == {"ok": calls}
    assert said.wrong == []


def within_budget(witness: Witness, budget_bytes: int = BUDGET) -> None:
    assert {each.budget_bytes for each in witness.seen} == {budget_bytes}
    assert max(each.models_bytes for each in witness.seen) <= budget_bytes


def test_three_simulated_models_share_room_for_two(tmp_path: Path, jpeg: bytes) -> None:
    with scarce(tmp_path, simulated_models(tmp_path / "models", dict.fromkeys(NAMES, 100.0))) as site:
        assert site.ready(), "what loads on demand keeps nobody from being ready"
        with Witness(site) as witness:
            said = random_traffic(site.grpc, jpeg, NAMES, calls=300)
        answered(said, 300)
        within_budget(witness)
        after = memory(site)
        assert after["evictions"] > 10
        assert after["loads"] == after["evictions"] + 2
        assert site.ready()
        eventually("nothing in flight", lambda: at_rest(site), WAIT_S)


def test_three_torch_models_share_room_for_two(tmp_path: Path, jpeg: bytes) -> None:
    budget = 30 * MB
    with scarce(tmp_path, torch_models(tmp_path / "models", NAMES), budget) as site:
        with Witness(site) as witness:
            said = random_traffic(site.grpc, jpeg, NAMES, calls=100)
        answered(said, 100)
        within_budget(witness, budget)
        assert memory(site)["evictions"] > 5


def test_two_gateways_share_one_worker_with_room_for_two(tmp_path: Path, jpeg: bytes) -> None:
    repository = simulated_models(tmp_path / "models", dict.fromkeys(NAMES, 100.0))
    with scarce(tmp_path, repository, gateway={"processes": 2, "max_message_bytes": 4 * 1024 * 1024}) as site:
        with Witness(site) as witness:
            said = random_traffic(site.grpc, jpeg, NAMES, calls=200, callers=8, clients=8)
        answered(said, 200)
        within_budget(witness)
        assert memory(site)["evictions"] > 5
        shown = site.debug()["gateways"]
        assert all(sum(model["answered"] for model in each["models"]) for each in shown.values()), "both had callers"


def test_a_killed_worker_in_the_middle_costs_nobody_an_answer(tmp_path: Path, jpeg: bytes) -> None:
    with scarce(tmp_path, simulated_models(tmp_path / "models", dict.fromkeys(NAMES, 100.0))) as site:
        (killed,) = site.worker_pids()

        def kill(done: int) -> None:
            if done == 100:
                os.kill(killed, signal.SIGKILL)

        with Witness(site) as witness:
            said = random_traffic(site.grpc, jpeg, NAMES, calls=200, attempts=20, each=kill)
        answered(said, 200)
        within_budget(witness)
        assert site.worker_pids() != [killed]
        eventually("nothing in flight", lambda: at_rest(site), WAIT_S)


def refusal(site: Site, jpeg: bytes, model: str, timeout_s: float = 10.0) -> InferenceError:
    with Client(site.grpc, max_attempts=1) as client, pytest.raises(InferenceError) as caught:
        client.classify(jpeg, model=model, timeout_s=timeout_s)
    return caught.value


def test_a_model_larger_than_the_budget_says_so_and_the_others_go_on(tmp_path: Path, jpeg: bytes) -> None:
    repository = simulated_models(tmp_path / "models", {"fits": 100.0, "huge": 300.0})
    with scarce(tmp_path, repository) as site:
        for _ in range(2):
            refused = refusal(site, jpeg, "huge")
            assert refused.code == grpc.StatusCode.UNAVAILABLE
            said = str(refused)
            assert "model huge needs 300 MB, and worker.memory_budget_bytes is 250 MB: raise it" in said
        with Client(site.grpc, max_attempts=1) as client:
            assert client.classify(jpeg, model="fits").labels
        assert site.get("/readyz")[0] == 200, "a request for it must not make the server unready for the others"
        assert site.get("/v2/models/fits/ready")[0] == 200
        assert site.get("/v2/models/huge/ready")[0] != 200
        simulated_version(repository, "huge", 200.0)
        eventually("the smaller version to be served", lambda: site.get("/v2/models/huge/ready")[0] == 200, WAIT_S)
        with Client(site.grpc) as client:
            assert client.classify(jpeg, model="huge").labels
        assert memory(site)["models"] == 200 * MB


def test_deadlines_and_leaving_callers_while_a_model_loads_leave_nothing(tmp_path: Path, jpeg: bytes) -> None:
    repository = simulated_models(tmp_path / "models", {"slow": 100.0, "quick": 100.0}, a_ms=1000.0)
    with scarce(tmp_path, repository) as site, grpc.insecure_channel(site.grpc) as channel:
        stub = pb_grpc.InferenceStub(channel)
        request = pb.PredictRequest(model="slow", inputs=[pb.Input(image=jpeg)])
        left = [stub.Predict.future(request, timeout=60.0) for _ in range(5)]
        stays = stub.Predict.future(request, timeout=60.0)
        eventually("all to wait for the load", lambda: waiting(site) == 6, WAIT_S)
        late = [stub.Predict.future(request, timeout=0.3) for _ in range(5)]
        for call in left:
            call.cancel()
        assert {call.code() for call in late} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        eventually("one to wait", lambda: waiting(site) == 1, WAIT_S)
        assert not stays.done(), "those who have left did so before the load was over"
        assert site.debug()["in_flight"]["requests"] == 1
        assert stays.result().results
        eventually("nothing in flight", lambda: at_rest(site), WAIT_S)
        requests = next(model for model in site.debug()["models"] if model["name"] == "slow")
        assert (requests["waiting_rows"], requests["preparing_rows"], requests["answered"]) == (0, 0, 1)


def waiting(site: Site) -> int:
    """Requests that wait for a load."""
    count: int = site.debug()["waiting_for_load"]
    return count


def test_loads_and_failed_loads_give_their_memory_back(tmp_path: Path, jpeg: bytes) -> None:
    """A few of each; bench/model_loads.py does fifty."""
    repository = torch_models(tmp_path / "models", ["keeps", "moves"])
    broken = broken_model(repository, "broken")
    with scarce(tmp_path, repository, 200 * MB) as site, AdminClient.connect(load(site.config).settings) as admin:

        def once() -> None:
            admin.load("moves")
            admin.unload("moves")
            with pytest.raises(NotReady, match=broken):
                admin.load("broken")
            admin.unload("broken")

        for _ in range(3):
            once()
        before = resident_mb(site)
        for _ in range(6):
            once()
        with Client(site.grpc) as client:
            assert client.classify(jpeg, model="keeps").labels
        after = resident_mb(site)
        assert after.keys() == before.keys(), "no process was replaced"
        grown = {name: round(after[name] - before[name], 1) for name in after if after[name] > before[name] + 50}
        assert grown == {}, (before, after)
