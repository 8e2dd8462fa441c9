"""The demo's own server: a start that fails is told at once, in the server's words."""

from pathlib import Path

import pytest

from headrace.demo_server import running
from shared.errors import ExitCode, StartupError


def test_a_server_that_cannot_start_is_told_with_its_exit_code_and_words(tmp_path: Path) -> None:
    config = tmp_path / "headrace.yaml"
    config.write_text("pool:\n  proceses: 2\n")
    with pytest.raises(StartupError) as caught, running([], tmp_path, config):
        pytest.fail("it must not get ready")
    assert caught.value.exit_code == ExitCode.BAD_SETTINGS
    assert "ended with exit code 2" in caught.value.text
    assert "headrace.yaml:2: unknown key pool.proceses (did you mean pool.processes?)" in caught.value.text
