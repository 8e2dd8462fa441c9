import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import grpc
import pytest

from headrace import many_inputs
from headrace.classify import Wanted, inputs_of, run
from headrace.client_errors import InferenceError, InvalidRequest, Unavailable
from headrace.client_results import Classified, File, Label, Outcome, ServerTiming, Text
from headrace.many_inputs import timing_line
from shared.errors import StartupError

TIMING = ServerTiming(admit_ms=0.01, prepare_ms=4.25, run_ms=28.04, batch_rows=2)
WANTED = Wanted(address="127.0.0.1:1", model="", top_k=2, timeout_s=1.0)


def _answer(name: str) -> Classified:
    labels = (Label(1, name, 0.9), Label(2, "other", 0.05))
    return Classified(labels=labels, model="m", version="0123456789abcdef", request_id="r", server_timing=TIMING)


class FakeClient:
    """Answers by file name; `order` is the order in which many files finish; None in it: the stream breaks."""

    order: tuple[int | None, ...] = ()

    def __init__(self, address: str, *, timeout_s: float) -> None:
        assert (address, timeout_s) == (WANTED.address, WANTED.timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def classify(self, image: Path, *, top_k: int, model: str) -> Classified:
        assert (top_k, model) == (2, "")
        if image.stem == "missing":
            raise FileNotFoundError(2, "No such file or directory")
        if image.stem == "bad":
            raise InvalidRequest("not an image", code=grpc.StatusCode.INVALID_ARGUMENT, reason="invalid_input")
        return _answer(image.stem)

    def classify_many(self, images: list[Path], *, top_k: int, model: str) -> Iterator[Outcome]:
        for index in self.order or range(len(images)):
            if index is None:
                raise Unavailable("no server answers: refused", code=grpc.StatusCode.UNAVAILABLE, reason="unreachable")
            try:
                yield Outcome(index, images[index], result=self.classify(images[index], top_k=top_k, model=model))
            except (InferenceError, OSError) as error:
                yield Outcome(index, images[index], error=error)


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_inputs, "Client", FakeClient)
    monkeypatch.setenv("COLUMNS", "150")


def test_one_file_shows_classes_and_stage_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([Path("cat.jpg")], WANTED, as_json=False) == 0
    out = capsys.readouterr().out
    assert re.search(r"90\.0 % +cat +1", out)
    assert re.search(r"5\.0 % +other +2", out)
    assert "m 0123456789abcdef  prepare 4.2 · run 28.0 ms, batch of 2" in out


def test_many_files_are_a_table_in_the_given_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeClient, "order", (2, 0, 1))
    assert run([Path("a.jpg"), Path("b.jpg"), Path("c.jpg")], WANTED, as_json=False) == 0
    out = capsys.readouterr().out
    assert re.findall(r"(\w)\.jpg +90\.0 % +(\w) +other", out) == [("a", "a"), ("b", "b"), ("c", "c")]


def test_json_lines_come_in_the_given_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeClient, "order", (2, 1, 0))
    assert run([Path("a.jpg"), Path("bad.jpg"), Path("c.jpg")], WANTED, as_json=True) == 1
    output = capsys.readouterr()
    rows = [json.loads(line) for line in output.out.splitlines()]
    assert output.err == "headrace: 1 of 3 inputs could not be classified\n"
    assert [row["file"] for row in rows] == ["a.jpg", "bad.jpg", "c.jpg"]
    assert rows[0]["labels"][0] == {"index": 1, "name": "a", "score": 0.9}
    assert rows[0]["server_timing"]["run_ms"] == 28.04
    assert rows[1]["error"] == {"reason": "invalid_input", "text": "not an image"}


@pytest.mark.parametrize("files", [["missing.jpg"], ["a.jpg", "missing.jpg"], ["bad.jpg", "a.jpg"]])
def test_a_failed_file_is_told_on_stderr_with_exit_code_1(capsys: pytest.CaptureFixture[str], files: list[str]) -> None:
    assert run([Path(file) for file in files], WANTED, as_json=False) == 1
    output = capsys.readouterr()
    assert re.search(r"✗ (missing.jpg: can't be read: No such file or directory|bad.jpg: not an image)\n", output.err)
    assert ("a.jpg" in output.out) == ("a.jpg" in files)


