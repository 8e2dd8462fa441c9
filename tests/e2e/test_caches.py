"""What need not be computed twice: kept answers, kept tensors and shared flights, on the running server."""

import asyncio
import json
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest

from gateway.readiness import PROVE_EVERY_S
from headrace import builtin_models
from headrace.admin_client import AdminClient
from protos.headrace.v1 import inference_pb2 as pb
from protos.headrace.v1 import inference_pb2_grpc as pb_grpc
from shared.repository import Meta
from shared.repository_writer import add_version
from shared.settings_loader import load
from tests.support.pictures import encode, photo
from tests.support.stack import Site, eventually, serving, simulated_repository

MB = 1024 * 1024
CALL_LIMIT_S = 20.0
TTL_S = 2.0
BUDGET = 100_000
"""Of the second server's answers."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server that keeps answers and prepared tensors for as long as the tests take."""
    repository = simulated_repository(tmp_path_factory.mktemp("kept") / "models", "sim", "second", "never")
    builtin_models.fetch(repository)
    config = repository / "never" / "model.yaml"
    config.write_text(config.read_text() + "cache: false\n")
    cache = {"results_budget_bytes": 8 * MB, "prepared_budget_bytes": 32 * MB}
    models = ["sim", "second", "never", "identity"]
    site = Site(tmp_path_factory.mktemp("kept-site"), repository, models=models, cache=cache)
    with serving(site):
        yield site


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server that keeps few answers for a short time, and computes identical requests once; `slow` takes half a
    second a batch."""
    repository = simulated_repository(tmp_path_factory.mktemp("tight") / "models", "slow", a_ms=500.0)
    builtin_models.fetch(repository)
    cache = {"results_budget_bytes": BUDGET, "ttl_s": TTL_S, "single_flight": True}
    site = Site(tmp_path_factory.mktemp("tight-site"), repository, models=["slow", "identity"], cache=cache)
    with serving(site):
        yield site


def jpeg_of(seed: int) -> bytes:
    return encode(photo(240, 180, seed), "JPEG")


class Told(NamedTuple):
    """One answer, and what the server says of it."""

    answer: pb.PredictResponse
    timing: str

    @property
    def reused(self) -> str:
        """`kept`, `shared`, or nothing when it was computed."""
        return next((part.split('"')[1] for part in self.timing.split(", ") if part.startswith("cache;")), "")

    @property
    def prepare_ms(self) -> float:
        return next(float(part.split("=")[1]) for part in self.timing.split(", ") if part.startswith("prepare;"))

    @property
    def best(self) -> list[int]:
        return [label.index for label in self.answer.results[0].classification.labels]


def call(site: Site, request: pb.PredictRequest) -> Told:
    with grpc.insecure_channel(site.grpc) as channel:
        answer, done = pb_grpc.InferenceStub(channel).Predict.with_call(request, timeout=CALL_LIMIT_S)
        return Told(answer, dict(done.trailing_metadata())["server-timing"])


def ask(site: Site, image: bytes, model: str = "sim", top_k: int = 5, **fields: Any) -> Told:  # noqa: ANN401 - of a request
    options = pb.Options(top_k=top_k)
    return call(site, pb.PredictRequest(model=model, inputs=[pb.Input(image=image)], options=options, **fields))


def floats(site: Site, values: list[float]) -> Told:
    tensor = pb.Tensor(name="INPUT0", datatype="FP32", shape=(1, 16), data=np.array(values, "<f4").tobytes())
    return call(site, pb.PredictRequest(model="identity", inputs=[pb.Input(tensors=pb.TensorList(tensors=[tensor]))]))


def computed(site: Site, model: str, version: str = "") -> int:
    """Rows that callers' requests have cost; proofs are not among them."""
    found = [each for each in site.debug()["models"] if each["name"] == model and version in ("", each["version"])]
    return sum(int(rows) * count for each in found for rows, count in each["batch_rows"].items())


def metrics(site: Site) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in site.get("/metrics")[1].splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def classify(site: Site, image: bytes, query: str = "") -> tuple[list[int], str]:
    """By plain upload: labels, and how the server came to them."""
    url = f"http://{site.http}/v1/classify?model=sim&top_k=5{query}"
    with urllib.request.urlopen(urllib.request.Request(url, image), timeout=CALL_LIMIT_S) as answer:
        labels = [label["index"] for label in json.loads(answer.read())["labels"]]
        return labels, Told(pb.PredictResponse(), answer.headers["server-timing"]).reused


