from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.open_inference.model import InferOutput, InferRequest, InferResponse
from gateway.api.open_inference.rest_codec import Target, Wish, decode, encode
from shared.errors import InvalidInput, NonfiniteOutput

TARGET = Target("m", "v", 9.0, 1.0)
JSON_ONLY = Wish(every=False, named={})
X: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, -2]}


def body(**fields: Any) -> bytes:  # noqa: ANN401 - any JSON
    return msgspec.json.encode({"inputs": [X]} | fields)


def one_input(**fields: Any) -> bytes:  # noqa: ANN401 - any JSON
    return body(inputs=[X | fields])


def decoded(text: bytes, header: str | None = None) -> InferRequest:
    return decode(text, header, TARGET)[0]


def outcome(text: bytes, header: str | None = None) -> InferRequest | str:
    """A request, or why it is none; anything but InvalidInput fails the test."""
    try:
        return decoded(text, header)
    except InvalidInput as error:
        return error.text


def framed(raw: bytes, **fields: Any) -> tuple[bytes, str]:  # noqa: ANN401 - any JSON
    text = body(**fields)
    return text + raw, str(len(text))


def test_a_json_request_arrives_with_all_its_fields() -> None:
    text = body(
        id="é1",
        parameters={"timeout": 5, "priority": 1, "note": "a", "on": True, "part": 0.5},
        outputs=[{"name": "y", "parameters": {"classification": 2}}],
    )

    request = decoded(text)

    assert (request.model, request.version, request.id) == ("m", "v", "é1")
    assert (request.deadline_s, request.arrived_s) == (9.0, 1.0)
    assert request.parameters == {"timeout": 5, "priority": 1, "note": "a", "on": True, "part": 0.5}
    assert [(one.name, one.parameters) for one in request.outputs] == [("y", {"classification": 2})]
    assert [(one.name, one.datatype, one.shape) for one in request.inputs] == [("x", "FP32", (1, 2))]
    assert bytes(request.inputs[0].data) == np.array([1.5, -2], "<f4").tobytes()


def test_binary_tensors_are_views_of_the_body_in_the_order_of_the_json() -> None:
    inputs = [
        {"name": "a", "datatype": "FP16", "shape": [1, 2], "parameters": {"binary_data_size": 4}},
        X,
        {"name": "b", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5, "more": 1}},
    ]
    whole, header = framed(b"abcd\x01\x00\x00\x00z", inputs=inputs)

    request = decoded(whole, header)

    assert [bytes(one.data) for one in request.inputs[::2]] == [b"abcd", b"\x01\x00\x00\x00z"]
    assert [one.parameters for one in request.inputs] == [{}, {}, {"more": 1}]
    view = request.inputs[0].data
    assert isinstance(view, memoryview)
    assert view.obj is whole


def test_a_request_in_shared_memory_needs_no_data() -> None:
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    given = {"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": region}

    assert decoded(body(inputs=[given])).inputs[0].parameters == region


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"", "the request has no JSON"),
        (b"{", "the request body is not JSON"),
        (b"\xff\xfe{\x00}\x00", "the request body is not JSON"),
        (b"[" * 100_000, "the request's JSON does not fit: expected 'object', got 'array'"),
        (b'{"inputs":' + b"[" * 100_000, "the request's JSON does not fit"),
        (b'{"inputs":[],"x":' + b"[" * 100_000, "nested too deeply"),
        (b'{"inputs":[],"x":NaN}', "the request body is not JSON"),
        (b'{"inputs":[]}x', "the request body is not JSON: trailing characters"),
        (b'{"inputs":[],"id":"\xff"}', "the request body is not JSON"),
        (b'{"inputs":[],"id":"\\ud800"}', "the request body is not JSON"),
        (b"{}", "missing required field 'inputs'"),
        (b'{"inputs":{}}', r"expected 'array', got 'object' - at '\$.inputs'"),
        (b'{"inputs":[{"name":"x","datatype":"FP32"}]}', r"missing required field 'shape' - at '\$.inputs\[0\]'"),
        (body(id=7), r"got 'int' - at '\$.id'"),
        (body(parameters={"a": None}), "got 'null'"),
        (body(parameters={"a": [1]}), "got 'array'"),
        (body(parameters={"timeout": 1 << 33}).replace(b"8589934592", b"1" * 30), "parameter 'timeout' is 1{30}, "),
        (body(parameters={"binary_data_output": 1}), "parameter binary_data_output is '1'"),
        (body(outputs=[{"name": "y", "parameters": {"binary_data": "no"}}]), "parameter binary_data is 'no'"),
        (one_input(shape=["1", 2]), r"expected 'int', got 'str' - at '\$.inputs\[0\].shape\[0\]'"),
        (one_input(shape=[-1, 2]), r"input 'x' has shape \[-1, 2\]"),
        (one_input(shape=[1] * 50_000), "input 'x' has 50000 dimensions"),
        (one_input(shape=[1, 3]), r"input 'x' has 2 values; shape \[1, 3\] needs 3"),
        (one_input(datatype="fp32"), "input 'x' has datatype 'fp32'; known: BOOL"),
        (one_input(datatype="FP16"), "input 'x' is FP16, which JSON data can't carry"),
        (one_input(data=None), "input 'x' has data that can't be read: expected 'array', got 'null'"),
        (one_input(parameters={"binary_data_size": 8}), "input 'x' has both data and binary_data_size"),
        (body(inputs=[{"name": "x", "datatype": "FP32", "shape": [1]}]), "input 'x' has no data"),
    ],
)
def test_what_is_not_a_request_is_refused_with_the_reason(text: bytes, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence) as caught:
        decoded(text)

    assert len(caught.value.text) < 500


