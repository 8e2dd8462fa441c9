"""The commands and programs of our documents, run as they stand."""

import fcntl
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.support.skipping import cannot_run
from tests.support.stack import ROOT

PORTS = (8000, 8001)
"""Those that the documents name."""
COMMAND_LIMIT_S = 60
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """One fenced block."""

    language: str
    text: str


def blocks(document: Path) -> list[Block]:
    """All blocks that name a language, in the order of the page."""
    return [Block(match[1], match[2]) for match in _BLOCK.finditer(document.read_text())]


def checkout(folder: Path) -> Path:
    """Make a folder look like a newcomer's checkout after `make run`: the models, the photos, the settings."""
    shutil.copytree(ROOT / "models", folder / "models")
    (folder / ".cache").symlink_to(ROOT / ".cache")
    shutil.copy(ROOT / "headrace.yaml", folder)
    return folder


@contextmanager
def own_ports() -> Iterator[None]:
    """The documents' ports for oneself. Another process of these tests is waited for, but nobody else."""
    lock = os.open(Path(tempfile.gettempdir(), f"headrace-documents-{os.getuid()}.lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # bounded by the time limit of the test that waits
        busy = [port for port in PORTS if _in_use(port)]
        if busy:
            cannot_run(f"the documents' ports {busy} are in use on this machine")
        yield
    finally:
        os.close(lock)


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def environment(folder: Path) -> dict[str, str]:
    """A user's, whose shell has the virtual environment active and who runs nothing else."""
    return {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "XDG_RUNTIME_DIR": str(folder)}


def run(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run an `sh` or `python` block in a folder."""
    activate = ". .venv/bin/activate\n"  # this test's interpreter stands first on PATH instead
    argv = ["bash", "-euo", "pipefail", "-c", block.text.replace(activate, "")]
    if block.language == "python":
        argv = [sys.executable, "-c", block.text]
    return subprocess.run(
        argv,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment(folder)},
        capture_output=True,
        text=True,
        timeout=COMMAND_LIMIT_S,
        check=False,
    )
