"""tritonclient and grpcurl, as users have them, against a real `headrace serve`."""

import base64
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import builtin_models
from tests.support import own_process
from tests.support.stack import ROOT, Site, serving, simulated_repository

PREFIX = f"headrace-test-{secrets.token_hex(4)}-"
GRPCURL = Path(sys.executable).parent / "grpcurl"


@pytest.fixture(scope="module")
def triton_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The built-in models and a simulated classifier, with room for ten thousand requests at once."""
    repository = simulated_repository(tmp_path_factory.mktemp("repository") / "models", "sim")
    builtin_models.fetch(repository)
    site = Site(
        tmp_path_factory.mktemp("triton"),
        repository,
        gateway={"system_shared_memory_prefix": PREFIX, "default_deadline_ms": 60_000},
        admission={"max_requests": 12_000, "max_rows": 12_000},
    )
    with serving(site):
        yield site


def triton(case: str, *arguments: str | int, limit_s: float = 60.0) -> Any:  # noqa: ANN401 - what the case gives
    """One case with tritonclient, in a process of its own."""
    return own_process.run("tests.support.triton_grpc", case, *arguments, limit_s=limit_s)


@pytest.mark.parametrize("case", ["facts", "infer", "refusals", "callbacks", "stream", "aio"])
def test_tritonclient(triton_site: Site, case: str) -> None:
    triton(case, triton_site.grpc)


def test_tritonclient_sends_encoded_images(triton_site: Site, jpeg: bytes, tmp_path: Path) -> None:
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(jpeg)
    triton("classify", triton_site.grpc, str(photo))


def test_tritonclient_lays_tensors_into_shared_memory(triton_site: Site) -> None:
    triton("shared_memory", triton_site.grpc, PREFIX)


def test_ten_thousand_requests_at_once_are_answered_each_with_its_own(triton_site: Site) -> None:
    counts = triton("storm", triton_site.grpc, 10_000, 0, limit_s=100)

    assert counts == {"right": 10_000, "wrong": 0, "cancelled": 0, "failed": 0}


def test_cancelling_some_of_many_leaves_right_answers_to_the_rest(triton_site: Site) -> None:
    counts = triton("storm", triton_site.grpc, 2_000, 700, limit_s=100)

    assert counts["wrong"] == counts["failed"] == 0
    assert counts["right"] >= 1_300
    assert counts["right"] + counts["cancelled"] == 2_000


def test_every_name_number_and_type_of_our_contract_is_the_protocols(tmp_path: Path) -> None:
    ours = tmp_path / "ours.bin"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--include_imports", f"--descriptor_set_out={ours}"]
    subprocess.run([*command, "protos/inference/grpc_service.proto"], cwd=ROOT, check=True)

    differing = own_process.run("tests.support.triton_contract", "contract", str(ours))

    # Fields of the other dialect of the protocol, which tritonclient skips as unknown.
    assert sorted(text.split(" ")[0] for text in differing) == [
        "inference.RepositoryModelLoadResponse.isLoaded",
        "inference.RepositoryModelLoadResponse.model_name",
        "inference.RepositoryModelUnloadResponse.isUnloaded",
        "inference.RepositoryModelUnloadResponse.model_name",
    ]


def test_models_are_loaded_and_unloaded_where_the_settings_allow_it(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    builtin_models.fetch(repository)
    with serving(site := Site(tmp_path / "site", repository, gateway={"repository_control": True})):
        said = own_process.run("tests.support.triton_control", "load_and_unload", site.grpc)

    assert said == ["OK", "NOT_FOUND", "OK", "NOT_FOUND", "NOT_FOUND", "NOT_FOUND"]


# ---------------------------------------------------------------- grpcurl


def grpcurl(site: Site, *arguments: str, data: object = None) -> Any:  # noqa: ANN401 - JSON or text
    """One run; JSON where there is some."""
    given = [] if data is None else ["-d", json.dumps(data)]
    command = [str(GRPCURL), "-plaintext", "-max-time", "20", *given, site.grpc, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if data is not None else done.stdout


SERVICE = "inference.GRPCInferenceService"


def test_grpcurl_lists_and_describes_without_a_proto_file(triton_site: Site) -> None:
    assert SERVICE in grpcurl(triton_site, "list").split()
    assert f"{SERVICE}.ModelInfer" in grpcurl(triton_site, "list", SERVICE).split()
    assert "raw_input_contents = 7" in grpcurl(triton_site, "describe", "inference.ModelInferRequest")


def test_grpcurl_sends_typed_contents_and_raw_ones(triton_site: Site) -> None:
    one = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 16]}
    typed = {"model_name": "identity", "inputs": [{**one, "contents": {"fp32_contents": list(range(16))}}]}
    raw = np.arange(16, dtype="<f4").tobytes()

    answers = [
        grpcurl(triton_site, f"{SERVICE}/ModelInfer", data=request)
        for request in (
            typed,
            {"model_name": "identity", "inputs": [one], "raw_input_contents": [base64.b64encode(raw).decode()]},
        )
    ]

    for answer in answers:
        assert base64.b64decode(answer["raw_output_contents"][0]) == raw
    assert grpcurl(triton_site, f"{SERVICE}/ServerReady", data={}) == {"ready": True}
    assert grpcurl(triton_site, f"{SERVICE}/ModelReady", data={"name": "nothing"}) == {}


def test_grpcurl_streams(triton_site: Site) -> None:
    one = {"name": "INPUT0", "datatype": "BYTES", "shape": [1, 1], "contents": {"bytes_contents": ["aGk="]}}
    requests = [{"model_name": model, "id": str(n), "inputs": [one]} for n, model in enumerate(["identity_bytes", "x"])]
    done = subprocess.run(
        [str(GRPCURL), "-plaintext", "-d", "@", triton_site.grpc, f"{SERVICE}/ModelStreamInfer"],
        input="".join(json.dumps(request) for request in requests),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    decoder, text, answers = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        answer, end = decoder.raw_decode(text)
        answers.append(answer)
        text = text[end:].strip()
    assert [answer["infer_response"]["id"] for answer in answers] == ["0", "1"]
    assert "'x' is not served" in answers[1]["error_message"]
