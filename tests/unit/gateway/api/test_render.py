import typing

import pytest

from gateway.api import render
from gateway.request import Answer
from protos.headrace.v1 import inference_pb2 as pb
from shared.errors import HeadraceError, InvalidInput
from shared.results import (
    Classification,
    Detection,
    Detections,
    Embedding,
    Entities,
    Entity,
    FinishReason,
    Label,
    Result,
    Tensors,
    Text,
    TextEnd,
    Token,
)
from shared.tensors import SlotRef, Tensor

ALL: list[Result] = [
    Classification(labels=[Label(3, "cat", 0.5), Label(1, "", 0.25)]),
    Classification(labels=[]),
    Detections(boxes=[Detection(Label(3, "cat", 0.5), 1.0, 2.0, 3.0, 4.0)], width=10, height=20),
    Embedding(values=[0.5, -1.0]),
    Embedding(values=[]),
    Tensors(tensors=[Tensor("x", "UINT8", (1, 2), b"ab")]),
    Tensors(tensors=[]),
    Text(text="hello"),
    Text(text=""),
    Text("é", TextEnd(FinishReason.STOP_STRING, 3, 2), [Token(7, b"\xc3", -0.5, [Token(8, b"a", -1.5)])]),
    Entities([Entity(Label(2, "place", 0.75), 3, 8, "Paris")], truncated=True),
    Entities([]),
]


def test_every_kind_of_result_has_its_form_and_is_never_unset() -> None:
    assert {type(result) for result in ALL} == set(typing.get_args(Result))

    message = render.response(Answer("m", "0123456789abcdef", [*ALL]), "id-1")

    assert (message.model, message.version, message.request_id) == ("m", "0123456789abcdef", "id-1")
    assert [one.WhichOneof("kind") for one in message.results] == [
        *["classification"] * 2, "detections", *["embedding"] * 2, *["tensors"] * 2, *["text"] * 3,
        *["entities"] * 2,
    ]  # fmt: skip
    assert [(one.index, one.name, one.score) for one in message.results[0].classification.labels] == [
        (3, "cat", 0.5),
        (1, "", 0.25),
    ]
    box = message.results[2].detections.detections[0]
    assert (box.label.index, box.left, box.top, box.right, box.bottom) == (3, 1.0, 2.0, 3.0, 4.0)
    assert (message.results[2].detections.width, message.results[2].detections.height) == (10, 20)
    assert list(message.results[3].embedding.values) == [0.5, -1.0]
    tensor = message.results[5].tensors.tensors[0]
    assert (tensor.name, tensor.datatype, list(tensor.shape), tensor.data) == ("x", "UINT8", [1, 2], b"ab")
    assert message.results[7].text.text == "hello"
    generated = message.results[9].text
    assert (generated.finished.reason, generated.finished.prompt_tokens) == (pb.Finished.STOP_STRING, 3)
    assert [(token.id, token.bytes, token.alternatives[0].bytes) for token in generated.tokens] == [(7, b"\xc3", b"a")]
    entity = message.results[10].entities.entities[0]
    assert (entity.label.name, entity.start, entity.end, entity.text) == ("place", 3, 8, "Paris")
    assert message.results[10].entities.truncated


def test_a_failed_input_keeps_its_place() -> None:
    results: list[Result | HeadraceError] = [Text(text="a"), InvalidInput("bad image"), Text(text="c")]

    message = render.response(Answer("m", "v", results), "id-1")

    assert [one.WhichOneof("kind") for one in message.results] == ["text", "error", "text"]
    assert message.results[1].error.reason == "invalid_input"
    assert message.results[1].error.message == "bad image"


def test_a_slot_reference_never_leaves_the_gateway() -> None:
    leaking = Tensors(tensors=[Tensor("x", "UINT8", (1, 2), SlotRef(0, 2))])

    with pytest.raises(TypeError, match="output x"):
        render.response(Answer("m", "v", [leaking]), "id-1")