def test_one_reason_of_many_failures_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    files = [Path(f"{number}/bad.jpg") for number in range(7)]
    assert run([*files, Path("missing.jpg")], WANTED, as_json=False) == 1
    err = capsys.readouterr().err
    assert err.count("not an image") == 1
    assert "0/bad.jpg, 1/bad.jpg, 2/bad.jpg and 4 more: not an image\n" in err
    assert "missing.jpg: can't be read" in err


def test_a_broken_connection_fails_every_file_that_had_no_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeClient, "order", (1, None))
    assert run([Path("a.jpg"), Path("b.jpg"), Path("c.jpg")], WANTED, as_json=True) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.get("error", {}).get("reason") for row in rows] == ["unreachable", None, "unreachable"]
    assert rows[0]["error"]["text"] == "no server answers: refused; start a server with: headrace serve"


def test_a_file_name_is_never_read_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    run([Path("[red]a.jpg"), Path("[/]b.jpg")], WANTED, as_json=False)
    out = capsys.readouterr().out
    assert "[red]a.jpg" in out
    assert "[/]b.jpg" in out


@pytest.mark.parametrize("name", [b"b\xff.jpg", b"b\x1b[2J.jpg", b"missing\xff/missing.jpg"])
def test_no_file_name_costs_the_others_their_answers(capsys: pytest.CaptureFixture[str], name: bytes) -> None:
    strange = Path(os.fsdecode(name))
    files = [Path("a.jpg"), strange, Path("c.jpg")]
    run(files, WANTED, as_json=True)
    output = capsys.readouterr()
    rows = [json.loads(line) for line in output.out.splitlines()]
    assert [row["file"] for row in rows] == ["a.jpg", str(strange).replace("\udcff", r"\xff"), "c.jpg"]
    run(files, WANTED, as_json=False)
    output = capsys.readouterr()
    assert "a.jpg" in output.out
    assert "c.jpg" in output.out
    assert re.search(r"(b|missing)(\\xff|\\x1b\[2J)", output.out + output.err)
    run([strange], WANTED, as_json=False)
    assert "\x1b[2J" not in capsys.readouterr().out


def test_a_timing_without_any_stage() -> None:
    assert timing_line(ServerTiming()) == "no stage times"


def test_files_are_classified_as_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[object] = []

    def classify(_self: FakeClient, given: object, *, top_k: int, model: str) -> Classified:
        asked.append(given)
        return _answer(f"{model}{top_k}")

    monkeypatch.setattr(FakeClient, "classify", classify)
    assert run(inputs_of([Path("a.sh")], None, as_file=True), WANTED, as_json=True) == 0
    assert run(inputs_of([Path("a.sh"), Path("b")], ["c"], as_file=True), WANTED, as_json=False) == 0
    assert asked == [File(Path("a.sh")), File(Path("a.sh")), File(Path("b")), Text("c")]
    assert json.loads(capsys.readouterr().out.splitlines()[0])["file"] == "a.sh"


def test_texts_are_classified_beside_files(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[object] = []

    class Recorder(FakeClient):
        def classify(self, image: object, *, top_k: int, model: str) -> Classified:
            asked.append(image)
            return _answer("kind")

    monkeypatch.setattr(many_inputs, "Client", Recorder)
    assert run(inputs_of([Path("a.jpg")], ["You are [bold]kind[/bold]."]), WANTED, as_json=True) == 0
    assert asked == [Path("a.jpg"), Text("You are [bold]kind[/bold].")]
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0]["file"] == "a.jpg"
    assert rows[1]["text"] == "You are [bold]kind[/bold]."
    assert run(inputs_of(None, ["one [x]", "two"]), WANTED, as_json=False) == 0
    assert re.search(r"one \[x\] +90\.0 % +kind", capsys.readouterr().out)


def test_no_class_at_all_is_an_answer_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Nothing(FakeClient):
        def classify(self, image: object, *, top_k: int, model: str) -> Classified:
            return Classified(labels=(), model="m", version="v", request_id="r", server_timing=TIMING)

    monkeypatch.setattr(many_inputs, "Client", Nothing)
    for texts in (["one"], ["one", "two"]):
        assert run(inputs_of(None, texts), WANTED, as_json=False) == 0
        assert "one" in capsys.readouterr().out


def test_what_can_not_be_classified_is_told_before_a_call() -> None:
    with pytest.raises(StartupError, match="name image files, or others with --as-file, or use --text"):
        inputs_of([], None)
    with pytest.raises(StartupError, match="--text is not UTF-8"):
        inputs_of(None, ["a\udcffb"])
