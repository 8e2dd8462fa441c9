"""`make stubs`: builds `dist/headrace_client-*.whl`: the stubs and the client, nothing of the server."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]

_SOURCES = ("headrace/__init__.py", "headrace/client*.py", "protos/**/*.py", "protos/**/*.pyi", "protos/**/*.proto")


def main(target: Path) -> Path:
    """Build the wheel into `target` and return its path."""
    with tempfile.TemporaryDirectory() as name:
        stage = Path(name) / "package"
        _stage(stage)
        built = Path(name) / "built"
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *_offline()]
        subprocess.run([*command, "--wheel-dir", str(built), str(stage)], check=True)
        (wheel,) = built.glob("*.whl")
        target.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, target))


def _offline() -> list[str]:
    """Build with the installed setuptools when it is new enough; otherwise pip fetches one for the build."""
    try:
        major = int(importlib.metadata.version("setuptools").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return []
    return ["--no-build-isolation"] if major >= 80 else []


def _stage(stage: Path) -> None:
    """Copy the sources and write the package's own pyproject.toml."""
    for pattern in _SOURCES:
        for source in _ROOT.glob(pattern):
            copy = stage / source.relative_to(_ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
    for package in ("headrace", "protos"):
        (stage / package / "py.typed").touch()
    shutil.copy(_HERE / "README.md", stage)
    text = (_HERE / "pyproject.toml.in").read_text()
    for mark, value in _versions().items():
        text = text.replace(f"@{mark}@", value)
    (stage / "pyproject.toml").write_text(text)


def _versions() -> dict[str, str]:
    """Ours from pyproject.toml; the oldest runtimes that the committed stubs accept, from the stubs."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    stubs = _ROOT / "protos/headrace/v1"
    return {
        "VERSION": project["version"],
        "GRPCIO": _found(r"GRPC_GENERATED_VERSION = '([\d.]+)'", stubs / "inference_pb2_grpc.py"),
        "PROTOBUF": _found(r"# Protobuf Python Version: ([\d.]+)", stubs / "inference_pb2.py"),
    }


def _found(pattern: str, file: Path) -> str:
    found = re.search(pattern, file.read_text())
    if found is None:
        raise SystemExit(f"{file} has no line like {pattern}: was it made by another generator?")
    return found[1]


if __name__ == "__main__":
    print(main(_ROOT / "dist"))
