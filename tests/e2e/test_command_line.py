"""`headrace classify`, `models` and `demo` against real servers, as a user types them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import Client
from shared.errors import ExitCode
from tests.support.stack import ROOT, Site, serving, simulated_repository

LIMIT_S = 400
"""The demo imports torch, fetches what is missing and loads five models; on a busy two-core machine that takes long."""


def headrace(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture
def images(tmp_path: Path, jpeg: bytes) -> Path:
    for index in range(5):
        (tmp_path / f"{index}.jpg").write_bytes(jpeg)
    (tmp_path / "text.jpg").write_text("no image")
    return tmp_path


def test_one_image(site: Site, images: Path) -> None:
    done = headrace(images, "classify", "0.jpg", "-m", "sim", "-k", "3", "-a", site.grpc)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" %") == 3
    assert "ms, batch of" in done.stdout


def test_many_images_of_which_one_is_none(site: Site, images: Path) -> None:
    files = [f"{index}.jpg" for index in range(5)]
    done = headrace(images, "classify", *files, "text.jpg", "none.jpg", "-m", "sim", "-a", site.grpc, "--json")
    assert done.returncode == 1
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["file"] for row in rows] == [*files, "text.jpg", "none.jpg"]
    assert all(len(row["labels"]) == 5 for row in rows[:5])
    assert [row["error"]["reason"] for row in rows[5:]] == ["invalid_input", "unreadable"]


def test_an_unknown_model_is_told(site: Site, images: Path) -> None:
    done = headrace(images, "classify", "0.jpg", "-m", "nothing", "-a", site.grpc)
    assert done.returncode == 1
    assert "nothing" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_server(images: Path) -> None:
    done = headrace(images, "classify", "0.jpg", "-a", "127.0.0.1:1")
    assert done.returncode == 1
    assert "start a server with: headrace serve" in done.stderr
    assert "Traceback" not in done.stderr


def test_versions_beside_a_running_server(tmp_path: Path, jpeg: bytes) -> None:
    """What concerns who answers goes through the server, which proves a version first; the rest is done on the disk."""
    root = simulated_repository(tmp_path / "models", "sim")
    site = Site(tmp_path / "site", root, models=["sim"])
    weights = tmp_path / "simulated.json"

    def models(*arguments: str) -> subprocess.CompletedProcess[str]:
        return headrace(tmp_path, "models", *arguments, "--config", str(site.config))

    def add(a_ms: float, *more: str) -> str:
        weights.write_text(json.dumps({"a_ms": a_ms, "b_ms": 0.1}))
        done = models("add", "sim", str(weights), "--json", *more)
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["version"])

    with serving(site), Client(site.grpc) as client:
        first = client.classify(jpeg, model="sim").version
        second = add(1.0)
        assert client.classify(jpeg, model="sim").version == first, "a later one answers nobody by itself"
        assert add(1.0, "--current") == second
        assert client.classify(jpeg, model="sim").version == second
        history = json.loads(models("history", "sim", "--json").stdout)
        assert history[-1]["to"] == second
        assert history[-1]["by"] != "headrace models add", "the server wrote it"
        bad = models("add", "sim", str(tmp_path / "site" / "headrace.yaml"), "--current")
        assert bad.returncode != 0
        assert "Traceback" not in bad.stderr
        assert client.classify(jpeg, model="sim").version == second, "what can't be loaded changes nothing"
        for version in (first, second):
            refused = models("remove", "sim", version[:6])
            assert refused.returncode == ExitCode.MODEL_LOAD
            assert "is in use" in refused.stderr
        third = add(2.0)
        assert models("remove", "sim", third).returncode == 0
        assert models("verify").returncode == 0
        assert client.classify(jpeg, model="sim").version == second


@pytest.mark.skipif(not (ROOT / "models/efficientnet-lite0/versions").is_dir(), reason="needs `headrace models fetch`")
def test_the_demo_is_right_on_every_task() -> None:
    done = headrace(ROOT, "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    for told in (
        "of 20 right",
        "✓ bus.jpg: 4 persons and 1 bus",
        "✓ like ones are above",
        "✓ the rude one is told from the others",
        "The capital of France is Paris.",
    ):
        assert told in done.stdout
