import pytest

from bench import http2
from bench.http2 import Frame, Kind


def test_frames_are_read_whole_and_the_rest_waits() -> None:
    sent = http2.frame(Kind.DATA, http2.END_STREAM, 5, b"abc") + http2.frame(Kind.PING, 0, 0, b"12345678")
    received = bytearray(sent[:-1])
    assert list(http2.frames(received)) == [Frame(Kind.DATA, http2.END_STREAM, 5, b"abc")]
    received += sent[-1:]
    assert list(http2.frames(received)) == [Frame(Kind.PING, 0, 0, b"12345678")]
    assert not received


def test_a_long_frame_has_its_length_in_three_bytes() -> None:
    payload = bytes(70_000)
    (found,) = http2.frames(bytearray(http2.frame(Kind.DATA, 0, 1, payload)))
    assert found.payload == payload


def test_headers_come_back_as_they_were_written() -> None:
    headers = {"grpc-status": "8", "error-reason": "overloaded", "long": "x" * 300, "empty": ""}
    read = http2.literals(http2.header_block(headers))
    assert {name.decode(): value.decode() for name, value in read.items()} == headers


@pytest.mark.parametrize("first", [b"\x00", b"\x10", b"\x40"])
def test_every_kind_of_literal_is_read(first: bytes) -> None:
    assert http2.literals(first + b"\x01a" + b"\x02bc") == {b"a": b"bc"}


def test_static_names_and_huffman_codes_are_left_out() -> None:
    status_200, content_type, huffman = b"\x88", b"\x0f\x10\x03foo", b"\x00\x01h\x82zz"
    after = b"\x00\x01a\x01b"
    assert http2.literals(b"\x20" + status_200 + content_type + huffman + after) == {b"h": b"", b"a": b"b"}


@pytest.mark.parametrize("block", [b"\xbe", b"\x7e\x01a", b"\x3f\x09"])
def test_a_dynamic_table_is_refused(block: bytes) -> None:
    with pytest.raises(http2.ProtocolError):
        http2.literals(block)


def test_settings_and_windows_are_numbers() -> None:
    (found,) = http2.frames(bytearray(http2.settings({3: 100, 4: 65_535})))
    assert http2.read_settings(found.payload) == {3: 100, 4: 65_535}
    assert http2.number(b"\x80\x00\x00\x07") == 7


def test_the_greeting_is_the_preface_and_two_frames() -> None:
    greeting = http2.greeting()
    assert greeting.startswith(http2.PREFACE)
    assert [found.kind for found in http2.frames(bytearray(greeting[len(http2.PREFACE) :]))] == [
        Kind.SETTINGS,
        Kind.WINDOW_UPDATE,
    ]
