import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import cv2
import grpc
import pytest

from headrace import many_inputs
from headrace.client_errors import InferenceError, InvalidRequest, WrongTask
from headrace.client_results import Detected, Detection, Label, Outcome, ServerTiming
from headrace.detect import Wanted
from headrace.detect import run as detect
from shared.errors import ExitCode, StartupError
from tests.support.command_line import Run
from tests.support.pictures import encode, photo

NOTHING: dict[str, Any] = {"score_threshold": None, "iou_threshold": None, "max_detections": None, "classes": None}
CAT, DOG = (
    Detection(Label(index, name, score), left, 20.4, left + 60, 90.0)
    for index, name, score, left in ((0, "cat", 0.9, 10.0), (1, "dog", 0.25, 100.0))
)


class FakeClient:
    """Finds two cats and a dog, or nothing, by the file's name."""

    asked: list[dict[str, Any]]

    def __init__(self, address: str, *, timeout_s: float) -> None:
        assert (address, timeout_s) == ("127.0.0.1:1", 10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def detect(self, image: Path, **asked: Any) -> Detected:  # noqa: ANN401 - the options
        self.asked.append(asked)
        if image.stem == "classifier":
            raise WrongTask("lite0", "Classification", "Detections")
        if image.stem == "bad":
            raise InvalidRequest("not an image", code=grpc.StatusCode.INVALID_ARGUMENT, reason="invalid_input")
        found = () if image.stem == "empty" else (CAT, CAT, DOG)
        facts: dict[str, Any] = {"model": "m", "version": "v", "request_id": "r", "server_timing": ServerTiming()}
        return Detected(found, 200, 100, **facts)

    def detect_many(self, images: list[Path], **asked: Any) -> Iterator[Outcome[Detected]]:  # noqa: ANN401 - the options
        for index, image in enumerate(images):
            try:
                yield Outcome(index, image, result=self.detect(image, **asked))
            except InferenceError as error:
                yield Outcome(index, image, error=error)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    FakeClient.asked = []
    monkeypatch.setattr(many_inputs, "Client", FakeClient)
    monkeypatch.setenv("COLUMNS", "150")
    return FakeClient.asked


def wanted(draw: Path | None = None) -> Wanted:
    return Wanted(address="127.0.0.1:1", model="", options={}, draw=draw, timeout_s=10.0)


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    files = [tmp_path / "one" / "street.jpg", tmp_path / "two" / "street.jpg", tmp_path / "empty.png"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(encode(photo(200, 100), "PNG"))
    return files


def test_one_file_shows_its_boxes(capsys: pytest.CaptureFixture[str]) -> None:
    assert detect([Path("street.jpg")], wanted(), as_json=False) == 0
    out = capsys.readouterr().out
    assert re.search(r"90\.0 % +cat +10 +20 +70 +90", out)
    assert re.search(r"25\.0 % +dog +100 +20 +160 +90", out)
    assert "200 × 100 pixels" in out


def test_many_files_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert detect([Path("street.jpg"), Path("empty.jpg")], wanted(), as_json=False) == 0
    out = capsys.readouterr().out
    assert re.search(r"street\.jpg +3 +2 × cat, dog", out)
    assert re.search(r"empty\.jpg +0 +–", out)


def test_nothing_found_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert detect([Path("empty.jpg")], wanted(), as_json=False) == 0
    assert "nothing found" in capsys.readouterr().out


def test_json_lines_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert detect([Path("street.jpg"), Path("bad.jpg")], wanted(), as_json=True) == 1
    output = capsys.readouterr()
    good, bad = (json.loads(line) for line in output.out.splitlines())
    assert output.err == "headrace: 1 of 2 images failed\n"
    assert good["detections"][0] == {
        "label": {"index": 0, "name": "cat", "score": 0.9},
        "left": 10.0,
        "top": 20.4,
        "right": 70.0,
        "bottom": 90.0,
    }
    assert (good["file"], good["width"], good["height"], good["model"]) == ("street.jpg", 200, 100, "m")
    assert bad == {"file": "bad.jpg", "error": {"reason": "invalid_input", "text": "not an image"}}


@pytest.mark.parametrize("files", [["classifier.jpg"], ["street.jpg", "classifier.jpg"]])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_model_of_another_task_is_told_in_one_sentence(files: list[str], as_json: bool) -> None:
    sentence = "model lite0 answers Classification, not Detections: name another one with --model"
    with pytest.raises(StartupError, match=sentence) as caught:
        detect([Path(file) for file in files], wanted(), as_json=as_json)
    assert caught.value.exit_code == ExitCode.BAD_SETTINGS


def test_the_command_line_says_which_boxes(run: Run, asked: list[dict[str, Any]]) -> None:
    arguments = ("--score-threshold", "0.5", "--max-detections", "3", "--class", "cat", "--class", "traffic light")
    assert run("detect", "street.jpg", "-m", "yolo", "-a", "127.0.0.1:1", *arguments)[0] == 0
    assert run("detect", "street.jpg", "-a", "127.0.0.1:1")[0] == 0
    options = {"score_threshold": 0.5, "max_detections": 3, "classes": ["cat", "traffic light"]}
    assert asked == [NOTHING | options | {"model": "yolo"}, NOTHING | {"model": ""}]


def test_one_picture_is_drawn_into_a_file(pictures: list[Path], tmp_path: Path) -> None:
    for target in (tmp_path / "new" / "out.png", tmp_path / "out.jpg"):
        assert detect(pictures[:1], wanted(target), as_json=True) == 0
        assert cv2.imread(str(target)).shape == (100, 200, 3)


def test_several_pictures_are_drawn_into_a_folder(
    pictures: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert detect(pictures, wanted(tmp_path / "out"), as_json=False) == 0
    assert capsys.readouterr().err == f"3 pictures drawn into {tmp_path / 'out'}\n"
    names = ["empty-boxes.png", "street-boxes-2.png", "street-boxes.png"]
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == names


def test_a_picture_given_twice_is_drawn_twice(pictures: list[Path], tmp_path: Path) -> None:
    assert detect([pictures[0], pictures[0]], wanted(tmp_path / "out"), as_json=False) == 0
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["street-boxes-2.png", "street-boxes.png"]


def test_a_picture_that_can_not_be_written_has_failed(
    pictures: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("a file")
    assert detect(pictures[:1], wanted(tmp_path / "taken" / "out.png"), as_json=True) == 1
    row = json.loads(capsys.readouterr().out)
    assert row["error"]["reason"] == "unwritable"
    assert row["error"]["text"].startswith("can't be written: ")
    (tmp_path / "pipe.jpg").symlink_to("/dev/null")
    assert detect([tmp_path / "pipe.jpg"], wanted(tmp_path / "out.png"), as_json=False) == 1
    assert "is no plain file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "draw", "sentence"),
    [
        (["a.jpg", "b.jpg"], "out.png", "one file for 2 pictures: name a folder"),
        (["a.jpg"], "a.jpg", "would write over a.jpg"),
        (["a.jpg"], "./a.jpg", "would write over a.jpg"),
        (["a.jpg"], "out.gif", r"pictures are written as \.png, "),
    ],
)
def test_where_nothing_can_be_drawn_nothing_is_asked(
    files: list[str], draw: str, sentence: str, asked: list[dict[str, Any]]
) -> None:
    with pytest.raises(StartupError, match=sentence) as caught:
        detect([Path(file) for file in files], wanted(Path(draw)), as_json=False)
    assert caught.value.exit_code == ExitCode.BAD_SETTINGS
    assert not asked
