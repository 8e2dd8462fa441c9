import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.output import json_line, literal, print_json, printable

NOT_UTF8 = os.fsdecode(b"caf\xe9.jpg")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("photo 1.jpg", "photo 1.jpg"),
        ("Ampel – rot, 赤.jpg", "Ampel – rot, 赤.jpg"),
        (NOT_UTF8, r"caf\xe9.jpg"),
        ("a\x1b[31m\n\x07.jpg", r"a\x1b[31m\x0a\x07.jpg"),
        ("a\x9b2J\x7f", r"a\x9b2J\x7f"),
        ("gpj\u202e.exe", r"gpj\u202e.exe"),
    ],
)
def test_nothing_steers_the_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters()))
def test_whatever_the_text_the_line_can_be_written_and_is_one(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert len(shown.splitlines()) <= 1
    assert "\x1b" not in shown


def test_brackets_are_no_markup() -> None:
    console = Console(width=40, force_terminal=False)
    with console.capture() as captured:
        console.print(literal("[a, b] [/] [red]"))
    assert captured.get() == "[a, b] [/] [red]\n"


@given(st.recursive(st.text(st.characters()) | st.integers(-9, 9), st.lists))
def test_everything_has_one_line_of_json(value: object) -> None:
    line = json_line({"value": value})
    line.encode()
    assert len(line.splitlines()) == 1
    assert set(json.loads(line)) == {"value"}


def test_json_keeps_what_is_text_and_escapes_what_is_not() -> None:
    assert json.loads(json_line({"file": "赤\x9b\x1b\u2028"})) == {"file": "赤\x9b\x1b\u2028"}
    assert "\x9b" not in json_line("\x9b")
    assert json.loads(json_line([NOT_UTF8])) == [r"caf\xe9.jpg"]


def test_indented_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [NOT_UTF8]})
    assert json.loads(capsys.readouterr().out) == {"a": [r"caf\xe9.jpg"]}
