"""Weights that were not saved to the end are refused when they are stored, not when they are to serve."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from shared.model_config import RepositoryError
from shared.repository_sources import collect

WHOLE = save({"body": np.ones((3, 2), np.float32), "none": np.zeros((0, 4)), "head": np.zeros(5, np.int8)})
KINDS = [np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8, np.uint64, np.uint8, np.bool_]


def kept(folder: Path, content: bytes) -> str:
    """Why it is refused; empty: it is not."""
    path = folder / "w.safetensors"
    path.write_bytes(content)
    try:
        collect([path])
    except RepositoryError as error:
        file, _, why = error.text.partition(": ")
        return why if file == str(path) else f"not of the file: {error.text}"
    return ""


def written(tensors: dict[str, Any], data: bytes) -> bytes:
    header = json.dumps(tensors).encode()
    return struct.pack("<Q", len(header)) + header + data


def tensor(begin: int, end: int, dtype: str = "F32", shape: tuple[int, ...] = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_whole_files_of_every_kind_pass(tmp_path: Path) -> None:
    assert kept(tmp_path, WHOLE) == ""
    assert kept(tmp_path, save({kind.__name__: np.zeros((2, 3), kind) for kind in KINDS}, {"format": "pt"})) == ""
    assert kept(tmp_path, save({})) == ""
    assert kept(tmp_path, written({"new": tensor(0, 3, "F4_OF_TOMORROW")}, b"123")) == ""


@given(cut=st.integers(1, len(WHOLE) - 1))
def test_a_file_that_ends_anywhere_too_early_is_refused(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    assert "no safetensors file" in (why := kept(tmp_path_factory.getbasetemp(), WHOLE[:-cut])) or "is cut off" in why


def test_it_says_how_much_is_missing(tmp_path: Path) -> None:
    why = kept(tmp_path, WHOLE[:-7])
    assert why == "is cut off: its tensors have 29 bytes, of which 22 are there; was it saved to the end?"
    assert "no safetensors file, or cut off: its header has" in kept(tmp_path, WHOLE[:20])


@pytest.mark.parametrize(
    "tensors",
    [
        {"w": tensor(0, 4)},  # less than its shape needs
        {"w": tensor(0, 16)},
        {"w": tensor(8, 16)},  # a hole
        {"w": tensor(-8, 0)},
        {"w": tensor(8, 0)},
        {"w": tensor(0, 8), "x": tensor(4, 12)},  # one over another
        {"w": tensor(0, 8, shape=(0,))},
        {"w": tensor(8, 4, "F4_OF_TOMORROW")},
    ],
)
def test_a_header_that_is_wrong_about_places_is_refused(tmp_path: Path, tensors: dict[str, Any]) -> None:
    assert "its header is wrong about where tensor" in kept(tmp_path, written(tensors, bytes(16)))


def test_bytes_that_belong_to_no_tensor_are_refused(tmp_path: Path) -> None:
    assert kept(tmp_path, WHOLE + b"more") == "has 4 bytes behind its last tensor, which no safetensors file has"


@pytest.mark.parametrize("header", [{"w": tensor(0, 2**63)}, {"w": {"dtype": "F32", "shape": [2]}}, {"w": 1}])
def test_a_header_that_lies_or_lacks_something_is_refused(tmp_path: Path, header: dict[str, Any]) -> None:
    assert kept(tmp_path, written(header, bytes(8)))
