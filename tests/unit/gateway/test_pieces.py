from pathlib import Path

import numpy as np
import pytest

from gateway.batcher import BatchLimits
from gateway.pieces import joined, kind_of, pieces_of, rows_of
from gateway.request import Request
from gateway.served import ServedModel
from gateway.state import ModelState
from shared.errors import InvalidInput
from shared.pipeline import RawInput
from shared.pipelines.tensor import DeclaredTensor, TensorConfig, TensorPipeline
from shared.results import Result, Tensors
from shared.tensors import RawTensor, Tensor, pack_bytes, unpack_bytes
from tests.support.gateway_parts import served


def tensor_model(datatype: str = "FP32", shape: tuple[int, ...] = (2,), max_rows: int = 4) -> ServedModel:
    declared = (DeclaredTensor(name="x", datatype=datatype, shape=shape),)
    pipeline = TensorPipeline(TensorConfig(inputs=declared, outputs=declared), Path(), ())
    state = ModelState("identity", "0" * 16, "ready")
    return ServedModel(1, state, pipeline, BatchLimits(max_rows, 0.0, (1, max_rows)))


def floats(rows: int) -> RawInput:
    array = np.arange(rows * 2, dtype="<f4").reshape(rows, 2)
    return RawInput(kind="tensors", tensors=(RawTensor("x", "FP32", array.shape, array.tobytes()),))


def asking(*inputs: RawInput, partial: bool = False) -> Request:
    return Request("", "", "id", list(inputs), {}, 0.0, 0.0, 0, partial)


def echoed(items: list[RawInput]) -> list[list[Result]]:
    return [[Tensors([Tensor(t.name, t.datatype, t.shape, bytes(t.data)) for t in item.tensors])] for item in items]


@pytest.mark.parametrize(("rows", "expected"), [(1, [1]), (4, [4]), (5, [4, 1]), (50, [4] * 12 + [2])])
def test_a_large_request_is_cut_and_joined_in_order(rows: int, expected: list[int]) -> None:
    raw = floats(rows)
    (items,) = pieces_of(tensor_model(), asking(raw))
    assert [item.rows for item in items] == expected
    result = joined(echoed(items))
    assert isinstance(result, Tensors)
    assert result.tensors[0].data == raw.tensors[0].data
    assert result.tensors[0].shape == (rows, 2)


def test_cutting_copies_nothing() -> None:
    raw = floats(8)
    (items,) = pieces_of(tensor_model(), asking(raw))
    assert all(isinstance(item.tensors[0].data, memoryview) for item in items)


def test_bytes_elements_are_cut_at_their_borders() -> None:
    words = [b"", b"a", b"bcd", b"\x00" * 300, b"e", b"f", b"g"]
    raw = RawInput(kind="tensors", tensors=(RawTensor("x", "BYTES", (7, 1), pack_bytes(words)),))
    (items,) = pieces_of(tensor_model("BYTES", (1,), max_rows=3), asking(raw))
    assert [unpack_bytes(item.tensors[0].data, item.rows) for item in items] == [words[:3], words[3:6], words[6:]]
    result = joined(echoed(items))
    assert isinstance(result, Tensors)
    data = result.tensors[0].data
    assert isinstance(data, bytes)
    assert unpack_bytes(data, 7) == words


def test_the_wrong_kind_of_input_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"^model 'words' takes a text, the input is an image$"):
        pieces_of(served(), asking(RawInput(kind="image", data=b"x")))
    with pytest.raises(InvalidInput, match=r"^inputs\[1\]: model 'words' takes a text"):
        pieces_of(served(), asking(RawInput(kind="text", data=b"x"), RawInput(kind="image", data=b"x")))


def test_partial_results_keep_a_bad_input_in_its_place() -> None:
    good, bad = RawInput(kind="text", data=b"x"), RawInput(kind="image", data=b"x")
    request = asking(good, bad, good, partial=True)
    request.unreadable = {2: InvalidInput("inputs[2].text has 0 bytes")}
    first, second, third = pieces_of(served(), request)
    assert first == [good]
    assert isinstance(second, InvalidInput)
    assert second.text.startswith("inputs[1]: model")
    assert isinstance(third, InvalidInput)
    assert third.text == "inputs[2].text has 0 bytes"
    assert rows_of([first, second, third]) == 1
    with pytest.raises(InvalidInput):
        pieces_of(served(), asking(bad, bad, partial=True))


def test_the_kind_of_a_request_is_that_of_its_first_readable_input() -> None:
    request = asking(RawInput(kind="image"), RawInput(kind="text", data=b"x"), partial=True)
    request.unreadable = {0: InvalidInput("empty")}
    assert kind_of(request) == "text"