def infer(site: Site, values: list[float], **parameters: str) -> str:
    """By the Open Inference Protocol's JSON; how the server came to it."""
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": values}
    body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    url = f"http://{site.http}/v2/models/identity/infer"
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=CALL_LIMIT_S) as answer:
        assert json.loads(answer.read())["outputs"][0]["data"] == values
        return Told(pb.PredictResponse(), answer.headers["server-timing"]).reused


def test_the_same_question_is_computed_once_and_says_so(kept: Site) -> None:
    image, before = jpeg_of(1), metrics(kept)
    rows = computed(kept, "sim")
    first, *others = [ask(kept, image) for _ in range(4)]
    assert [first.reused, *(other.reused for other in others)] == ["", "kept", "kept", "kept"]
    assert {tuple(each.best) for each in (first, *others)} == {tuple(first.best)}
    assert computed(kept, "sim") - rows == 1
    after = metrics(kept)
    assert (
        after['headrace_cache_hits_total{cache="results"}'] - before['headrace_cache_hits_total{cache="results"}'] == 3
    )
    assert (
        after['headrace_cache_misses_total{cache="results"}'] > before['headrace_cache_misses_total{cache="results"}']
    )
    assert after['headrace_cache_bytes{cache="results"}'] > before['headrace_cache_bytes{cache="results"}']


def test_nothing_is_shared_between_options_models_inputs_and_what_callers_claim(kept: Site) -> None:
    image, other = jpeg_of(2), jpeg_of(3)
    mine = ask(kept, image, request_id="mine")
    fewer = ask(kept, image, top_k=3)
    assert (fewer.reused, len(fewer.best), fewer.best) == ("", 3, mine.best[:3])
    second = ask(kept, image, model="second")
    assert (second.reused, second.answer.model) == ("", "second")
    forged = ask(kept, other, request_id="mine", routing_key="mine")
    assert forged.reused == ""
    assert forged.best != mine.best
    assert ask(kept, other, request_id="mine").best == forged.best
    assert ask(kept, image, request_id="another").reused == "kept", "who asks is no part of the question"
    both = call(kept, pb.PredictRequest(model="sim", inputs=[pb.Input(image=image), pb.Input(image=other)]))
    turned = call(kept, pb.PredictRequest(model="sim", inputs=[pb.Input(image=other), pb.Input(image=image)]))
    assert (both.reused, turned.reused) == ("", "")
    assert both.answer.results[0] == turned.answer.results[1]


def test_a_request_may_do_without_by_every_protocol(kept: Site) -> None:
    image = jpeg_of(4)
    first = ask(kept, image)
    hits = kept.debug()["caches"]["prepared"]["hits"]
    anew = ask(kept, image, cache=pb.CACHE_USE_BYPASS)
    assert (anew.reused, anew.best, anew.prepare_ms > 0) == ("", first.best, True)
    assert kept.debug()["caches"]["prepared"]["hits"] == hits, "prepared anew, too"
    assert classify(kept, image) == (first.best, "kept"), "whatever the protocol"
    assert classify(kept, image, "&cache=bypass") == (first.best, "")
    values = [float(number) for number in range(16)]
    assert [infer(kept, values), infer(kept, values), infer(kept, values, cache="bypass")] == ["", "kept", ""]


def test_a_model_may_do_without(kept: Site) -> None:
    image, rows = jpeg_of(5), computed(kept, "never")
    assert [ask(kept, image, model="never").reused for _ in range(3)] == ["", "", ""]
    assert computed(kept, "never") - rows == 3


def test_answers_with_nan_are_never_kept(kept: Site) -> None:
    told = [floats(kept, [float("nan")] * 16) for _ in range(2)]
    assert [each.reused for each in told] == ["", ""]
    assert all('nonfinite;desc="1"' in each.timing for each in told)


def test_another_version_answers_anew_from_the_tensors_that_were_prepared(kept: Site, tmp_path: Path) -> None:
    settings = load(kept.config).settings
    image = jpeg_of(6)
    old = ask(kept, image)
    timing = tmp_path / "simulated.json"
    timing.write_text(json.dumps({"a_ms": 2.0, "b_ms": 0.06}))
    new = add_version(settings.repository, "sim", {"simulated.json": timing}, Meta(source="test"), by="test").version
    with AdminClient.connect(settings) as admin:
        admin.switch("sim", new)
        hits, jobs = kept.debug()["caches"]["prepared"]["hits"], prepared_by_pool(kept)
        after = ask(kept, image)
        assert (after.answer.version, after.reused) == (new, "")
        assert old.answer.version != new
        assert (after.prepare_ms, kept.debug()["caches"]["prepared"]["hits"] - hits) == (0.0, 1)
        assert computed(kept, "sim", new) == 1
        assert jobs["misses"] == prepared_by_pool(kept)["misses"], "nothing was decoded again"
        assert ask(kept, image).reused == "kept"
        admin.roll_back("sim")
        back = ask(kept, image)
        assert back.answer.version == old.answer.version
        assert back.best == old.best


