"""perf_analyzer, Triton's own load generator, runs to its end against us and reads our statistics.

How it is started is in `bench.perf_analyzer`; the tests skip where it can't start.
"""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import perf_analyzer
from headrace import builtin_models
from tests.support.stack import Site, serving, simulated_repository

QUICK = ("--measurement-interval", "400", "--stability-percentage", "1000", "--max-trials", "5")
"""Windows of 0.4 s, and no wait for a stable result: that it works is asked here, not how fast."""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with what the binary links; skips where the binary does not start."""
    try:
        return perf_analyzer.libraries(tmp_path_factory.mktemp("libraries"))
    except perf_analyzer.Unavailable as why:
        pytest.skip(str(why))


@pytest.fixture(scope="module")
def perf_site(tmp_path_factory: pytest.TempPathFactory, libraries: str) -> Iterator[Site]:
    """The built-in models and a simulated classifier; perf_analyzer's shared memory objects have no common prefix."""
    repository = simulated_repository(tmp_path_factory.mktemp("repository") / "models", "sim")
    builtin_models.fetch(repository)
    site = Site(tmp_path_factory.mktemp("perf"), repository, gateway={"system_shared_memory_prefix": "/"})
    with serving(site):
        yield site


def analyzed(site: Site, libraries: str, protocol: str, *arguments: str) -> int:
    """Rows that the server's statistics say were inferred while it measured; every request was answered."""
    address = site.grpc if protocol == "grpc" else site.http
    done = perf_analyzer.run(libraries, "-u", address, "-i", protocol, *QUICK, *arguments)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]
    assert "Failed" not in done.stdout
    counted = re.findall(r"Inference count: (\d+)", done.stdout)
    assert counted, done.stdout[-2000:]
    return int(counted[-1])


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("-m", "identity", "--concurrency-range", "4"), id="sync"),
        pytest.param(("-m", "identity", "--concurrency-range", "8", "--async"), id="async"),
        pytest.param(("-m", "identity", "--concurrency-range", "8", "--async", "--streaming"), id="stream"),
        pytest.param(("-m", "identity", "--concurrency-range", "2", "-b", "8"), id="batch"),
        pytest.param(("-m", "identity_bytes", "--concurrency-range", "2", "--string-length", "1000"), id="bytes"),
        pytest.param(("-m", "add_sub", "--request-rate-range", "100"), id="rate"),
        pytest.param(("-m", "identity", "--concurrency-range", "2", "--shared-memory", "system"), id="shared memory"),
    ],
)
def test_over_grpc(perf_site: Site, libraries: str, arguments: tuple[str, ...]) -> None:
    assert analyzed(perf_site, libraries, "grpc", *arguments) > 0


@pytest.mark.parametrize("model", ["identity", "identity_bytes", "add_sub"])
def test_over_http(perf_site: Site, libraries: str, model: str) -> None:
    assert analyzed(perf_site, libraries, "http", "-m", model, "--concurrency-range", "4") > 0


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_images(perf_site: Site, libraries: str, protocol: str, jpeg: bytes, tmp_path: Path) -> None:
    inputs = tmp_path / "inputs.json"
    raw = len(jpeg).to_bytes(4, "little") + jpeg  # it sends what stands here as it is, so in the protocol's raw form
    inputs.write_text(json.dumps({"data": [{"image": {"b64": base64.b64encode(raw).decode()}}]}))

    assert analyzed(perf_site, libraries, protocol, "-m", "sim", "--input-data", str(inputs)) > 0
