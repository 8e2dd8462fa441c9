import re
import sys
from pathlib import Path

import pytest

from headrace import cli
from shared.repository import Meta
from shared.repository_writer import add_version
from tests.support.command_line import Run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # no server of this machine's

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        output = capsys.readouterr()
        code = left.value.code
        return (code if isinstance(code, int) else 0), _plain(output.out), _plain(output.err)

    return run


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    (root / "good").mkdir(parents=True)
    (root / "good" / "model.yaml").write_text("pipeline: tensor\nbackend: simulated\n")
    weights = tmp_path / "simulated.json"
    weights.write_text("{}")
    add_version(root, "good", {"simulated.json": weights}, Meta(source="here"), make_current=True)
    return root
