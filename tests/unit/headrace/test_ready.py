import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import ready
from headrace.ready import ReadyWord, ready_text
from shared.repository import ModelVersion, Repository
from shared.settings import Settings
from tests.support.stack import simulated_repository

DETAIL = "gRPC 127.0.0.1:8001, HTTP 127.0.0.1:8000, models efficientnet-lite0"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    pipelines = {"efficientnet-lite0": "image_classification", "other": "image_classification", "table": "tensor"}
    monkeypatch.setattr(ready, "_pipeline", lambda name, _repository: pipelines.get(name, ""))
    monkeypatch.setattr(ready, "_program", lambda: ".venv/bin/headrace")
    return Settings(repository=tmp_path / "models")


def test_it_says_where_and_what_to_type(settings: Settings) -> None:
    assert ready_text(DETAIL, settings) == (
        "Headrace is ready: gRPC 127.0.0.1:8001, HTTP 127.0.0.1:8000, models efficientnet-lite0\n"
        "Try it:  .venv/bin/headrace classify PHOTO.jpg"
    )


def test_a_fetched_photo_makes_the_line_run_as_it_stands(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".cache" / "photos").mkdir(parents=True)
    (tmp_path / ".cache" / "photos" / "cat one.jpg").touch()
    assert ready_text(DETAIL, settings).endswith(" classify '.cache/photos/cat one.jpg'")


@pytest.mark.parametrize(
    ("detail", "command"),
    [
        (DETAIL.replace("8001", "9001"), ".venv/bin/headrace classify PHOTO.jpg --address 127.0.0.1:9001"),
        (DETAIL.replace("127.0.0.1:8001", "0.0.0.0:8001"), ".venv/bin/headrace classify PHOTO.jpg"),
        (DETAIL.replace("127.0.0.1:8001", "[::]:7"), ".venv/bin/headrace classify PHOTO.jpg --address 127.0.0.1:7"),
        (DETAIL + ", other", ".venv/bin/headrace classify PHOTO.jpg --model efficientnet-lite0"),
        (DETAIL + "; NOT ready: other (no weights)", ".venv/bin/headrace classify PHOTO.jpg"),
        (DETAIL.replace("efficientnet-lite0", "table"), "curl http://127.0.0.1:8000/readyz"),
    ],
)
def test_the_command_fits_what_is_served(settings: Settings, detail: str, command: str) -> None:
    assert ready_text(detail, settings).splitlines()[-1] == f"Try it:  {command}"


def test_an_unknown_detail_is_only_passed_on(settings: Settings) -> None:
    assert ready_text("somehow", settings) == "Headrace is ready: somehow"


def test_the_program_is_named_as_it_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert ready._program() == f"{tmp_path}/bin/python -m headrace"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "headrace").touch(0o755)
    assert ready._program() == "bin/headrace"
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert ready._program() == "headrace"


def test_a_model_that_is_gone_is_no_reason_to_fail(tmp_path: Path) -> None:
    assert "curl" in ready_text(DETAIL, Settings(repository=tmp_path / "models"))


def test_the_word_is_said_once_when_all_gateways_are_ready_at_once(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    serving: set[str] = set()
    word = ReadyWord(["gateway", "gateway-1"], settings)
    word.serving = lambda: serving
    said: list[int] = []

    def ready(name: str, first: bool) -> None:
        serving.add(name)
        word(name, DETAIL, first)
        said.append(capsys.readouterr().out.count("Headrace is ready: "))

    ready("gateway", True)
    ready("worker-0", True)
    serving.discard("gateway")  # it dies before the other one is ready
    ready("gateway-1", True)
    ready("gateway", False)
    serving.discard("gateway-1")
    ready("gateway-1", False)
    assert said == [0, 0, 0, 1, 0]


def test_of_hundreds_of_models_only_as_many_are_read_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor does this, and hears no SIGTERM meanwhile."""
    root = simulated_repository(tmp_path / "models", *(f"model-{number}" for number in range(20)))
    read: list[str] = []
    opened = Repository.open
    listed = Path.iterdir

    def open_one(repository: Repository, name: str) -> ModelVersion:
        read.append(name)
        return opened(repository, name)

    def list_one(path: Path) -> Iterator[Path]:
        assert path != root, "the whole repository is read for one model"
        return listed(path)

    monkeypatch.setattr(Repository, "open", open_one)
    monkeypatch.setattr(Path, "iterdir", list_one)
    detail = DETAIL.replace("efficientnet-lite0", ", ".join(f"model-{number}" for number in range(20)))
    assert "--model model-0" in ready_text(detail, Settings(repository=root))
    assert read == ["model-0"]
