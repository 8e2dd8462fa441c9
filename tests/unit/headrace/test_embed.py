import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import grpc
import numpy as np
import pytest

from headrace import many_inputs
from headrace.client_errors import InvalidRequest
from headrace.client_results import Embedded, Outcome, ServerTiming
from headrace.embed import MAX_LINE_BYTES, Line, Wanted, cosine, lines_of, norm, run
from shared.errors import StartupError

WANTED = Wanted("127.0.0.1:1", "", {}, None, 1.0)


class FakeClient:
    """A vector from the text's letters; `order`: many answers come last first."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        assert (address, timeout_s) == (WANTED.address, WANTED.timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def embed(self, text: str, *, model: str, truncate: bool = True) -> Embedded:
        if text == "bad":
            raise InvalidRequest("text is empty", code=grpc.StatusCode.INVALID_ARGUMENT, reason="invalid_input")
        values = (float(text.count("a")), float(text.count("b")), 1.0)
        return Embedded(
            values=values, tokens=len(text), truncated=len(text) > 50, model="m", version="v", request_id="r",
            server_timing=ServerTiming(),
        )  # fmt: skip

    def embed_many(self, texts: list[str], *, model: str, truncate: bool = True) -> Iterator[Outcome[Embedded]]:
        for index in reversed(range(len(texts))):
            try:
                yield Outcome(index, texts[index], self.embed(texts[index], model=model, truncate=truncate))
            except InvalidRequest as error:
                yield Outcome(index, texts[index], error=error)


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_inputs, "Client", FakeClient)
    monkeypatch.setenv("COLUMNS", "150")


def texts(*given: str) -> list[Line]:
    return lines_of(given, [], None)


def test_one_text_shows_tokens_and_norm(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(texts("aab"), WANTED, as_json=False) == 0
    assert "3 tokens → 3 numbers of norm 2.4495: [2.0000, 1.0000, 1.0000]" in capsys.readouterr().out


def test_a_few_texts_are_compared_with_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(texts("aab", "aaabb", "b" * 60), WANTED, as_json=False) == 0
    out = capsys.readouterr().out
    alike = [cosine((2.0, 1.0, 1.0), other) for other in ((2.0, 1.0, 1.0), (3.0, 2.0, 1.0), (0.0, 60.0, 1.0))]
    row = re.search(r"1 +aab +3 +2\.4495 +(\S+) +(\S+) +(\S+)", out)
    assert row is not None
    assert [float(each) for each in row.groups()] == [round(each, 2) for each in alike]
    assert re.search(r"3 +b{59,60}…? +60\+ ", out)


def test_many_texts_are_only_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(texts(*"abcdefghijkl"), WANTED, as_json=False) == 0
    assert "like" not in capsys.readouterr().out


def test_json_and_the_file_keep_the_given_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "vectors.npy"
    wanted = Wanted(WANTED.address, "", {}, out, WANTED.timeout_s)
    assert run(texts("a", "bad", "bb"), wanted, as_json=True) == 1
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [row["text"] for row in rows] == ["a", "bad", "bb"]
    assert rows[0]["embedding"] == [1, 0, 1]
    assert rows[1]["error"] == {"reason": "invalid_input", "text": "text is empty"}
    assert captured.err == "headrace: 1 of 3 texts could not be embedded\n"
    vectors = np.load(out, allow_pickle=False)
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, [[1, 0, 1], [math.nan] * 3, [0, 2, 1]])


def test_a_line_that_is_no_utf8_costs_the_others_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "texts.txt"
    file.write_bytes(b"a\r\n\n  \nb\xff\naab")
    lines = lines_of([], [file], None)
    assert [line.data for line in lines] == [b"a", b"b\xff", b"aab"]
    assert run(lines, WANTED, as_json=False) == 1
    captured = capsys.readouterr()
    assert re.search(r"2 +aab +3", captured.out)
    assert "b\\xff: can't be read: it is not UTF-8 at byte 1" in captured.err


def test_texts_come_from_arguments_files_and_standard_input(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("two\nthree\n")
    lines = lines_of(["one"], [file], io.BytesIO(b"four\n"))
    assert [(line.number, line.data) for line in lines] == [(0, b"one"), (1, b"two"), (2, b"three"), (3, b"four")]


def test_what_can_not_be_read_or_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no text is given"):
        lines_of([], [], io.BytesIO(b"\n \n"))
    with pytest.raises(StartupError, match=r"missing\.txt can't be read: No such file"):
        lines_of([], [tmp_path / "missing.txt"], None)
    with pytest.raises(StartupError, match="standard input: line 2 has over 16 MiB"):
        lines_of([], [], io.BytesIO(b"a\n" + b"b" * (MAX_LINE_BYTES + 1)))
    with pytest.raises(StartupError, match=r"--out .* can't be written: No such file"):
        run(texts("a"), Wanted(WANTED.address, "", {}, tmp_path / "no" / "v.npy", 1.0), as_json=True)


def test_vectors_of_no_length_are_like_nothing() -> None:
    assert cosine((0.0, 0.0), (1.0, 0.0)) == 0.0
    assert cosine((2.0, 0.0), (3.0, 0.0)) == 1.0
    assert norm((3.0, 4.0)) == 5.0
