"""A user's own pipeline that misbehaves costs its own requests, and nobody else anything."""

import time
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from headrace import Client, InferenceError, builtin_models
from headrace.client_results import Text
from protos.headrace.v1 import inference_pb2 as pb
from protos.headrace.v1 import inference_pb2_grpc as pb_grpc
from tests.support.ledger import Load
from tests.support.stack import Site, eventually, serving, simulated_repository

OWN = """
import os
import numpy as np
from shared.pipeline import Options, Pipeline, PipelineSpec, Prepared, RawInput
from shared.results import Classification, Label, Text
from shared.tensors import TensorSpec

class Own(Pipeline):
    @property
    def spec(self):
        tensor = TensorSpec(name="x", datatype="UINT8", shape=(4,))
        return PipelineSpec(kind="text", inputs=(tensor,), outputs=(tensor,))

    def preprocess(self, item, options, out):
        word = bytes(item.data)
        if word.startswith(b"dies"):
            os._exit(9)
        if word == b"hang":
            import time; time.sleep(60)
        if word == b"oops":
            raise KeyError("a bug of the pipeline's author in /secret/place")
        if word == b"wide":
            return Prepared(tensors=[np.zeros((1, 5), np.uint8)])
        out[0][0, :4] = np.frombuffer((word + b"    ")[:4], np.uint8)
        return Prepared(tensors=out, context={"word": word.decode()})

    def postprocess(self, outputs, context, options):
        word = context["word"]
        if word == "nump":
            return [Classification([Label(1, "one", np.float32(0.5))])]
        if word == "none":
            return [Classification([Label(-5, None, float("nan"))])]
        if word == "many":
            return [Text("a"), Text("b")]
        if word == "late":
            raise ValueError("too late")
        return [Text(word)]

    def example(self):
        return RawInput(kind="text", data=b"good")
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    repository = simulated_repository(tmp_path_factory.mktemp("own") / "models", "sim", "own")
    (repository / "own" / "model.yaml").write_text("pipeline: own:Own\nbackend: simulated\n")
    (repository / "own" / "own.py").write_text(OWN)
    site = Site(tmp_path_factory.mktemp("own-site"), repository, pool={"processes": 2, "job_limit_ms": 1000})
    with serving(site):
        yield site


def say(site: Site, word: str) -> str:
    with Client(site.grpc, max_attempts=1) as client:
        (result,) = client.predict([Text(word)], model="own", timeout_s=10).results
    return str(getattr(result, "text", result))


def test_it_serves(own: Site) -> None:
    assert say(own, "word") == "word"


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("oops", grpc.StatusCode.INTERNAL),
        ("wide", grpc.StatusCode.INTERNAL),
        ("nump", grpc.StatusCode.INTERNAL),
        ("none", grpc.StatusCode.INTERNAL),
        ("many", grpc.StatusCode.INTERNAL),
        ("late", grpc.StatusCode.INTERNAL),
        ("dies", grpc.StatusCode.INVALID_ARGUMENT),
        ("hang", grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_a_bug_in_a_hook_costs_that_request_only(own: Site, word: str, code: grpc.StatusCode) -> None:
    started_s = time.monotonic()
    with pytest.raises(InferenceError) as caught:
        say(own, word)
    assert caught.value.code == code
    assert "secret" not in str(caught.value)
    assert time.monotonic() - started_s < 8.0
    assert say(own, "word") == "word"


def test_poison_is_refused_the_second_time_without_costing_a_process(own: Site) -> None:
    for _ in range(2):
        with pytest.raises(InferenceError):
            say(own, "dies")
    eventually("both processes", lambda: len(own.pool_pids()) == 2, 10.0)
    pids = own.pool_pids()
    for _ in range(5):
        with pytest.raises(InferenceError) as caught:
            say(own, "dies")
        assert caught.value.code == grpc.StatusCode.FAILED_PRECONDITION
    assert own.pool_pids() == pids


def test_a_model_whose_inputs_kill_does_not_stall_the_others(own: Site, jpeg: bytes) -> None:
    with Load(own.grpc, jpeg, callers=2, model="sim", timeout_s=5.0) as load:
        load.wait_for("ok", 20)
        for number in range(4):  # each is new, so none is in quarantine: eight processes die
            with pytest.raises(InferenceError):
                say(own, f"dies{number}")
        load.wait_for("ok", 20)
    assert load.wrong == load.overdue == []
    assert set(load.outcomes) == {"ok"}, load.outcomes


def test_debug_counts_them_by_reason(own: Site) -> None:
    failed = next(model["failed"] for model in own.debug()["models"] if model["name"] == "own")
    assert failed["internal"] >= 6
    assert failed["invalid_input"] >= 2


def test_raw_tensors_pass_nan_with_a_flag(tmp_path_factory: pytest.TempPathFactory) -> None:
    repository = tmp_path_factory.mktemp("raw") / "models"
    builtin_models.fetch(repository)
    site = Site(tmp_path_factory.mktemp("raw-site"), repository, models=["identity"])
    values = np.array([[np.nan, np.inf, *range(14)]], "<f4")
    with serving(site), grpc.insecure_channel(site.grpc) as channel:
        tensor = pb.Tensor(name="INPUT0", datatype="FP32", shape=(1, 16), data=values.tobytes())
        request = pb.PredictRequest(model="identity", inputs=[pb.Input(tensors=pb.TensorList(tensors=[tensor]))])
        answer, call = pb_grpc.InferenceStub(channel).Predict.with_call(request, timeout=10)
        assert answer.results[0].tensors.tensors[0].data == values.tobytes()
        assert 'nonfinite;desc="1"' in dict(call.trailing_metadata())["server-timing"]
        assert 'headrace_rows_nonfinite_total{model="identity"} 1.0' in site.get("/metrics")[1]
