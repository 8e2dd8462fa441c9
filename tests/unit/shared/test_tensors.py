"""BYTES elements, held against a second, naive reader, on both ways through them: equal lengths and different ones."""

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.tensors import MAX_BYTES_ELEMENTS, RawTensor, element_places, element_views, pack_bytes, unpack_bytes

DIFFERENT = st.lists(st.binary(max_size=20), max_size=20)
EQUAL = st.integers(0, 9).flatmap(
    lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=30, max_size=40)
)


def naive(data: bytes, count: int) -> list[bytes] | None:
    """The format's definition, read by slicing; None where it is broken."""
    found = []
    for _ in range(count):
        prefix, data = data[:4], data[4:]
        if len(prefix) < 4:
            return None
        (length,) = struct.unpack("<I", prefix)
        if length > len(data):
            return None
        found.append(data[:length])
        data = data[length:]
    return None if data else found


def read(data: bytes, count: int) -> list[bytes] | None:
    try:
        return [bytes(element) for element in element_views(memoryview(data), count)]
    except ValueError:
        return None


@given(DIFFERENT | EQUAL)
def test_packed_elements_come_back(elements: list[bytes]) -> None:
    raw = pack_bytes(elements)

    assert unpack_bytes(raw, len(elements)) == elements
    assert len(raw) == sum(4 + len(one) for one in elements)


@given(st.data())
def test_damaged_bytes_are_refused_when_and_only_when_the_naive_reader_gives_up(data: st.DataObject) -> None:
    elements = data.draw(DIFFERENT | EQUAL)
    raw = bytearray(pack_bytes(elements))
    for _ in range(data.draw(st.integers(0, 3))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.sampled_from([0, 1, 2, 3, 5, 127, 255]))
    cut = data.draw(st.just(len(raw)) | st.integers(0, len(raw)))
    sent = bytes(raw[:cut]) + data.draw(st.binary(max_size=3))
    count = data.draw(st.just(len(elements)) | st.integers(0, 50))

    found = read(sent, count)

    assert found == naive(sent, count)
    if found is not None:
        assert pack_bytes(found) == sent


@given(st.binary(max_size=40), st.integers(0, 10))
def test_any_bytes_at_all_are_read_as_the_naive_reader_does(sent: bytes, count: int) -> None:
    assert read(sent, count) == naive(sent, count)


@pytest.mark.parametrize(
    ("raw", "count", "text"),
    [
        (b"", 1, "0 bytes of data, which end before the length of element 0 of 1"),
        (b"\1\0\0", 1, "3 bytes of data, which end before the length of element 0 of 1"),
        (b"\5\0\0\0abc", 1, "length 5 for element 0, but only 3 bytes of data follow"),
        (b"\xff\xff\xff\xff", 1, "length 0xFFFFFFFF for element 0; an empty element has length 0"),
        (b"\0\0\0\0x", 1, "5 bytes of data, but its 1 BYTES elements end at byte 4"),
        (b"\0\0\0\0", 0, "4 bytes of data, but its 0 BYTES elements end at byte 0"),
        (b"\0" * 399 + b"\1", 100, "length 16777216 for element 99, but only 0 bytes of data follow"),
        (b"", MAX_BYTES_ELEMENTS + 1, "262145 BYTES elements; at most 262144 are allowed"),
        (b"", 2**124, f"{2**124} BYTES elements; at most 262144 are allowed"),
    ],
)
def test_the_sentence_says_where_bytes_are_broken(raw: bytes, count: int, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        element_places(raw, count)
    assert str(caught.value) == text


@pytest.mark.parametrize("count", [1, 100])
def test_looking_at_elements_copies_none_of_them(count: int) -> None:
    raw = pack_bytes([bytes(4_000_000 // count)] * count)
    tracemalloc.start()
    try:
        element_places(raw, count)
        element_views(raw, count)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_rows_of_bytes_are_cut_between_their_elements() -> None:
    rows = [[b"", b"a"], [b"bc", b""], [b"def", b"g"]]
    first, second = RawTensor("x", "BYTES", (3, 2), pack_bytes([*rows[0], *rows[1], *rows[2]])).cut(2)

    assert (first.shape, unpack_bytes(first.data, 4)) == ((2, 2), [*rows[0], *rows[1]])
    assert (second.shape, unpack_bytes(second.data, 2)) == ((1, 2), rows[2])