BINARY = {"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}


@pytest.mark.parametrize("header", ["-1", "1.5", "", "0x10", "1e3", "²", "9" * 40, " 5"])
def test_a_header_length_that_is_no_length_is_refused(header: str) -> None:
    with pytest.raises(InvalidInput, match=r"Inference-Header-Content-Length is .* it has to be a number of bytes"):
        decoded(body(), header)


def test_a_header_length_past_the_body_is_refused_with_both_numbers() -> None:
    text = body()
    with pytest.raises(InvalidInput, match=rf"is {len(text) + 1}; the body has only {len(text)} bytes"):
        decoded(text, str(len(text) + 1))


@pytest.mark.parametrize(
    ("raw", "size", "sentence"),
    [
        (b"1234567", 8, "input 'x' has binary_data_size 8, and 7 bytes are left of the 7 bytes behind the JSON"),
        (b"123456789", 8, "9 bytes follow the JSON, and the inputs' binary_data_size add up to 8"),
        (b"12345678", -8, "binary_data_size '-8'; it has to be a number of bytes"),
        (b"12345678", True, "binary_data_size 'True'"),
        (b"12345678", 8.0, "binary_data_size '8.0'"),
        (b"12345678", "8", "binary_data_size '8'"),
        (b"", 2**63, "and 0 bytes are left"),
    ],
)
def test_binary_sizes_have_to_add_up_to_the_body(raw: bytes, size: object, sentence: str) -> None:
    whole, header = framed(raw, inputs=[BINARY | {"parameters": {"binary_data_size": size}}])
    with pytest.raises(InvalidInput, match=sentence):
        decoded(whole, header)


def test_texts_of_all_inputs_together_have_a_limit() -> None:
    half = {"name": "x", "datatype": "BYTES", "shape": [131073], "data": [""] * 131073}
    with pytest.raises(InvalidInput, match=r"131073 BYTES elements after 131073 .*; a request may have at most 262144"):
        decoded(body(inputs=[half, half]))


def test_a_binary_size_without_the_header_is_refused() -> None:
    with pytest.raises(InvalidInput, match="the request has no header Inference-Header-Content-Length"):
        decoded(body(inputs=[BINARY]))


def test_bytes_that_belong_to_no_input_are_refused() -> None:
    whole, header = framed(b"x")
    with pytest.raises(InvalidInput, match="1 bytes follow the JSON"):
        decoded(whole, header)


def response(*outputs: InferOutput, request_id: str = "") -> InferResponse:
    return InferResponse("m", "v1", request_id, list(outputs))


Y = InferOutput("y", "FP32", (1, 2), np.array([0.5, 3], "<f4").tobytes(), {})


def test_a_json_answer() -> None:
    encoded = encode(response(Y, request_id="7"), JSON_ONLY)

    assert encoded.json_bytes is None
    assert msgspec.json.decode(encoded.body) == {
        "model_name": "m",
        "model_version": "v1",
        "id": "7",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [0.5, 3.0]}],
    }


def test_no_id_stays_no_id() -> None:
    assert "id" not in msgspec.json.decode(encode(response(Y), JSON_ONLY).body)


def test_an_answer_with_some_outputs_in_binary() -> None:
    z = InferOutput("z", "BF16", (2,), b"abcd", {"extra": "e"})

    encoded = encode(response(z, Y), Wish(every=False, named={"z": True}))

    assert encoded.json_bytes is not None
    told, raw = msgspec.json.decode(encoded.body[: encoded.json_bytes]), encoded.body[encoded.json_bytes :]
    assert raw == b"abcd"
    assert told["outputs"][0] == {
        "name": "z",
        "datatype": "BF16",
        "shape": [2],
        "parameters": {"extra": "e", "binary_data_size": 4},
    }
    assert told["outputs"][1]["data"] == [0.5, 3.0]


@pytest.mark.parametrize(
    ("parameters", "outputs", "wanted"),
    [
        ({}, [], {"y": False}),
        ({"binary_data_output": True}, [], {"y": True}),
        ({"binary_data_output": True}, [("y", {"binary_data": False}), ("z", {})], {"y": False, "z": True}),
        ({}, [("y", {"binary_data": True}), ("z", {})], {"y": True, "z": False}),
    ],
)
def test_which_outputs_are_binary_and_that_the_models_never_see_these_parameters(
    parameters: dict[str, bool], outputs: list[tuple[str, dict[str, bool]]], wanted: dict[str, bool]
) -> None:
    text = body(parameters=parameters, outputs=[{"name": name, "parameters": given} for name, given in outputs])

    request, wish = decode(text, None, TARGET)

    assert {name: wish.binary(name) for name in wanted} == wanted
    assert request.parameters == {}
    assert all(not one.parameters for one in request.outputs)


