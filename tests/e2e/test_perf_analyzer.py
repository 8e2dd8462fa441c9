"""perf_analyzer, Triton's own load generator, runs to its end against us and reads our statistics.

The binary comes with tritonclient's wheel and links two libraries that are not everywhere: CUDA's, which it needs only
for GPU memory, and a small one for base64. The tests put stand-ins in their place, and skip where that can't be done.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import builtin_models
from tests.support.stack import Site, serving, simulated_repository

BINARY = Path(sys.executable).parent / "perf_analyzer"
STAND_INS = {
    "libcudart.so.12": "\n".join(
        f"int cuda{name}(void) {{ return 1; }}"
        for name in ("Free", "GetErrorName", "GetErrorString", "IpcGetMemHandle", "Malloc", "Memcpy", "SetDevice")
    ),
    "libb64.so.0d": """
        int base64_encode_block(void) { return 0; }
        int base64_encode_blockend(void) { return 0; }
        void base64_init_encodestate(void) {}
        void base64_init_decodestate(void *state) {}
        static int value(char c) {
            if (c >= 'A' && c <= 'Z') return c - 'A';
            if (c >= 'a' && c <= 'z') return c - 'a' + 26;
            if (c >= '0' && c <= '9') return c - '0' + 52;
            return c == '+' ? 62 : c == '/' ? 63 : -1;
        }
        int base64_decode_block(const char *code, int length, char *plain, void *state) {
            int bits = 0, held = 0, written = 0;
            for (int n = 0; n < length; n++) {
                if (value(code[n]) < 0) continue;
                held = (held << 6 | value(code[n])) & 0xffff, bits += 6;
                if (bits >= 8) bits -= 8, plain[written++] = held >> bits;
            }
            return written;
        }
    """,
}
"""C sources. The first is never called; of the second, only what reads images out of `--input-data`."""
QUICK = ("--measurement-interval", "400", "--stability-percentage", "1000", "--max-trials", "5")
"""Windows of 0.4 s, and no wait for a stable result: that it works is asked here, not how fast."""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with what the binary links; skips where the binary does not start."""
    folder = tmp_path_factory.mktemp("libraries")
    compiler = shutil.which("cc")
    if not BINARY.exists() or compiler is None:
        pytest.skip("perf_analyzer is not installed" if compiler else "no C compiler for perf_analyzer's libraries")
    source, versions = folder / "source.c", folder / "versions"
    for library, code in STAND_INS.items():
        source.write_text(code)
        versions.write_text(f"{library} {{ global: *; }};")
        script = [f"-Wl,--version-script={versions}"] if "cuda" in library else []
        subprocess.run([compiler, "-shared", "-fPIC", *script, "-o", folder / library, source], check=True)
    started = _run(str(folder), "--version")
    if started.returncode not in {0, 99}:  # 99: it wants a model, too
        pytest.skip(f"perf_analyzer can't start here: {started.stderr.strip()[:300]}")
    return str(folder)


@pytest.fixture(scope="module")
def perf_site(tmp_path_factory: pytest.TempPathFactory, libraries: str) -> Iterator[Site]:
    """The built-in models and a simulated classifier; perf_analyzer's shared memory objects have no common prefix."""
    repository = simulated_repository(tmp_path_factory.mktemp("repository") / "models", "sim")
    builtin_models.fetch(repository)
    site = Site(tmp_path_factory.mktemp("perf"), repository, gateway={"system_shared_memory_prefix": "/"})
    with serving(site):
        yield site


def _run(libraries: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
    return subprocess.run(
        [str(BINARY), *arguments], env=environment, capture_output=True, text=True, timeout=90, check=False
    )


def analyzed(site: Site, libraries: str, protocol: str, *arguments: str) -> int:
    """Rows that the server's statistics say were inferred while it measured; every request was answered."""
    address = site.grpc if protocol == "grpc" else site.http
    done = _run(libraries, "-u", address, "-i", protocol, *QUICK, *arguments)
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
