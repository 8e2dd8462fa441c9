"""Several models that take the same input, and requests that name none: what is asked for decides, every way in."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from headrace import Client, zoo
from headrace.client_errors import InvalidRequest
from headrace.client_results import Text
from tests.support.stack import ROOT, Site, serving
from tests.support.zoo_parts import fetched

NAMES = ("efficientnet-lite0", "yolov3-tiny", "all-minilm-l6-v2", "toxic-comment")


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    models = tmp_path_factory.mktemp("tasks") / "models"
    for name in NAMES:
        fetched(name, models)
    site = Site(tmp_path_factory.mktemp("site"), models, batching={"max_rows": 2})
    with serving(site):
        yield site


@pytest.fixture(scope="module")
def street() -> Path:
    return next(path for path in zoo.fetch_pictures(ROOT / "models") if path.name == "bus.jpg")


def test_the_client_needs_no_name(several: Site, street: Path) -> None:
    with Client(several.grpc, timeout_s=60.0) as client:
        answers = [client.classify(street), client.detect(street), client.embed("a"), client.classify(Text("a"))]
        many = [outcome.result for outcome in client.detect_many([street] * 2)]
        with pytest.raises(InvalidRequest, match=r"several take image: .*; name the one that is meant"):
            client.predict([street])
    assert [answer.model for answer in answers] == list(NAMES)
    assert [result and result.model for result in many] == ["yolov3-tiny"] * 2


def test_uploads_need_no_name(several: Site, street: Path) -> None:
    image = street.read_bytes()
    with httpx.Client(base_url=f"http://{several.http}", timeout=60.0) as http:
        answers = [
            http.post("/v1/classify", content=image),
            http.post("/v1/detect", content=image),
            http.post("/v1/embed", content="a"),
            http.post("/v1/classify", content="a", headers={"content-type": "text/plain"}),
        ]
    assert [answer.json().get("model") for answer in answers] == list(NAMES)


@pytest.mark.parametrize(
    ("command", "model"),
    [("detect", "yolov3-tiny"), ("classify", "efficientnet-lite0"), ("embed", "all-minilm-l6-v2")],
)
def test_the_command_line_needs_no_name(several: Site, street: Path, command: str, model: str) -> None:
    given = "a" if command == "embed" else str(street)
    call = [sys.executable, "-m", "headrace", command, given, "--address", several.grpc, "--timeout", "60"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert model in done.stdout
