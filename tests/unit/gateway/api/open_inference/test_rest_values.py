import msgspec
import pytest

from gateway.api.open_inference.rest_values import to_raw
from shared.errors import InvalidInput


def raw(text: str | bytes, datatype: str, *shape: int) -> bytes:
    return to_raw(msgspec.Raw(text.encode() if isinstance(text, str) else text), "x", datatype, shape)


@pytest.mark.parametrize("text", ["[1,2,3,4]", "[[1,2],[3,4]]", " [ [1, 2] ,\n[3,4]]"])
def test_flat_and_nested_lists_are_the_same(text: str) -> None:
    assert raw(text, "UINT8", 2, 2) == b"\1\2\3\4"


@pytest.mark.parametrize(
    ("text", "shape", "sentence"),
    [
        ("[[1,2],[3]]", (2, 2), r"a list of 1 entries at depth 1 of its data; shape \[2, 2\] needs 2"),
        ("[[1,2,3,4]]", (2, 2), "a list of 1 entries at depth 0"),
        ("[[1,2],3]", (2, 2), "expected 'array', got 'int'"),
        ("[1,[2]]", (2, 2), "expected 'int', got 'array'"),
        ("[[[1,2],[3,4]]]", (2, 2), "expected 'int', got 'array'"),
        ("[[1,2],[3,4]]", (4,), "expected 'int', got 'array'"),
        ("[1,2,3]", (2, 2), r"has 3 values; shape \[2, 2\] needs 4"),
        ("[" * 50_000, (2, 2), "expected 'int', got 'array'"),
        ("[1]", (2**40, 2**40), "has 1 values"),
        ("7", (), "expected 'array', got 'int'"),
        ("[]", (), "has 0 values"),
    ],
)
def test_nesting_and_count_have_to_be_those_of_the_shape(text: str, shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=f"input 'x' .*{sentence}"):
        raw(text, "INT32", *shape)


@pytest.mark.parametrize(
    ("text", "datatype", "sentence"),
    [
        ("[256]", "UINT8", "value 256; UINT8 has 0 to 255"),
        ("[-1]", "UINT64", "value -1; UINT64 has 0 to"),
        ("[18446744073709551616]", "UINT64", "value 18446744073709551616"),
        ("[9223372036854775808]", "INT64", "value 9223372036854775808"),
        (f"[{'9' * 400}]", "INT32", "value 9{30}; INT32 has"),
        (f"[{'9' * 5000}]", "INT32", "integer value out of range"),
        (f"[{'9' * 5000}]", "FP32", "number out of range"),
        ("[1e39]", "FP32", r"value 1e\+39, which is too large for FP32"),
        ("[1e400]", "FP64", "number out of range"),
        ("[NaN]", "FP32", "invalid character"),
        ("[Infinity]", "FP64", "invalid character"),
        ("[null]", "FP32", "expected 'float', got 'null'"),
        ("[1.0]", "INT32", "expected 'int', got 'float'"),
        ("[true]", "INT32", "expected 'int', got 'bool'"),
        ("[true]", "FP32", "expected 'float', got 'bool'"),
        ("[1]", "BOOL", "expected 'bool', got 'int'"),
        ('["1"]', "INT8", "expected 'int', got 'str'"),
        ("[1]", "BYTES", "expected 'str', got 'int'"),
        ('["\\ud800"]', "BYTES", "can't be read"),
    ],
)
def test_a_value_that_the_datatype_cant_hold_is_refused(text: str, datatype: str, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=f"(?s)input 'x' .*{sentence}"):
        raw(text, datatype, 1)


def test_a_whole_number_is_a_float_and_minus_zero_stays() -> None:
    assert raw("[1, -0.0]", "FP32", 2) == b"\0\0\x80\x3f\0\0\0\x80"


def test_empty_lists_are_tensors_without_elements() -> None:
    assert raw("[]", "FP32", 0, 4) == b""
    assert raw("[[],[]]", "FP32", 2, 0) == b""
