"""Sizes and typed values, held against numpy."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.open_inference import datatypes
from gateway.api.open_inference.datatypes import MAX_RANK
from shared.errors import InvalidInput
from shared.tensors import DTYPES

WHERE = "input 'x'"
TYPED = ["INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"]
SHAPES = st.lists(st.integers(0, 5), max_size=4)


def attempt(call: Callable[[], Any]) -> tuple[Any, str]:
    """What it gives, or the sentence of its refusal."""
    try:
        return call(), ""
    except InvalidInput as refused:
        return None, refused.text


def test_every_datatype_of_the_server_is_known_here() -> None:
    assert set(datatypes.NAMES) == set(DTYPES)


@given(st.sampled_from(sorted(set(DTYPES) - {"BYTES"})), SHAPES, st.integers(-3, 3))
def test_data_is_accepted_when_and_only_when_it_is_as_long_as_numpys(datatype: str, shape: list[int], off: int) -> None:
    need = np.zeros(shape, DTYPES[datatype]).nbytes
    size = max(0, need + off)
    _, refusal = attempt(lambda: datatypes.check_data(WHERE, datatype, shape, bytes(size)))

    assert bool(refusal) == (size != need)
    if refusal:
        assert f"{size} bytes" in refusal
        assert f"needs {need}" in refusal


@pytest.mark.parametrize("datatype", ["", "fp32", "STRING", "FP33", "x" * 100_000])
def test_an_unknown_datatype_is_refused_in_a_short_sentence(datatype: str) -> None:
    with pytest.raises(InvalidInput, match="known: BOOL") as caught:
        datatypes.check_datatype(WHERE, datatype)
    assert len(caught.value.text) < 400


@pytest.mark.parametrize("shape", [[-1], [1, -(2**63)], [1] * (MAX_RANK + 1), [1] * 100_000])
def test_dimensions_are_looked_at_before_they_are_multiplied(shape: list[int]) -> None:
    with pytest.raises(InvalidInput, match="dimensions") as caught:
        datatypes.count(WHERE, shape)
    assert len(caught.value.text) < 300


def test_products_do_not_wrap() -> None:
    assert datatypes.count(WHERE, [2**62, 2**62]) == 2**124
    assert datatypes.nbytes("FP64", [2**61 + 1]) == 2**64 + 8


def test_a_shape_in_a_sentence_is_short() -> None:
    assert datatypes.shape_text([1, 16]) == "[1, 16]"
    assert len(datatypes.shape_text([2**62] * 100_000)) <= 101


# ---------------------------------------------------------------- typed values


@given(st.sampled_from(TYPED), st.lists(st.integers(-(2**70), 2**70) | st.integers(-300, 300), max_size=8))
def test_integers_are_packed_as_numpy_does_or_refused_when_out_of_range(datatype: str, values: list[int]) -> None:
    limits = np.iinfo(DTYPES[datatype])  # type: ignore[type-var]  # these are integers
    fits = all(limits.min <= value <= limits.max for value in values)
    packed, refusal = attempt(lambda: datatypes.pack(WHERE, datatype, values))

    assert packed == (np.array(values, DTYPES[datatype]).tobytes() if fits else None)
    assert (str(limits.max) in refusal) == (not fits)


@given(st.lists(st.floats(width=32), max_size=8))
def test_floats_of_32_bits_keep_every_bit_that_is_a_number(values: list[float]) -> None:
    packed = np.frombuffer(datatypes.pack(WHERE, "FP32", values), "<f4")

    np.testing.assert_array_equal(packed, np.array(values, "<f4"))


@given(st.lists(st.floats() | st.integers(-(2**1100), 2**1100), max_size=6), st.sampled_from(["FP32", "FP64"]))
def test_a_finite_value_never_becomes_infinite(values: list[float], datatype: str) -> None:
    most = float(np.finfo(DTYPES[datatype]).max)  # type: ignore[arg-type]  # these are floats
    finite = [isinstance(value, int) or math.isfinite(value) for value in values]
    packed, refusal = attempt(lambda: datatypes.pack(WHERE, datatype, values))

    if refusal:
        assert "too large" in refusal
        assert any(abs(value) > most for value, is_finite in zip(values, finite, strict=True) if is_finite)
    else:
        assert np.isfinite(np.frombuffer(packed, DTYPES[datatype])).tolist() == finite


@given(st.lists(st.booleans(), max_size=8))
def test_booleans_are_one_byte_each(values: list[bool]) -> None:
    assert datatypes.pack(WHERE, "BOOL", values) == np.array(values, "?").tobytes()


@pytest.mark.parametrize(
    ("datatype", "values", "part"),
    [
        ("BOOL", [1], "int"),
        ("INT32", [True], "bool"),
        ("INT32", [1.0], "float"),
        ("FP32", ["1"], "str"),
        ("FP32", [None], "NoneType"),
        ("BYTES", [1], "int"),
        ("BYTES", ["\ud800"], "not valid Unicode"),
        ("FP16", [1.0], "no typed form"),
        ("BF16", [1.0], "no typed form"),
        ("nothing", [1.0], "no typed form"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(datatype: str, values: list[Any], part: str) -> None:
    with pytest.raises(InvalidInput, match=part):
        datatypes.pack(WHERE, datatype, values)
