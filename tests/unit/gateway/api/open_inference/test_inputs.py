"""Input tensors against a model's declaration: encoded inputs, row counts, and that no payload is copied."""

from pathlib import Path
from typing import Any

import pytest

from gateway.api.open_inference.inputs import raw_inputs
from gateway.api.open_inference.model import InferInput, InferRequest
from gateway.api.open_inference.models import Served, view_of
from gateway.served import ServedModel
from gateway.state import ModelState
from shared.errors import InvalidInput, TooLarge
from shared.pipeline import Config, Options, Pipeline, PipelineSpec, Prepared, RawInput
from shared.results import Result, Text
from shared.settings import AdmissionSettings
from shared.tensors import Array, TensorSpec, pack_bytes
from tests.support.open_inference_parts import LIMITS, classifier, declared, identity_models, tensor_model

LIMIT = AdmissionSettings(max_inputs_per_request=3, max_rows=5)
MODELS: dict[str, Served] = {model.name: model for model in identity_models()}


class TextPipeline(Pipeline[Options]):
    """Text in, text out."""

    @property
    def spec(self) -> PipelineSpec:
        one = TensorSpec(name="tokens", datatype="INT64", shape=(-1,))
        return PipelineSpec(kind="text", inputs=(one,), outputs=(one,))

    def preprocess(self, item: RawInput, options: Options, out: list[Array]) -> Prepared:
        return Prepared(tensors=[])

    def postprocess(self, outputs: list[Array], context: dict[str, Any], options: Options) -> list[Result]:
        return [Text("")]

    def example(self) -> RawInput:
        return RawInput(kind="text", data=b"text")


TEXT = ServedModel(
    3, ModelState(name="text", version="0" * 16, phase="ready"), TextPipeline(Config(), Path(), ()), LIMITS
)


def checked(model: Served, *inputs: InferInput) -> list[RawInput]:
    request = InferRequest(model.name, "", "", {}, list(inputs), [], 0.0, 0.0)
    return raw_inputs(model, view_of(model), request, LIMIT, lambda _where, given, _fixed: given.data)


def encoded(name: str, *elements: bytes, rank: int = 1) -> InferInput:
    return InferInput(name, "BYTES", (len(elements), 1)[:rank], memoryview(pack_bytes(elements)), {})


@pytest.mark.parametrize("rank", [1, 2])
def test_every_element_is_an_input_of_its_own_and_a_view_of_the_message(rank: int) -> None:
    sent = encoded("image", b"one", b"two!", rank=rank)

    found = checked(classifier(), sent)

    assert [(raw.kind, bytes(raw.data), raw.rows) for raw in found] == [("image", b"one", 1), ("image", b"two!", 1)]
    assert isinstance(sent.data, memoryview)
    assert all(isinstance(raw.data, memoryview) and raw.data.obj is sent.data.obj for raw in found)


def test_tensors_are_views_of_the_message_too() -> None:
    data = memoryview(bytes(64))

    (raw,) = checked(MODELS["identity"], InferInput("INPUT0", "FP32", (1, 16), data, {}))

    assert raw.tensors[0].data is data
    assert (raw.rows, raw.nbytes) == (1, 64)


def test_text_is_utf8() -> None:
    assert [bytes(raw.data) for raw in checked(TEXT, encoded("text", "é".encode()))] == ["é".encode()]
    with pytest.raises(InvalidInput, match="input 'text': element 1 is not UTF-8 at byte 2"):
        checked(TEXT, encoded("text", b"fine", b"ab\xff"))


def test_empty_elements_and_too_many_of_them() -> None:
    with pytest.raises(InvalidInput, match="'image': element 1 has 0 bytes"):
        checked(classifier(), encoded("image", b"one", b""))
    with pytest.raises(TooLarge, match=r"4 rows; the limit is 3 \(admission\.max_inputs_per_request\)"):
        checked(classifier(), encoded("image", *[b"x"] * 4))


def test_bytes_of_all_inputs_together_have_a_limit() -> None:
    model = tensor_model("m", [declared(name, "BYTES", -1) for name in "ab"], [declared("y", "FP32", 1)])
    first, second = (InferInput(name, "BYTES", (1, 200_000), bytes(800_000), {}) for name in "ab")
    with pytest.raises(InvalidInput, match=r"'b' has 200000 BYTES elements after 200000 .* at most 262144"):
        checked(model, first, second)


def test_all_inputs_have_one_row_count_within_the_limit() -> None:
    def pair(first: int, second: int) -> list[RawInput]:
        inputs = (
            InferInput(name, "INT32", (rows, 4), bytes(16 * rows), {})
            for name, rows in (("INPUT0", first), ("INPUT1", second))
        )
        return checked(MODELS["pair"], *inputs)

    assert pair(5, 5)[0].rows == 5
    with pytest.raises(InvalidInput, match="'INPUT1' has 2 rows, but the inputs before it have 3"):
        pair(3, 2)
    with pytest.raises(InvalidInput, match=r"'INPUT0' has 6 rows; a request has at most 5 \(admission\.max_rows\)"):
        pair(6, 6)


@pytest.mark.parametrize("shape", [(1, 0, 2), (1, 3, 3), (1, 3), (1, 3, 2, 1), ()])
def test_free_dimensions_are_at_least_one_and_the_others_as_declared(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match=r"takes \[-1, -1, 2\]"):
        checked(MODELS["free"], InferInput("INPUT0", "FP32", shape, b"", {}))
