import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from headrace.classify import Wanted
from shared.errors import ExitCode, StartupError, UnknownModel
from tests.support.command_line import Run
from tests.support.stack import ROOT

COMMANDS = [
    ("serve",),
    ("classify",),
    ("detect",),
    ("demo",),
    ("models", "list"),
    ("models", "fetch"),
    ("models", "add"),
    ("models", "import"),
    ("models", "load"),
    ("models", "unload"),
    ("models", "status"),
    ("models", "watch"),
    ("traffic",),
    ("models", "show"),
    ("models", "history"),
    ("models", "diff"),
    ("models", "verify"),
    ("models", "remove"),
    ("models", "gc"),
    ("new",),
    ("config", "explain"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_help_of_every_command_has_examples(run: Run, command: tuple[str, ...]) -> None:
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert "Examples:" in out
    assert out.count("headrace " + " ".join(command)) >= 2


@pytest.mark.parametrize("arguments", [(), ("--help",), ("models",), ("config",)])
def test_help_lists_the_commands(run: Run, arguments: tuple[str, ...]) -> None:
    _, out, err = run(*arguments)
    words = {"list", "fetch"} if "models" in arguments else {"explain"} if "config" in arguments else {"serve", "demo"}
    assert all(word in out + err for word in words)


@pytest.mark.parametrize(
    "arguments",
    [
        ("srve",),
        ("classify",),
        ("classify", "x", "--top-k", "0"),
        ("detect", "x", "--iou-threshold", "1.5"),
        ("serve", "--cfg"),
    ],
)
def test_wrong_usage_is_exit_code_2(run: Run, arguments: tuple[str, ...]) -> None:
    assert run(*arguments)[0] == ExitCode.BAD_SETTINGS


@pytest.mark.parametrize(("arguments", "top_k"), [((), None), (("--top-k", "3"), 3)])
def test_classify_asks_for_a_number_of_classes_only_when_the_user_does(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], top_k: int | None
) -> None:
    asked: list[Wanted] = []

    def classify(_files: list[Path], wanted: Wanted, *, as_json: bool) -> int:
        asked.append(wanted)
        return int(as_json)

    monkeypatch.setattr("headrace.classify.run", classify)
    assert run("classify", "a.jpg", "-m", "m", "-a", "127.0.0.1:1", *arguments)[0] == 0
    assert asked == [Wanted(address="127.0.0.1:1", model="m", top_k=top_k, timeout_s=10.0)]


def test_explain_as_json_has_value_and_origin_of_every_setting(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "headrace.yaml").write_text("log:\n  level: debug\nbatching:\n  max_rows: 4\n")
    monkeypatch.setenv("HEADRACE_POOL__PROCESSES", "3")
    code, out, _ = run("config", "explain", "--json")
    told = json.loads(out)
    assert code == 0
    assert told["log.level"] == {"value": "debug", "origin": "headrace.yaml:2"}
    assert told["pool.processes"] == {"value": 3, "origin": "HEADRACE_POOL__PROCESSES"}
    assert told["batching.sizes"] == {"value": [1, 2, 4], "origin": "derived"}
    assert told["repository"] == {"value": "models", "origin": "default"}
    assert len(told) > 35


def test_explain_as_table(run: Run, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("\ngateway:\n  grpc_address: 127.0.0.1:9001\n")
    code, out, _ = run("config", "explain", "--config", "other.yaml")
    assert code == 0
    assert re.search(r"gateway\.grpc_address +127\.0\.0\.1:9001 +other\.yaml:3", out)
    assert re.search(r"gateway\.reflection +true +default", out)
    assert re.search(r"pool\.processes +null +default", out)
    assert re.search(r"batching\.sizes +\[1, 2, 4, 8, 16, 32\] +default", out)


def test_what_looks_like_markup_is_shown_as_it_is(run: Run, models: Path, tmp_path: Path) -> None:
    root = tmp_path / "[red]models"
    models.rename(root)
    (tmp_path / "odd.yaml").write_text(f"models: [a, b]\nrepository: '{root.name}'\n")
    _, out, _ = run("config", "explain", "--config", "odd.yaml")
    assert re.search(r"models +\[a, b\] +odd\.yaml:1", out)
    assert re.search(r"repository +/.*/\[red\]models +odd\.yaml:2", out)
    title = re.sub(r"\s", "", run("models", "list", "--config", "odd.yaml")[1])  # it is folded to the table's width
    assert re.sub(r"\s", "", f"Models in {root}") in title
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(save({"w": np.zeros(1)}))
    out = run("models", "add", "good", str(weights), "--current", "--config", "odd.yaml")[1]
    assert f"is current in {root}\n" in out


def test_a_path_that_is_not_utf8_is_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_REPOSITORY", os.fsdecode(b"/caf\xe9/\x1b[2J"))
    assert json.loads(run("config", "explain", "--json")[1])["repository"]["value"] == "/caf\\xe9/\x1b[2J"
    assert r"/caf\xe9/\x1b[2J" in run("config", "explain")[1]
    code, _, err = run("models", "list")
    assert code == ExitCode.BAD_SETTINGS
    assert r"/caf\xe9/\x1b[2J" in err


def test_a_terminal_without_unicode_loses_only_what_it_can_not_show(
    run: Run, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii", write_through=True))
    assert run("models", "list", "--config", _config(models))[0] == 0
    assert b"good" in written.getvalue()


def _config(models: Path) -> str:
    file = models.parent / "named.yaml"
    file.write_text(f"repository: {models.name}\n")
    return str(file)


def test_explain_of_one_group_or_key(run: Run) -> None:
    assert set(json.loads(run("config", "explain", "arena", "--json")[1])) == {
        "arena.budget_bytes",
        "arena.inline_bytes",
    }
    assert set(json.loads(run("config", "explain", "pool.processes", "--json")[1])) == {"pool.processes"}
    code, _, err = run("config", "explain", "gatewy")
    assert (code, err) == (2, "headrace: config explain: no setting is called 'gatewy' (did you mean gateway?)\n")


@pytest.mark.parametrize(
    "command", [("config", "explain"), ("models", "list"), ("serve",), ("models", "fetch"), ("demo",)]
)
def test_every_command_refuses_bad_settings_with_one_line(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "headrace.yaml").write_text("log: {level: info}\ngateway:\n  grpc_adress: x\n")
    code, out, err = run(*command)
    assert code == ExitCode.BAD_SETTINGS
    assert err == ("headrace: headrace.yaml:3: unknown key gateway.grpc_adress (did you mean gateway.grpc_address?)\n")
    assert out == ""


def test_an_unknown_variable_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_GRPC_ADDRESS", "x")
    code, _, err = run("config", "explain")
    assert code == ExitCode.BAD_SETTINGS
    assert "HEADRACE_GATEWAY__GRPC_ADDRESS" in err


FAILURES = [
    (("classify", "none.jpg", "-a", "127.0.0.1:1"), 1),
    (("models", "list"), 2),
    (("models", "show", "nobody"), 2),
    (("models", "verify"), 2),
    (("models", "gc"), 2),
    (("new", "a/b"), 4),
    (("new", "m", "--from", "sound"), 2),
    (("models", "fetch", "resnet"), 2),
    (("models", "add", "nobody", "none.safetensors"), 4),
    (("config", "explain", "nothing"), 2),
    (("config", "explain", "--config", "none.yaml"), 2),
]


@pytest.mark.parametrize(("command", "code"), FAILURES, ids=str)
def test_with_json_a_failure_is_one_line_on_stderr_too(run: Run, command: tuple[str, ...], code: int) -> None:
    left, _, err = run(*command, "--json")
    assert left == code
    assert re.fullmatch(r"headrace: [^\n]+\n", err)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (StartupError(ExitCode.IN_USE, "port 8001 is taken"), 3, "headrace: port 8001 is taken\n"),
        (UnknownModel("model 'x' is unknown"), 4, "headrace: model 'x' is unknown\n"),
        (RuntimeError("a bug"), 70, "RuntimeError: a bug"),
    ],
)
def test_failures_leave_with_their_exit_code(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, words: str
) -> None:
    def serve(_config: Path | None) -> int:
        raise error

    monkeypatch.setattr("headrace.supervisor.run", serve)
    left, _, err = run("serve")
    assert left == code
    assert words in err


@pytest.mark.parametrize("code", [0, 3, 70])
def test_serve_hands_over_the_config_and_returns_the_supervisors_code(
    run: Run, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    asked: list[Path | None] = []

    def serve(config: Path | None) -> int:
        asked.append(config)
        return code

    monkeypatch.setattr("headrace.supervisor.run", serve)
    assert run("serve", "-c", "x.yaml")[0] == code
    assert run("serve")[0] == code
    assert asked == [Path("x.yaml"), None]


def test_the_command_line_itself_imports_nothing_heavy() -> None:
    code = (
        "import sys, headrace.cli; "
        "print([name for name in ('torch', 'grpc', 'cv2', 'numpy', 'pydantic', 'zmq') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_python_m_headrace_is_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "config", "explain", "log", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["log.level"]["value"] == "info"