@pytest.mark.parametrize(
    ("output", "error", "sentence"),
    [
        (Y._replace(data=np.array([np.nan, 1], "<f4").tobytes()), NonfiniteOutput, "output 'y' has NaN or infinity"),
        (Y._replace(datatype="BF16", data=b"abcd"), InvalidInput, "output 'y' is BF16, which JSON can't carry"),
        (InferOutput("y", "BYTES", (1,), b"\1\0\0\0\xff", {}), InvalidInput, "element .0. that is not UTF-8"),
    ],
)
def test_what_json_cant_carry_is_refused_and_says_to_ask_for_binary(
    output: InferOutput, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=f"{sentence}.*ask for it as binary data"):
        encode(response(output), JSON_ONLY)


NUMBERS = {
    "BOOL": (st.booleans(), "?"),
    "UINT8": (st.integers(0, 2**8 - 1), "u1"),
    "UINT16": (st.integers(0, 2**16 - 1), "<u2"),
    "UINT32": (st.integers(0, 2**32 - 1), "<u4"),
    "UINT64": (st.integers(0, 2**64 - 1), "<u8"),
    "INT8": (st.integers(-(2**7), 2**7 - 1), "i1"),
    "INT16": (st.integers(-(2**15), 2**15 - 1), "<i2"),
    "INT32": (st.integers(-(2**31), 2**31 - 1), "<i4"),
    "INT64": (st.integers(-(2**63), 2**63 - 1), "<i8"),
    "FP32": (st.floats(width=32, allow_nan=False, allow_infinity=False), "<f4"),
    "FP64": (st.floats(allow_nan=False, allow_infinity=False), "<f8"),
}


@settings(deadline=None)  # a busy machine is no failure
@given(st.data(), st.sampled_from(sorted(NUMBERS)), st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_any_number_comes_back_as_it_was_sent_flat_or_nested(
    data: st.DataObject, datatype: str, dims: list[int]
) -> None:
    strategy, dtype = NUMBERS[datatype]
    size = int(np.prod(dims))
    values = data.draw(st.lists(strategy, min_size=size, max_size=size))
    array = np.array(values, dtype).reshape(dims)

    for listed in (values, array.tolist()):
        sent = decoded(one_input(datatype=datatype, shape=dims, data=listed)).inputs[0]
        assert bytes(sent.data) == array.tobytes()
    answer = encode(response(InferOutput("y", datatype, tuple(dims), array.tobytes(), {})), JSON_ONLY)
    assert msgspec.json.decode(answer.body)["outputs"][0]["data"] == array.reshape(-1).tolist()


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.text(max_size=20), max_size=8))
def test_any_text_comes_back_as_it_was_sent(texts: list[str]) -> None:
    sent = decoded(one_input(datatype="BYTES", shape=[len(texts)], data=texts)).inputs[0]

    answer = encode(response(InferOutput("y", "BYTES", (len(texts),), sent.data, {})), JSON_ONLY)

    assert msgspec.json.decode(answer.body)["outputs"][0]["data"] == texts


@settings(deadline=None)  # a busy machine is no failure
@given(st.binary(max_size=300), st.one_of(st.none(), st.integers(-5, 400).map(str), st.text(max_size=5)))
def test_any_bytes_are_a_request_or_an_invalid_input(raw: bytes, header: str | None) -> None:
    assert outcome(raw, header)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("name", "datatype", "shape", "data", "parameters")


@settings(deadline=None)  # a busy machine is no failure
@given(
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=2),
    st.sampled_from([*NUMBERS, "FP16", "BF16", "BYTES"]),
    st.lists(st.integers(-2, 3), max_size=3),
    JSON,
)
def test_any_json_in_a_field_is_a_request_or_an_invalid_input(
    fields: dict[str, Any], datatype: str, shape: list[int], values: object
) -> None:
    whole = X | {"datatype": datatype, "shape": shape, "data": values} | fields
    found = outcome(msgspec.json.encode({"inputs": [whole]}))

    assert len(found) < 600 if isinstance(found, str) else found.inputs[0].name == whole["name"]


@settings(deadline=None)  # a busy machine is no failure
@given(st.data())
def test_a_binary_request_cut_or_changed_anywhere_is_a_request_or_an_invalid_input(data: st.DataObject) -> None:
    whole, header = framed(b"12345678", inputs=[BINARY])
    place = data.draw(st.integers(0, len(whole)))
    damaged = data.draw(
        st.sampled_from(
            [whole[:place], whole[:place] + b"\x00" + whole[place + 1 :], whole[:place] + whole[place - 1 :]]
        )
    )
    assert outcome(damaged, header)
