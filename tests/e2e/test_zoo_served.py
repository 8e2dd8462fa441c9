"""Models of three tasks out of the zoo behind one server, added by the command line: texts and files at once."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.client import Client
from headrace.client_results import File
from protos.headrace.v1 import inference_pb2 as pb
from protos.headrace.v1 import inference_pb2_grpc as pb_grpc
from tests.support.skipping import cannot_run
from tests.support.stack import ROOT, Site, serving
from tests.support.zoo_parts import CACHE

NAMES = ("all-minilm-l6-v2-int8", "toxic-comment", "magika")
GOLDEN = ROOT / "tests" / "golden"
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("zoo")
    (folder / ".cache").symlink_to(CACHE)
    (folder / "models").mkdir()
    site = Site(folder / "site", folder / "models", batching={"max_rows": 8})
    for name in NAMES:
        command = [sys.executable, "-m", "headrace", "models", "add", f"zoo:{name}", "--config", str(site.config)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        if "can't fetch" in done.stderr:
            cannot_run(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        assert f"{name} " in done.stdout
    with serving(site):
        yield site
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def stub(site: Site) -> "Iterator[pb_grpc.InferenceStub]":
    with grpc.insecure_channel(site.grpc) as channel:
        yield pb_grpc.InferenceStub(channel)


def golden(name: str) -> Any:  # noqa: ANN401 - as the file has it
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def file_of(parts: list[dict[str, Any]]) -> bytes:
    return b"".join(
        (bytes.fromhex(part["hex"]) if "hex" in part else part["text"].encode()) * part["times"] for part in parts
    )


def test_files_over_the_wire(stub: "pb_grpc.InferenceStub") -> None:
    files = [each for each in golden("magika.json")["files"] if each["answer"] != "empty"]
    request = pb.PredictRequest(model="magika", inputs=[pb.Input(file=file_of(each["parts"])) for each in files])
    answer = stub.Predict(request, timeout=LIMIT_S)
    told = [result.classification.labels[0].name for result in answer.results]
    assert told == [each["answer"] for each in files]


def test_files_by_the_command_line_and_the_client(site: Site, tmp_path: Path) -> None:
    script, page = tmp_path / "a", tmp_path / "b"
    script.write_text("#!/usr/bin/env python3\nimport sys\n\n\ndef main() -> int:\n    return len(sys.argv)\n")
    page.write_text("<!DOCTYPE html><html><head><title>A river</title></head><body><p>Water.</p></body></html>")
    command = [sys.executable, "-m", "headrace", "classify", "--as-file", str(script), str(page), "-m", "magika"]
    command += ["-a", site.grpc, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["labels"][0]["name"] for line in done.stdout.splitlines()] == ["python", "html"]
    with Client(site.grpc, timeout_s=LIMIT_S) as client:
        assert client.classify(File(script.read_bytes()), model="magika").top.name == "python"


def test_a_file_without_bytes_is_refused_by_name(stub: "pb_grpc.InferenceStub") -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Predict(pb.PredictRequest(model="magika", inputs=[pb.Input(file=b"")]), timeout=LIMIT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]  # a call's error has a code
    assert "inputs[0].file has 0 bytes" in caught.value.details()  # type: ignore[attr-defined]  # and details


def test_texts_for_a_model_of_files_are_refused(stub: "pb_grpc.InferenceStub") -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Predict(pb.PredictRequest(model="magika", inputs=[pb.Input(text="print(1)")]), timeout=LIMIT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]  # as above


def test_all_at_once_each_gives_its_own_right_answer(stub: "pb_grpc.InferenceStub") -> None:
    rows = golden("toxic_comment.json")["texts"]
    files = [each for each in golden("magika.json")["files"] if each["answer"] != "empty"]

    def rated(row: dict[str, Any]) -> None:
        request = pb.PredictRequest(model="toxic-comment", inputs=[pb.Input(text=row["text"])])
        request.options.top_k = 6
        labels = stub.Predict(request, timeout=LIMIT_S).results[0].classification.labels
        scores = [score for _, score in sorted((label.index, label.score) for label in labels)]
        assert scores == pytest.approx(row["ratings"], abs=1e-4)

    def judged(file: dict[str, Any]) -> None:
        request = pb.PredictRequest(model="magika", inputs=[pb.Input(file=file_of(file["parts"]))])
        best = stub.Predict(request, timeout=LIMIT_S).results[0].classification.labels[0]
        assert (best.name, best.score) == (file["answer"], pytest.approx(file["score"], abs=1e-3))

    def embedded(words: int) -> list[float]:
        text = "The river turns the wheel. " * words
        request = pb.PredictRequest(model="all-minilm-l6-v2-int8", inputs=[pb.Input(text=text)])
        return list(stub.Predict(request, timeout=LIMIT_S).results[0].embedding.values)

    with ThreadPoolExecutor(12) as pool:
        vectors = [pool.submit(embedded, 1 + number % 5) for number in range(20)]
        waits = [pool.submit(rated, row) for row in rows * 2] + [pool.submit(judged, file) for file in files]
        for wait in waits:
            wait.result()
        found = [each.result() for each in vectors]
    for number, vector in enumerate(found):
        assert len(vector) == 384
        assert sum(a * b for a, b in zip(vector, found[number % 5], strict=True)) == pytest.approx(1, abs=1e-4)


def test_every_version_tells_where_it_comes_from(site: Site) -> None:
    root = Path(site.folder).parent / "models"
    for name in NAMES:
        (meta,) = root.glob(f"{name}/versions/*/meta.json")
        told = json.loads(meta.read_bytes())
        assert told["source"].count("==") == 1
        assert told["licence"]
        assert told["metrics"]
        assert all(len(digest) == 64 for digest in told["hyperparameters"]["package_sha256"].values())
