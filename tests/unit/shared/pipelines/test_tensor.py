from pathlib import Path

import numpy as np
import pytest

from shared.errors import InvalidInput, StartupError
from shared.pipeline import Options, RawInput
from shared.pipelines.tensor import DeclaredTensor, TensorConfig, TensorPipeline
from shared.results import Tensors
from shared.tensors import RawTensor, pack_bytes, unpack_bytes

A = DeclaredTensor(name="a", datatype="FP32", shape=(2,))
B = DeclaredTensor(name="b", datatype="INT64", shape=(-1,))
WORDS = DeclaredTensor(name="w", datatype="BYTES", shape=(1,))


def pipeline(*inputs: DeclaredTensor) -> TensorPipeline:
    return TensorPipeline(TensorConfig(inputs=inputs, outputs=inputs), Path(), ())


def a(shape: tuple[int, ...] = (1, 2), datatype: str = "FP32", name: str = "a") -> RawTensor:
    return RawTensor(name, datatype, shape, b"")


def b(shape: tuple[int, ...] = (1, 5)) -> RawTensor:
    return RawTensor("b", "INT64", shape, b"")


def test_tensors_come_out_in_declared_order() -> None:
    raw = RawInput(kind="tensors", tensors=(b(), a()))
    assert [tensor.name for tensor in pipeline(A, B).arrange(raw)] == ["a", "b"]


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ((), r"expected 2 input\(s\) \(a, b\), got 0"),
        ((a(),), r"expected 2 input\(s\) \(a, b\), got 1 \(a\)"),
        ((a(), a()), "got 2"),
        ((a(), b(), a(name="c")), r"got 3 \(a, b, c\)"),
        ((a(name="x" * 5000), b()), "got 2"),
        ((a(datatype="FP16"), b()), "input a has datatype FP16, expected FP32"),
        ((a((1, 3)), b()), r"input a has shape \[1, 3\], expected \[-1, 2\]"),
        ((a((2,)), b()), r"input a has shape \[2\]"),
        ((a(()), b()), r"input a has shape \[\]"),
        ((a((1, *[1] * 1000)), b()), "input a has shape"),
        ((a((2, 2)), b((1, 5))), "input b has 1 rows"),
        ((a((0, 2)), b((0, 5))), "input a has 0 rows"),
    ],
)
def test_what_does_not_fit_is_named(tensors: tuple[RawTensor, ...], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence) as caught:
        pipeline(A, B).arrange(RawInput(kind="tensors", tensors=tensors))
    assert len(caught.value.text) < 400


def test_free_dimensions_are_the_bucket() -> None:
    assert pipeline(A, B).bucket([(3, 2), (3, 7)]) == (7,)
    assert pipeline(A).bucket([(3, 2)]) == ()


def test_the_example_is_valid_for_every_datatype() -> None:
    for declared in (A, B, WORDS, DeclaredTensor(name="c", datatype="BF16", shape=())):
        made = pipeline(declared)
        arranged = made.arrange(made.example())
        prepared = made.preprocess(RawInput(kind="tensors", tensors=arranged), Options(), [])
        (result,) = made.postprocess(prepared.tensors, {}, Options())
        assert isinstance(result, Tensors)
        assert result.tensors[0].data == arranged[0].data


def test_declarations_are_checked() -> None:
    with pytest.raises(StartupError, match=r"inputs\[0\].datatype is 'FLOAT'"):
        pipeline(DeclaredTensor(name="a", datatype="FLOAT", shape=(1,)))
    with pytest.raises(StartupError, match="declares a name twice: a, a"):
        pipeline(A, A)


def test_rows_of_a_fixed_size_tensor_are_views() -> None:
    array = np.arange(12, dtype="<f4").reshape(4, 3)
    first, second = RawTensor("x", "FP32", (4, 3), array.tobytes()).cut(3)
    assert (first.shape, second.shape) == ((3, 3), (1, 3))
    assert np.array_equal(np.frombuffer(second.data, "<f4").reshape(1, 3), array[3:])
    assert isinstance(first.data, memoryview)


def test_cutting_bytes_walks_once() -> None:
    rows = 4096
    tensor = RawTensor("x", "BYTES", (rows, 16), pack_bytes([b"ab"] * rows * 16))
    parts = tensor.cut(1)  # quadratic, this would take minutes
    assert len(parts) == rows
    assert all(unpack_bytes(part.data, 16) == [b"ab"] * 16 for part in parts[:: rows // 8])
