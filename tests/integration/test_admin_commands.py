"""`headrace traffic` and `headrace models load | unload | status | watch` against a real admin service."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from structlog.testing import capture_logs
from typer.testing import CliRunner

from headrace import admin_run
from headrace.admin_client import AdminClient
from headrace.admin_commands import register
from headrace.admin_results import Change
from headrace.admin_wire import NoServer
from shared.errors import Conflict, StartupError, UnknownModel, UnknownVersion
from shared.repository import Repository
from shared.repository_writer import change_traffic
from shared.traffic import Canary, Traffic, Why, start_canary
from tests.support.fake_admin import (
    LIMIT_S,
    AdminThread,
    admin_server,
    admin_settings,
)
from tests.support.stack import eventually


class Shell:
    """Runs commands in a folder with a headrace.yaml."""

    def __init__(self, config: Path) -> None:
        self._config = str(config)
        app, models_app = typer.Typer(), typer.Typer()
        app.add_typer(models_app, name="models")
        register(app, models_app)
        self._app = app
        self.err = ""

    def __call__(self, *arguments: str, columns: int = 200) -> str:
        """What it prints. Raises what it raises."""
        config = [] if "--help" in arguments else ["--config", self._config]
        result = CliRunner().invoke(self._app, [*arguments, *config], env={"COLUMNS": str(columns)})
        self.err = result.stderr
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)

    def json(self, *arguments: str) -> dict[str, object]:
        found: dict[str, object] = json.loads(self(*arguments, "--json"))
        return found


@pytest.fixture
def shell(root: Path, runtime_dir: Path, tmp_path: Path) -> Shell:
    config = tmp_path / "headrace.yaml"
    config.write_text(f"repository: {root}\nruntime_dir: {runtime_dir}\n")
    return Shell(config)


@pytest.fixture
def server(root: Path, runtime_dir: Path, versions: list[str]) -> Iterator[AdminThread]:
    # The server's log belongs to another process's stderr, not into what the commands print here.
    with capture_logs(), admin_server(admin_settings(root, runtime_dir)) as server:
        yield server


@pytest.mark.parametrize(
    "command",
    [("traffic",), ("models", "load"), ("models", "unload"), ("models", "status"), ("models", "watch")],
    ids=" ".join,
)
def test_the_help_of_every_command_has_examples(shell: Shell, command: tuple[str, ...]) -> None:
    out = shell(*command, "--help")
    assert "Examples:" in out
    assert out.count("headrace " + " ".join(command)) >= 2
    assert "--json" in out


def test_traffic_from_canary_to_rollback(shell: Shell, server: AdminThread, versions: list[str]) -> None:
    old, new, _ = versions
    out = shell("traffic", "m", "--canary", new[:6], "--percent", "5,25,100", "--every", "10m", "--by", "request_id")
    assert f"✓ m: {new} answers 5 % of the callers, by request_id; 25 % in 10 min" in out
    table = shell("traffic", "m")
    assert re.search(rf"{old} +● current +95 % +100 +0 +0 +0/50 +4\.5 +20\.2", table)
    assert re.search(rf"{new} +canary +5 % +100 +1 +0 +2/50", table)
    assert re.search(r"25 % in (10 min|9 min \d+ s) \(steps 5, 25, 100 %, every 10 min\)", table)
    assert re.search(rf"canary 5 % +{new} +\S.* \(uid \d+\)", table)
    assert f"✓ m: {new} answers all callers; {old} stays loaded" in shell("traffic", "m", "--promote")
    out = shell("traffic", "m", "--rollback", "--reason", "too many [red]dogs")
    assert f"✓ m: rolled back: {old} answers all callers; {new} stays loaded" in out
    assert "too many [red]dogs" in shell("traffic", "m")
    assert shell.err == ""


def test_a_rollback_that_is_not_written_yet_is_in_force_and_says_so(
    shell: Shell, server: AdminThread, versions: list[str]
) -> None:
    old, new, _ = versions
    shell("traffic", "m", "--canary", new, "--percent", "5")
    server.control.amiss = {"unwritten": "model m: can't be written: No space left on device"}
    assert f"✓ m: rolled back: {old} answers all callers" in shell("traffic", "m", "--rollback", "--ends", new)
    told = "in force, not yet written: model m: can't be written: No space left on device; it is tried again"
    assert told in shell.err
    assert f"! {told}" in shell("traffic", "m")
    assert shell.json("traffic", "m")["unwritten"] == server.control.amiss["unwritten"]


def test_what_speaks_against_a_version_is_told_by_the_order_that_gives_it_callers_and_by_the_status(
    shell: Shell, server: AdminThread, versions: list[str]
) -> None:
    server.control.doubt = "its proof gave NaN"
    shell("traffic", "m", "--to", versions[1])
    assert shell.err == "! its proof gave NaN\n"
    assert re.search(r"switch +\S+ +.* its proof gave NaN", shell("traffic", "m"))
    shell("traffic", "m", "--drop-standby")
    assert shell.err == ""
    assert f"! m {versions[1]}: its proof gave NaN" in shell("models", "status")


def test_a_canary_that_is_loading_is_shown_and_is_what_a_rollback_ends(
    shell: Shell, server: AdminThread, root: Path, versions: list[str]
) -> None:
    old, new, _ = versions
    coming = Traffic(current=old, canary=Canary(version=new, percent=5))
    server.control.amiss = {"coming": coming}
    table = shell("traffic", "m")
    assert re.search(rf"{new} +canary, loading +0 %", table)
    assert f"! {new} is loading; until it can answer, {old} answers for it" in table
    change_traffic(root, "m", lambda now: start_canary(now, coming.canary, Why("now", "me")))  # type: ignore[arg-type]  # there is one
    server.control.amiss = {"coming": coming, "refused": "no memory"}
    assert "! traffic.json says something else, which is not served: no memory" in shell("traffic", "m")
    assert f"rolled back: {old} answers all" in shell("traffic", "m", "--rollback")
    server.control.amiss = {}
    shell("traffic", "m", "--to", new)
    shell("traffic", "m", "--rollback", "--ends", new)
    with pytest.raises(Conflict, match=rf"was a rollback already .*: {old} answers all callers; .*--ends {old}"):
        shell("traffic", "m", "--rollback")
    server.control.amiss = {"coming": Traffic(current=new)}
    assert f"! {new} is to answer and is loading; until then {old} goes on" in shell("traffic", "m")


def test_traffic_as_json(shell: Shell, server: AdminThread, versions: list[str]) -> None:
    after = shell.json("traffic", "m", "--shadow", versions[1], "--percent", "5")
    assert after["canary"] == {
        "version": versions[1],
        "percent": 5.0,
        "by": "routing_key",
        "shadow": True,
        "ramp": None,
    }
    now = shell.json("traffic", "m")
    assert isinstance(now["traffic"], dict)
    assert now["traffic"]["current"] == versions[0]
    assert isinstance(now["figures"], list)
    assert [each["role"] for each in now["figures"]] == ["current", "shadow"]
    assert f"{versions[1]} gets copies of 5 % of the callers, by routing_key" in shell("traffic", "m")
    assert shell.json("traffic", "m", "--rollback")["canary"] is None
    assert shell.json("traffic", "m", "--to", versions[2])["current"] == versions[2]


def test_what_the_server_refuses_is_its_own_error(shell: Shell, server: AdminThread, versions: list[str]) -> None:
    with pytest.raises(Conflict, match="no canary"):
        shell("traffic", "m", "--promote")
    with pytest.raises(UnknownVersion, match="has no such version"):
        shell("traffic", "m", "--to", "ffff")
    with pytest.raises(UnknownModel):
        shell("traffic", "nobody")
    with pytest.raises(StartupError, match="--watch goes with no change"):
        shell("traffic", "m", "--promote", "--watch")


def test_without_a_server_it_is_written_and_said(shell: Shell, root: Path, versions: list[str]) -> None:
    shell("traffic", "m", "--canary", versions[1], "--percent", "5")
    assert "no server runs: written to traffic.json, the next start takes it up" in shell.err
    table = shell("traffic", "m")
    assert re.search(rf"{versions[1]} +canary +5 %", table)
    assert "this is what traffic.json says" in table
    assert shell.json("traffic", "m", "--promote")["current"] == versions[1]
    assert "no server runs" in shell.err  # not among the JSON
    assert Repository(root).current("m") == versions[1]
    for command in (("models", "load", "m"), ("models", "unload", "m"), ("models", "status"), ("models", "watch")):
        with pytest.raises(NoServer, match="no server runs here"):
            shell(*command)


def test_a_model_that_the_server_does_not_serve_is_changed_on_the_disk(
    shell: Shell, server: AdminThread, root: Path, versions: list[str]
) -> None:
    server.control.hidden.add("m")
    shell("traffic", "m", "--to", versions[1])
    assert "the server does not serve this model" in shell.err
    assert Repository(root).current("m") == versions[1]


def test_watched_figures_are_looked_at_again_until_ctrl_c(
    shell: Shell, server: AdminThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def pause(_seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(admin_run.time, "sleep", pause)
    lines = shell("traffic", "m", "--watch", "--json").splitlines()
    assert [json.loads(line)["traffic"]["canary"] for line in lines] == [None] * 3
    looks = 0
    assert "● current" in shell("traffic", "m", "--watch")


def test_load_unload_and_status(shell: Shell, server: AdminThread, versions: list[str]) -> None:
    assert "✓ m is no longer served" in shell("models", "unload", "m")
    assert re.search(rf"m +{versions[0]} .* unloaded", shell("models", "status"))
    assert f"✓ m {versions[0]} is current, loaded in 0.5 s" in shell("models", "load", "m")
    out = shell("models", "status")
    assert re.search(
        rf"{versions[0]} +● current +ready +1\.0 MB +0\.5 s \(read 0\.2, build 0\.3\) +7 \(2/min\) +fp32", out
    )
    assert "worker-0 ████████████░░░░░░░░░░░░ 2.0 of 4.0 MB;" in out
    assert versions[2] not in out  # only stored
    assert json.loads(shell("models", "unload", "m", "--json")) == {"model": "m", "phase": "unloaded"}
    assert json.loads(shell("models", "load", "m", "--json"))[0]["phase"] == "ready"
    memory = shell.json("models", "status")["memory"]
    assert isinstance(memory, list)
    assert memory[0]["budget_bytes"] == 4_000_000


def test_nothing_is_cut_in_a_narrow_terminal(shell: Shell, server: AdminThread, versions: list[str]) -> None:
    shell("traffic", "m", "--canary", versions[1], "--percent", "5")
    status = shell("models", "status", columns=80)
    assert re.search(rf"{versions[1]} +canary 5 % +ready +1\.0 MB +0\.5 s +7 \(2/min\)", status)
    table = shell("traffic", "m", columns=80)
    assert re.search(rf"{versions[0]} +● current +95 % +100 +0 +0 +0/50 +4\.5 +20\.2", table)
    assert max(map(len, (status + table).splitlines())) <= 80


@pytest.mark.parametrize("as_json", [False, True])
def test_watch_prints_what_changes_until_the_server_stops(
    shell: Shell, server: AdminThread, versions: list[str], monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    told: list[Change] = []
    real = AdminClient.watch

    def counted(admin: AdminClient, name: str = "") -> Iterator[Change]:
        for change in real(admin, name):
            told.append(change)
            yield change

    monkeypatch.setattr(AdminClient, "watch", counted)
    printed: list[str] = []
    done = threading.Event()

    def read() -> None:
        printed.append(shell("models", "watch", "m", *(["--json"] if as_json else [])))
        done.set()

    threading.Thread(target=read, daemon=True).start()
    eventually("the watch is on", lambda: len(told) == 1, LIMIT_S)
    server.control.phases[versions[0]] = "proving"
    server.call(server.control.changed)
    eventually("the change was told", lambda: len(told) == 2, LIMIT_S)
    server.do(server.running.close())
    assert done.wait(LIMIT_S)
    if as_json:
        changes = [json.loads(line) for line in printed[0].splitlines()]
        assert changes[0]["whole"]
        assert changes[1]["versions"][0]["phase"] == "proving"
    else:
        assert re.search(rf"^\d\d:\d\d:\d\d m {versions[0]} current 100 % ready$", printed[0], re.MULTILINE)
        assert re.search(rf"m {versions[0]} current 100 % ready → proving$", printed[0], re.MULTILINE)
