import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.multipart import Part, parts
from shared.errors import InvalidInput

TYPE = "multipart/form-data; boundary=b"


def form(*given: tuple[str, bytes], boundary: str = "b") -> bytes:
    """Headers behind `Content-Disposition: form-data`, and data."""
    whole = b""
    for headers, data in given:
        whole += f"--{boundary}\r\nContent-Disposition: form-data{headers}\r\n\r\n".encode() + data + b"\r\n"
    return whole + f"--{boundary}--\r\n".encode()


def listed(found: list[Part]) -> list[tuple[str, bool, bytes]]:
    return [(part.name, part.is_file, bytes(part.data)) for part in found]


def test_files_and_fields_in_order_as_views() -> None:
    body = form(('; name="file"; filename="cat.jpg"\r\nContent-Type: image/jpeg', b"\r\n--\xff"), ("; name=k", b"3"))

    found = parts(body, TYPE)

    assert listed(found) == [("file", True, b"\r\n--\xff"), ("k", False, b"3")]
    assert found[0].data.obj is body


@pytest.mark.parametrize(
    ("headers", "name", "is_file"),
    [
        ('; filename="a name=\\"x\\".jpg"; name="file"', "file", True),
        ("; name=f; filename*=UTF-8''%e2%82%ac.jpg", "f", True),
        ('; name="ü"', "ü", False),
        ('; name=""', "", False),
        ('; NAME="x"', "x", False),
    ],
)
def test_names_as_clients_write_them(headers: str, name: str, is_file: bool) -> None:
    assert listed(parts(form((headers, b"x")), TYPE)) == [(name, is_file, b"x")]


@pytest.mark.parametrize(
    "content_type", [f"{TYPE}; charset=utf-8", 'Multipart/Form-Data; boundary="b"', "multipart/form-data;boundary=b"]
)
def test_boundaries_as_clients_write_them(content_type: str) -> None:
    assert listed(parts(b"preamble\r\n" + form(("; name=x", b"")) + b"epilogue", content_type)) == [("x", False, b"")]


@pytest.mark.parametrize(
    ("body", "content_type", "sentence"),
    [
        (b"", TYPE, "does not contain its boundary 'b'|does not contain its boundary '--b'"),
        (form(("; name=x", b"")), "multipart/form-data", "needs a boundary"),
        (form(("; name=x", b"")), 'multipart/form-data; boundary=""', "needs a boundary"),
        (form(("; name=x", b"")), "multipart/form-data; boundary=c", "does not contain its boundary"),
        (form(("; name=x", b"data"))[:-6], TYPE, "part 0 of the form is cut short"),
        (b"--bx\r\n\r\n\r\n--b--", TYPE, "no line break behind its boundary"),
        (b"--b\r\nno end of headers\r\n--b--", TYPE, "no end of its headers"),
        (form(("; filename=x", b"")), TYPE, "part 0 of the form has no name"),
        (b"--b\r\nX: y\r\n\r\n1\r\n--b--", TYPE, "part 0 of the form has no name"),
        (form(*[("; name=x", b"")] * 33), TYPE, "more than 32 parts"),
        (form(("; name=" + "x" * 5000, b"")), TYPE, "no end of its headers"),
    ],
)
def test_what_is_no_form_is_refused_with_the_reason(body: bytes, content_type: str, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        parts(body, content_type)


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "file"]), st.binary(max_size=40)), max_size=5))
def test_any_data_comes_back_as_it_was_sent(fields: list[tuple[str, bytes]]) -> None:
    body = form(*[(f'; name="{name}"', data) for name, data in fields], boundary="0123456789abcdef")

    found = parts(body, "multipart/form-data; boundary=0123456789abcdef")

    assert listed(found) == [(name, False, data) for name, data in fields]


def outcome(body: bytes, content_type: str) -> list[Part] | str:
    try:
        return parts(body, content_type)
    except InvalidInput as error:
        return error.text


PIECES = st.sampled_from(
    [b"--b", b"--", b"\r\n", b"\r\n\r\n", b"Content-Disposition: form-data; name=x", b"x", b"\xff"]
)


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(PIECES, max_size=12).map(b"".join), st.one_of(st.just(TYPE), st.text(max_size=30)))
def test_any_bytes_are_a_form_or_an_invalid_input(body: bytes, content_type: str) -> None:
    assert outcome(body, content_type) is not None
