"""What goes to stdout and stderr: names and sentences of others, literally, and nothing that steers a terminal."""

import re
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
from rich.text import Text

_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line separators, what turns the writing direction, and bytes that are no UTF-8."""
_UNDECODED = re.compile("[\ud800-\udfff]")
_UNSEEN = re.compile("[\x7f-\x9f\u2028\u2029]")
"""Of the steering ones, what JSON leaves as it is inside a string."""


def printable(text: str) -> str:
    r"""One line that is safe on a terminal: control characters and bytes that are no UTF-8 become `\x1b`, `\xff`"""
    return _STEERING.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # how Python keeps a byte of a file name that is no UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def literal(text: object, style: str = "") -> Text:
    """Anything's text for rich: brackets are no markup, and the terminal is safe."""
    return Text(printable(str(text)), style=style)


def json_line(value: Any) -> str:  # noqa: ANN401 - anything that has a JSON form
    """One line of JSON; also of names that are no UTF-8, which JSON itself can't tell."""
    encoded = msgspec.json.encode(_encodable(msgspec.to_builtins(value, enc_hook=str))).decode()
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded)


def print_json(value: Any) -> None:  # noqa: ANN401 - anything that has a JSON form
    """Indented JSON on stdout."""
    sys.stdout.write(msgspec.json.format(json_line(value), indent=2) + "\n")


def _encodable(value: Any) -> Any:  # noqa: ANN401 - plain data
    if isinstance(value, str):
        return _UNDECODED.sub(_escape, value)
    if isinstance(value, Mapping):
        return {_encodable(key): _encodable(one) for key, one in value.items()}
    return [_encodable(one) for one in value] if isinstance(value, list | tuple) else value
