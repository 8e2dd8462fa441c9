"""What a process really loads, asked of a fresh interpreter: a linter can't see imports by name."""

import subprocess
import sys

import pytest

from tests.support.source import ROOT


def _loaded_after(module: str) -> set[str]:
    """Top-level names in sys.modules after importing `module`, as its process would at start."""
    script = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["gateway.__main__", "preprocess_pool.__main__", "workers.__main__"])
def test_no_process_loads_torch_to_start(module: str) -> None:
    assert "torch" not in _loaded_after(module)


def test_the_gateway_has_no_image_decoder() -> None:
    assert "cv2" not in _loaded_after("gateway.__main__")


def test_the_pool_has_no_server() -> None:
    assert _loaded_after("preprocess_pool.__main__").isdisjoint({"grpc", "fastapi", "uvicorn", "protos"})


def test_the_worker_has_no_server() -> None:
    assert _loaded_after("workers.__main__").isdisjoint({"grpc", "fastapi", "uvicorn", "protos"})


def test_the_client_is_light() -> None:
    assert _loaded_after("headrace").isdisjoint({"torch", "cv2", "zmq", "fastapi", "uvicorn", "pydantic", "typer"})
