"""Reserved parameters have types and ranges; options go to the pipeline; everything else is ignored."""

import math

import pytest

from gateway.api.open_inference import parameters
from gateway.api.open_inference.model import InferRequest, Parameter
from shared.errors import InvalidInput
from shared.generation import GenerationOptions
from shared.pipelines.image_classification import ImageClassificationOptions
from shared.pipelines.object_detection import ObjectDetectionOptions


def request(**given: Parameter) -> InferRequest:
    return InferRequest("m", "", "", given, [], [], deadline_s=110.0, arrived_s=100.0)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("timeout", [0, 1, 2**63 - 1], [-1, "1", 1.0, True]),
        ("priority", [0, 2**64 - 1], [-1, "1", 1.5, False]),
        ("sequence_id", [0, 7, "seven"], [-1, 1.0, True]),
        ("sequence_start", [True, False], [0, 1, "true"]),
        ("sequence_end", [True], [1]),
        ("triton_enable_empty_final_response", [True, False], [1, "true"]),
    ],
)
def test_reserved_parameters(name: str, good: list[Parameter], bad: list[Parameter]) -> None:
    for value in good:
        parameters.check({name: value})
    for value in bad:
        with pytest.raises(InvalidInput, match=f"parameter '{name}' is"):
            parameters.check({name: value})


def test_other_parameters_are_ignored_but_not_those_of_triton() -> None:
    parameters.check({"anything": 1.5, "binary_data_size": 7, "x" * 1000: "y" * 1000})
    with pytest.raises(InvalidInput, match="'triton_new' is reserved"):
        parameters.check({"triton_new": True})
    with pytest.raises(InvalidInput) as caught:
        parameters.check({"triton_" + "x" * 100_000: True})
    assert len(caught.value.text) < 200


@pytest.mark.parametrize(
    ("timeout_us", "deadline_s"), [(None, 110), (0, 110), (250_000, 100.25), (60_000_000, 110), (2**63 - 1, 110)]
)
def test_the_deadline_is_the_first_of_both(timeout_us: int | None, deadline_s: float) -> None:
    given = {} if timeout_us is None else {"timeout": timeout_us}
    assert parameters.deadline_s(request(**given)) == pytest.approx(deadline_s)


def test_options_are_taken_by_name() -> None:
    options = ImageClassificationOptions
    assert parameters.options({"top_k": 3, "timeout": 5, "other": "x"}, options) == {"top_k": 3}
    assert parameters.options({}, options) == {}


@pytest.mark.parametrize(
    ("given", "parsed"),
    [("0.5", 0.5), ("1", 1), (0.5, 0.5), ("half", "half"), ("", ""), (True, True), ("1e999", math.inf)],
)
def test_an_option_that_is_a_number_may_come_as_text(given: Parameter, parsed: Parameter) -> None:
    assert parameters.options({"score_threshold": given}, ObjectDetectionOptions) == {"score_threshold": parsed}
    assert parameters.options({"classes": "7"}, ObjectDetectionOptions) == {"classes": ["7"]}  # a name stays one
    assert parameters.options({"classes": '["7", "b"]'}, ObjectDetectionOptions) == {"classes": ["7", "b"]}


def test_whole_numbers_of_a_tensor() -> None:
    assert parameters.whole_number("input 'x'", {"n": 3}, "n", None) == 3
    assert parameters.whole_number("input 'x'", {}, "n", 0) == 0
    with pytest.raises(InvalidInput, match="input 'x': parameter n is missing"):
        parameters.whole_number("input 'x'", {}, "n", None)
    with pytest.raises(InvalidInput, match="input 'x': parameter n is '-3'"):
        parameters.whole_number("input 'x'", {"n": -3}, "n", None)


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("a", ["a"]),
        ('["a", "b"]', ["a", "b"]),
        ("[a", ["[a"]),
        (7, [7]),
        ("[7, 8]", [7, 8]),
        ("", [""]),
    ],
)
def test_an_option_of_several_values_takes_one_or_a_json_list(given: Parameter, parsed: list[Parameter]) -> None:
    assert parameters.options({"stop": given, "seed": 1}, GenerationOptions) == {"stop": parsed, "seed": 1}
