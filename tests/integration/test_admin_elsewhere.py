"""The repository commands with --address: from a machine that has nothing but the token, over TCP with TLS."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from gateway.state import ModelState
from headrace import live
from headrace.cli import app
from shared.errors import Conflict, ExitCode, StartupError, UnknownModel, UnknownVersion
from shared.repository import Repository
from shared.repository_writer import bytes_in
from tests.support.fake_admin import AdminThread


class Elsewhere:
    """Runs commands in an empty folder."""

    def __init__(self, *options: str) -> None:
        self._options = options
        self.exit_code = 0

    def __call__(self, *arguments: str) -> str:
        """What it prints. Raises what it raises."""
        result = CliRunner().invoke(app, [*arguments, *self._options], env={"COLUMNS": "200"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        self.exit_code = result.exit_code
        return re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)

    def json(self, *arguments: str) -> Any:  # noqa: ANN401 - any JSON
        return json.loads(self(*arguments, "--json"))


@pytest.fixture
def logged() -> Iterator[None]:
    """The server's log is not what the commands print."""
    with capture_logs():
        yield


@pytest.fixture
def there(
    logged: None,
    over_tcp: AdminThread,
    certificate: tuple[Path, Path],
    token_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Elsewhere:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    port = over_tcp.running.port
    return Elsewhere("--address", f"localhost:{port}", "--token-file", str(token_file), "--ca", str(certificate[0]))


def test_what_is_there_and_where_it_comes_from(there: Elsewhere, versions: list[str]) -> None:
    rows = {row["version"]: row for row in there.json("models", "list") if row["name"] == "m"}
    assert set(rows) == set(versions)
    assert (rows[versions[0]]["role"], rows[versions[1]]["owner"]) == ("current", "owner 1")
    assert rows[versions[0]]["nbytes"] > 0
    assert re.search(rf"m +{versions[0]} +● current", there("models", "list"))
    shown = there.json("models", "show", "m", versions[1][:6])
    assert (shown["version"], shown["meta"]["owner"], shown["role"]) == (versions[1], "owner 1", "")
    assert [(file["name"], file["nbytes"]) for file in shown["files"]] == [
        ("simulated.json", rows[versions[1]]["nbytes"])
    ]
    for told in (shown, rows[versions[0]]):
        assert (told["pipeline"], told["backend"]) == ("tensor", "simulated")
    assert shown["traffic"]["current"] == versions[0]
    assert f"m {versions[0]} ● current" in there("models", "show", "m")
    assert [change["action"] for change in there.json("models", "history", "m")] == ["switch"]
    with pytest.raises(UnknownVersion, match="has no such version"):
        there("models", "show", "m", "0000")
    with pytest.raises(UnknownModel):
        there("models", "history", "nobody")


def test_what_two_versions_differ_in(there: Elsewhere, versions: list[str]) -> None:
    found = there.json("models", "diff", "m", versions[0][:8], versions[1])
    assert (found["name"], found["before"], found["after"]) == ("m", versions[0], versions[1])
    told = {each["what"]: (each["before"], each["after"]) for each in found["differences"]}
    assert told["owner"] == ("owner 0", "owner 1")
    assert "files.simulated.json" in there("models", "diff", "m", *versions[:2])


def test_a_version_is_sent_and_described_as_at_home(there: Elsewhere, root: Path, versions: list[str]) -> None:
    Path("simulated.json").write_text('{"a_ms": 77}')
    added = there.json(
        "models", "add", "m", "simulated.json", "--owner", "me", "--metric", "top1=0.5", "--param", "lr=0.1",
        "--parent", versions[0][:8],
    )  # fmt: skip
    assert (added["current"], added["present"]) == (False, False)
    meta = Repository(root).meta("m", added["version"])
    assert (meta.owner, meta.metrics, meta.hyperparameters) == ("me", {"top1": 0.5}, {"lr": 0.1})
    assert (meta.parent, meta.source) == (versions[0], "headrace models add")
    assert "was already stored in localhost:" in there("models", "add", "m", "simulated.json")
    assert there.json("models", "add", "m", "simulated.json", "--current")["current"]
    assert Repository(root).current("m") == added["version"]
    with pytest.raises(StartupError, match="absent"):
        there("models", "add", "m", "absent")
    with pytest.raises(UnknownModel):
        there("models", "add", "nobody", "simulated.json")


def test_every_byte_is_hashed_there(there: Elsewhere, root: Path, versions: list[str]) -> None:
    assert (there.json("models", "verify")["versions"], there.exit_code) == (4, 0)
    assert "3 versions" in there("models", "verify", "m")
    rotten = root / "m" / "versions" / versions[2] / "simulated.json"
    rotten.chmod(0o644)
    rotten.write_text("{}")
    found = there.json("models", "verify", "m", "other")
    assert there.exit_code == 1
    assert [(fault["name"], fault["version"]) for fault in found["faults"]] == [("m", versions[2])]


def test_what_is_not_needed_goes(there: Elsewhere, root: Path, versions: list[str]) -> None:
    with pytest.raises(Conflict, match="in use"):
        there("models", "remove", "m", versions[0])
    nbytes = bytes_in(root / "m" / "versions" / versions[1])
    assert there.json("models", "remove", "m", versions[1][:8]) == {
        "name": "m",
        "version": versions[1],
        "nbytes": nbytes,
    }
    would = there.json("models", "gc", "--keep", "0", "--dry-run")
    assert ([each["version"] for each in would["removed"]], would["dry_run"]) == ([versions[2]], True)
    assert f"✓ m {versions[2]} is removed" in there("models", "gc", "m", "--keep", "0")
    assert "nothing to remove" in there("models", "gc", "--keep", "0")
    assert Repository(root).versions("m") == [versions[0]]


@pytest.mark.parametrize("command", ["list", "verify", "gc"])
def test_a_token_without_an_address_is_a_mistake(command: str, token_file: Path) -> None:
    with pytest.raises(StartupError, match="--token-file and --ca go with --address") as caught:
        Elsewhere("--token-file", str(token_file))("models", command)
    assert caught.value.exit_code is ExitCode.BAD_SETTINGS


def test_at_home_a_running_server_is_asked_too(
    logged: None, over_tcp: AdminThread, versions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    coming = ModelState(name="m", version=versions[2], role="coming", phase="loading")
    known = over_tcp.control.index()
    monkeypatch.setattr(over_tcp.control, "index", lambda: [*known, coming])
    with pytest.raises(Conflict, match="in use by the running server"):
        live.remove(over_tcp.settings, "m", versions[2])
    collected = live.collect(over_tcp.settings, "m", keep=0, dry_run=False)
    assert [each.version for each in collected] == [versions[1]]
