"""What lies in the folder where a command is run is the user's: none of it is taken for a part of ours, or for pip."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.zoo_packages import Package, download
from shared.errors import StartupError
from tests.support.stack import ROOT, Process, Site, simulated_repository

SHADOWS = ("gateway", "workers", "preprocess_pool", "shared", "headrace", "pip")
SHADOW = "from pathlib import Path\nPath('taken').write_text(__name__)\nraise SystemExit(99)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project with packages that happen to be called like ours."""
    for name in SHADOWS:
        (tmp_path / "work" / name).mkdir(parents=True)
        for file in ("__init__.py", "__main__.py"):
            (tmp_path / "work" / name / file).write_text(SHADOW)
    return tmp_path / "work"


def taken(folder: Path) -> str:
    """Which of the user's packages was run."""
    return (folder / "taken").read_text() if (folder / "taken").exists() else ""


def test_a_server_is_made_of_its_own_parts(folder: Path, tmp_path: Path) -> None:
    site = Site(folder, simulated_repository(tmp_path / "models"))
    argv = [sys.executable, "-P", "-m", "headrace", "serve", "--config", str(site.config)]
    with Process(argv, folder) as process:
        try:
            process.wait_line("Headrace is ready")
            assert site.pool_pids()
        finally:
            site.kill_all()
    assert taken(folder) == ""


def test_an_import_is_proved_by_our_own_module(folder: Path, tmp_path: Path) -> None:
    prove = (
        "import sys; from headrace.import_model import _prove; from pathlib import Path; _prove(Path(sys.argv[1]), 'm')"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", prove, str(tmp_path / "no" / "model")],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "RepositoryError" in done.stderr
    assert taken(folder) == ""


@pytest.mark.parametrize("file", ["p-1.0-py3-none-any.whl", "p-1.0.tar.gz"])
def test_pip_is_the_environments(file: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(StartupError, match=r"can't fetch p==1\.0"):
        download(Package("p", "1.0", "0" * 64, file), tmp_path / "cache")
    assert taken(folder) == ""
