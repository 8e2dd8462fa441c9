"""`multipart/form-data` as curl's `-F` and HTML forms send it: parts of a body that is already in memory, as views."""

import re
from typing import NamedTuple

from gateway.api.parse import shown
from shared.errors import InvalidInput

_MAX_PARTS = 32
_MAX_HEADER_BYTES = 4096
_BOUNDARY = re.compile(r"""boundary=(?:"([ -~]{1,70})"|([!#-'*+\-.0-9A-Z^_`a-z|~:=?/,]{1,70}))""")
_PARAMETER = re.compile(rb""";\s*([^\s=;"]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))""")
"""Of Content-Disposition; found one after the other, so that a quoted value is never looked into."""


class Part(NamedTuple):
    """One field or file of a form."""

    name: str
    is_file: bool
    data: memoryview


def parts(body: bytes, content_type: str) -> list[Part]:
    """All parts in order. Raises InvalidInput."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise InvalidInput(f"Content-Type is {shown(content_type)}; multipart/form-data needs a boundary")
    delimiter = b"--" + (found[1] or found[2]).encode()
    if body.startswith(delimiter):
        place = len(delimiter)
    else:  # text before the first part is allowed, and ignored
        place = body.find(b"\r\n" + delimiter) + 2 + len(delimiter)
        if place == 1 + len(delimiter):
            raise InvalidInput(f"the form does not contain its boundary {shown(delimiter.decode())}")
    return _parts(body, place, b"\r\n" + delimiter)


def _parts(body: bytes, place: int, delimiter: bytes) -> list[Part]:
    """`place` is just behind the first delimiter."""
    view = memoryview(body)
    collected: list[Part] = []
    while body[place : place + 2] != b"--":
        start = body.find(b"\r\n", place, place + 64)  # behind a delimiter only blanks may stand
        if start < 0 or body[place:start].strip(b" \t"):
            raise InvalidInput(f"part {len(collected)} of the form has no line break behind its boundary")
        end = body.find(delimiter, start)
        if end < 0:
            raise InvalidInput(f"part {len(collected)} of the form is cut short: its closing boundary is missing")
        if len(collected) == _MAX_PARTS:
            raise InvalidInput(f"the form has more than {_MAX_PARTS} parts")
        headers_end = body.find(b"\r\n\r\n", start, min(end + 2, start + _MAX_HEADER_BYTES))
        if headers_end < 0:
            raise InvalidInput(f"part {len(collected)} of the form has no end of its headers")
        collected.append(_part(body[start:headers_end], view[headers_end + 4 : end], len(collected)))
        place = end + len(delimiter)
    return collected


def _part(headers: bytes, data: memoryview, number: int) -> Part:
    for line in headers.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == b"content-disposition":
            given = {one[1].lower(): one[2] if one[2] is not None else one[3] for one in _PARAMETER.finditer(value)}
            if b"name" not in given:
                break
            is_file = b"filename" in given or b"filename*" in given
            return Part(given[b"name"].decode(errors="replace"), is_file, data)
    raise InvalidInput(f"part {number} of the form has no name")
