"""Answers as tensors, and the classification extension against a plain sort."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.open_inference import outputs
from gateway.api.open_inference.model import InferOutput, InferRequestedOutput
from gateway.api.open_inference.models import view_of
from gateway.request import Answer
from gateway.served import ServedModel
from shared.errors import HeadraceError, InvalidInput, NonfiniteOutput
from shared.results import Embedding, Entities, Result, Tensors, Text
from shared.tensors import DTYPES, MAX_BYTES_ELEMENTS, Tensor, element_views, pack_bytes
from tests.support.open_inference_parts import classifier, declared, tensor_model


def model_of(datatype: str, labels: tuple[str, ...] = ()) -> ServedModel:
    return tensor_model("m", [declared("x", datatype, -1)], [declared("y", datatype, -1)], labels)


def answer(*results: Result | HeadraceError) -> Answer:
    return Answer("m", "v", list(results))


def tensor(array: Any, datatype: str = "FP32") -> Tensors:  # noqa: ANN401 - anything that numpy takes
    packed = np.asarray(array, DTYPES[datatype])
    return Tensors([Tensor("y", datatype, packed.shape, packed.tobytes())])


def classes(found: InferOutput) -> list[list[str]]:
    rows, k = found.shape
    texts = [str(one, "utf-8") for one in element_views(found.data, rows * k)]
    return [texts[row * k : (row + 1) * k] for row in range(rows)]


def best(model: ServedModel, result: Tensors, k: int) -> list[list[str]]:
    asked = [InferRequestedOutput("y", {"classification": k})]
    (found,) = outputs.selected(model, answer(result), asked)
    assert found.datatype == "BYTES"
    return classes(found)


def test_a_single_result_is_taken_as_it_is_and_several_are_joined_by_rows() -> None:
    one, two = tensor([[1, 2]]), tensor([[3, 4], [5, 6]])

    (single,) = outputs.selected(model_of("FP32"), answer(one), [])
    (joined,) = outputs.selected(model_of("FP32"), answer(one, two), [])

    assert single.data is one.tensors[0].data
    assert joined.shape == (3, 2)
    assert np.frombuffer(joined.data, "<f4").tolist() == [1, 2, 3, 4, 5, 6]


def test_results_that_do_not_fit_together_or_have_failed_are_refused() -> None:
    with pytest.raises(InvalidInput, match="different shapes"):
        outputs.selected(model_of("FP32"), answer(tensor([[1, 2]]), tensor([[1]])), [])
    with pytest.raises(NonfiniteOutput):
        outputs.selected(model_of("FP32"), answer(tensor([[1]]), NonfiniteOutput("NaN")), [])


def test_texts_embeddings_and_what_has_no_tensor_form() -> None:
    (vectors,) = outputs.selected(model_of("FP32"), answer(Embedding([1, 2]), Embedding([3, 4])), [])
    (texts,) = outputs.selected(model_of("BYTES"), answer(Text("é")), [])

    assert (vectors.name, vectors.shape) == ("y", (2, 2))
    assert (texts.shape, texts.data) == ((1, 1), pack_bytes(["é".encode()]))
    with pytest.raises(InvalidInput, match=r"headrace\.v1\.Inference"):
        outputs.selected(model_of("FP32"), answer(Entities([])), [])


NUMBERS = sorted(set(DTYPES) - {"BYTES", "BF16"})


@pytest.mark.parametrize("datatype", NUMBERS)
@given(st.data())
def test_classes_are_the_first_of_a_stable_sort(datatype: str, data: st.DataObject) -> None:
    values = st.integers(0, 1) if datatype == "BOOL" else st.integers(0, 5) | st.integers(100, 120)
    row = data.draw(st.lists(values, min_size=1, max_size=9))
    k = data.draw(st.integers(1, 12))

    (found,) = best(model_of(datatype), tensor([row], datatype), k)

    want = sorted(range(len(row)), key=lambda index: (-row[index], index))[:k]
    assert [int(text.split(":")[1]) for text in found] == want
    assert [float(text.split(":")[0]) for text in found] == [float(row[index]) for index in want]


def test_largest_and_smallest_values_nan_and_half_precision() -> None:
    assert best(model_of("UINT64"), tensor([[0, 2**64 - 1]], "UINT64"), 2) == [[f"{2**64 - 1}:1", "0:0"]]
    assert best(model_of("INT64"), tensor([[-(2**63), 1]], "INT64"), 1) == [["1:1"]]
    assert best(model_of("FP32"), tensor([[np.nan, 1, np.inf, -np.inf]]), 3) == [["inf:2", "1.000000:1", "nan:0"]]
    half = Tensors([Tensor("y", "BF16", (1, 2), np.array([0x3F80, 0x4000], "<u2").tobytes())])  # 1.0 and 2.0
    assert best(model_of("BF16"), half, 1) == [["2.000000:1"]]


def test_labels_are_added_when_there_is_one_for_each_element() -> None:
    assert best(model_of("INT32", ("a", "b:c")), tensor([[1, 2]], "INT32"), 1) == [["2:1:b:c"]]
    assert best(model_of("INT32", ("a",)), tensor([[1, 2]], "INT32"), 1) == [["2:1"]]


def test_a_row_is_all_its_elements() -> None:
    assert best(model_of("INT32"), tensor([[[1, 2], [9, 4]], [[5, 6], [7, 8]]], "INT32"), 1) == [["9:2"], ["8:3"]]


def test_an_answer_of_too_many_classes_is_refused() -> None:
    rows = MAX_BYTES_ELEMENTS // 2 + 1
    with pytest.raises(InvalidInput, match=f"{rows} rows of 2 classes"):
        best(model_of("INT8"), tensor(np.zeros((rows, 2)), "INT8"), 2)


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("nope", None, "output 'nope' is not one of model 'classifier': it has scores, classes, labels"),
        ("scores", 0, "is 0"),
        ("scores", -1, "is '-1'"),
        ("scores", "3", "is '3'"),
        ("scores", True, "is 'True'"),
        ("labels", 1, "is BYTES"),
    ],
)
def test_what_can_not_be_asked_for(name: str, value: Any, part: str) -> None:  # noqa: ANN401 - any parameter
    parameters = {} if value is None else {"classification": value}
    model = classifier()
    with pytest.raises(InvalidInput) as caught:
        outputs.check_asked(model, view_of(model), [InferRequestedOutput(name, parameters)])
    assert part in caught.value.text