def prepared_by_pool(site: Site) -> dict[str, int]:
    """The counts of the cache of prepared tensors: what it misses, a pool process decodes."""
    return dict(site.debug()["caches"]["prepared"])


def test_a_hundred_identical_requests_at_once_are_one_forward_pass(tight: Site) -> None:
    image, rows, joined = jpeg_of(7), computed(tight, "slow"), metrics(tight)["headrace_single_flight_joined_total"]
    request = pb.PredictRequest(model="slow", inputs=[pb.Input(image=image)])

    async def main() -> list[Told]:
        async with grpc.aio.insecure_channel(tight.grpc) as channel:
            stub = pb_grpc.InferenceStub(channel)

            async def one() -> Told:
                done = stub.Predict(request, timeout=CALL_LIMIT_S)
                return Told(await done, dict(await done.trailing_metadata())["server-timing"])

            return list(await asyncio.gather(*(one() for _ in range(100))))

    told = asyncio.run(main())
    assert len(told) == 100
    assert {tuple(each.best) for each in told} == {tuple(told[0].best)}
    ways = Counter(each.reused for each in told)
    assert ways[""] == 1, ways
    assert computed(tight, "slow") - rows == 1
    assert metrics(tight)["headrace_single_flight_joined_total"] - joined == ways["shared"] > 50


def test_one_who_leaves_does_not_take_the_others_along(tight: Site) -> None:
    image, rows = jpeg_of(8), computed(tight, "slow")
    request = pb.PredictRequest(model="slow", inputs=[pb.Input(image=image)])
    with grpc.insecure_channel(tight.grpc) as channel:
        stub = pb_grpc.InferenceStub(channel)
        leads = stub.Predict.future(request, timeout=CALL_LIMIT_S)
        eventually("it to be in flight", lambda: tight.debug()["in_flight"]["requests"] == 1, CALL_LIMIT_S)
        others = [stub.Predict.future(request, timeout=CALL_LIMIT_S) for _ in range(4)]
        eventually("all to be in flight", lambda: tight.debug()["in_flight"]["requests"] == 5, CALL_LIMIT_S)
        leads.cancel()
        assert all(other.result().results for other in others)
    assert 1 <= computed(tight, "slow") - rows <= 2


def test_what_is_kept_has_its_time(tight: Site) -> None:
    values = [1.0] * 16
    assert [floats(tight, values).reused, floats(tight, values).reused] == ["", "kept"]
    eventually("the answer to be forgotten", lambda: floats(tight, values).reused == "", 10 * TTL_S)


def test_many_different_inputs_stay_within_the_budget(tight: Site) -> None:
    with grpc.insecure_channel(tight.grpc) as channel:
        stub = pb_grpc.InferenceStub(channel)
        for number in range(400):
            data = np.full(16, number, "<f4").tobytes()
            tensor = pb.Tensor(name="INPUT0", datatype="FP32", shape=(1, 16), data=data)
            tensors = pb.Input(tensors=pb.TensorList(tensors=[tensor]))
            stub.Predict(pb.PredictRequest(model="identity", inputs=[tensors]), timeout=CALL_LIMIT_S)
            if number % 50 == 49:
                assert tight.debug()["caches"]["results"]["bytes"] <= BUDGET
    found = tight.debug()["caches"]["results"]
    assert BUDGET // 2 < found["bytes"] <= BUDGET
    assert found["evictions"] > 100
    assert found["entries"] > 50


def test_readiness_is_proven_through_the_pool_whatever_is_kept(kept: Site) -> None:
    before = kept.debug()["caches"]["prepared"]
    jobs = sum(process["jobs"] for process in kept.debug()["pool"])
    eventually(
        "readiness to be proven again",
        lambda: sum(process["jobs"] for process in kept.debug()["pool"]) >= jobs + 3,
        4 * PROVE_EVERY_S,
    )
    after = kept.debug()["caches"]["prepared"]
    assert (after["hits"], after["misses"], after["entries"]) == (before["hits"], before["misses"], before["entries"])
