from unittest import mock

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from gateway.api import elements, parse
from protos.headrace.v1 import inference_pb2 as pb
from shared.errors import CallerFault, InvalidInput, TooLarge, UnknownVersion
from shared.settings import AdmissionSettings

LIMITS = AdmissionSettings(max_inputs_per_request=4)

BAD_NAMES = [
    "../x", "a/../b", "..", ".hidden", "-a", "_a", "/etc/passwd", "a/b", "a\\b", "%2e%2e", "a b", " a", "a\n", "a\x00b",
    "file:x", "http://host/x", "//host/x", "a..b", "ä", "аbc", "a\u202eb", "x" * 129, "x" * 10_000, "~root", "$HOME",
]  # fmt: skip


def image(data: bytes = b"x") -> pb.Input:
    return pb.Input(image=data)


def tensor(
    name: str = "x", datatype: str = "FP32", shape: tuple[int, ...] = (1, 2), data: bytes = b"\0" * 8
) -> pb.Input:
    return pb.Input(tensors=pb.TensorList(tensors=[pb.Tensor(name=name, datatype=datatype, shape=shape, data=data)]))


def inputs(*given: pb.Input) -> tuple[list[object], int]:
    found, nbytes, _ = parse.raw_inputs(pb.PredictRequest(inputs=given), LIMITS)
    return list(found), nbytes


@pytest.mark.parametrize("name", ["", "a", "A9", "efficientnet-lite0", "a.b_c-d", "x" * 128])
def test_takes_a_name(name: str) -> None:
    parse.check_model(name, "")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_refuses_a_name_and_shows_at_most_100_characters_of_it(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"^model is '") as caught:
        parse.check_model(name, "")

    assert len(caught.value.text) < 300
    assert caught.value.text.isascii() or "…" in caught.value.text


@pytest.mark.parametrize("version", ["1", "0123456789ABCDEF", "0123456789abcde", "0123456789abcdef0", "../x"])
def test_refuses_a_version_that_can_not_be_one(version: str) -> None:
    with pytest.raises(UnknownVersion, match="version is"):
        parse.check_model("a", version)


def test_takes_a_version() -> None:
    parse.check_model("a", "0123456789abcdef")


@pytest.mark.parametrize("request_id", ["", "x", "a b~!", "x" * 128])
def test_takes_a_request_id(request_id: str) -> None:
    parse.check_request_id(request_id)


@pytest.mark.parametrize("request_id", ["x" * 129, "a\n", "\x00", "é", "a\r\nevil: header"])
def test_refuses_a_request_id_that_could_break_metadata_or_logs(request_id: str) -> None:
    with pytest.raises(InvalidInput, match="request_id is"):
        parse.check_request_id(request_id)


def test_takes_images_texts_and_tensors_and_counts_their_bytes() -> None:
    found, nbytes, _ = parse.raw_inputs(
        pb.PredictRequest(inputs=[image(b"abc"), pb.Input(text="dä"), tensor()]), LIMITS
    )

    assert [one.kind for one in found] == ["image", "text", "tensors"]
    assert [bytes(one.data) for one in found] == [b"abc", b"d\xc3\xa4", b""]
    assert found[2].tensors[0].shape == (1, 2)
    assert nbytes == 3 + 3 + 8


def test_no_input_at_all_names_limit_and_setting() -> None:
    with pytest.raises(InvalidInput, match=r"inputs is empty; .* 1\.\.4 .*admission\.max_inputs_per_request"):
        inputs()


def test_too_many_inputs_name_limit_and_setting() -> None:
    with pytest.raises(TooLarge, match=r"5 entries; the limit is 4 \(admission\.max_inputs_per_request\)"):
        inputs(*[image()] * 5)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (pb.Input(), r"inputs\[1\] is empty; set one of image, text, tensors, file or chat"),
        (pb.Input(image=b""), r"inputs\[1\]\.image has 0 bytes"),
        (pb.Input(text=""), r"inputs\[1\]\.text has 0 bytes"),
        (pb.Input(tensors=pb.TensorList()), r"inputs\[1\]\.tensors has 0 tensors"),
        (pb.Input(tensors=pb.TensorList(tensors=[pb.Tensor()] * 65)), r"has 65 tensors; an input has 1\.\.64"),
        (tensor(name="a/b"), r"tensors\[0\]\.name is 'a/b'"),
        (tensor(name=""), r"tensors\[0\]\.name is ''"),
        (tensor(datatype="fp32"), r"datatype is 'fp32'; known: BOOL, .*FP64"),
        (tensor(datatype="COMPLEX"), r"datatype is 'COMPLEX'"),
        (
            tensor(datatype="BYTES", shape=(1, 1), data=b"\x05\0\0\0ab"),
            r"data has length 5 for element 0, but only 2 bytes",
        ),
        (tensor(datatype="BYTES", shape=(1, 1), data=b"\0" * 5), r"data has 5 bytes of data, but its 1 BYTES elements"),
        (
            tensor(datatype="BYTES", shape=(2**62,), data=b""),
            r"has 4611686018427387904 BYTES elements; a request may have at most 262144",
        ),
        (tensor(shape=()), r"shape has 0 dimensions; allowed are 1\.\.16"),
        (tensor(shape=(1,) * 17), r"shape has 17 dimensions"),
        (tensor(shape=(-1, 2)), r"shape is \[-1, 2\]; no dimension may be negative"),
        (tensor(shape=(2**62, 4)), r"data has 8 bytes; FP32 \[4611686018427387904, 4\] needs 73786976294838206464"),
        (tensor(shape=(2**63 - 1,) * 16), r"data has 8 bytes"),
        (tensor(shape=(1, 3)), r"data has 8 bytes; FP32 \[1, 3\] needs 12"),
        (tensor(data=b""), r"data has 0 bytes; FP32 \[1, 2\] needs 8"),
    ],
)
def test_refuses_an_input_and_names_it(given: pb.Input, text: str) -> None:
    with pytest.raises(InvalidInput, match=text) as caught:
        inputs(image(), given)

    assert len(caught.value.text) < 1000


@pytest.mark.parametrize("counts", [(4_000_000,), (200_000, 100_000)], ids=["in one tensor", "in two inputs"])
def test_a_request_has_so_many_bytes_elements_that_looking_at_them_takes_no_time(counts: tuple[int, ...]) -> None:
    given = [tensor(datatype="BYTES", shape=(count,), data=bytes(4 * count)) for count in counts]
    text = rf"tensors\[0\] has {counts[-1]} BYTES elements.*; a request may have at most 262144"
    with (
        mock.patch.object(elements, "element_places", wraps=elements.element_places) as walk,
        pytest.raises(InvalidInput, match=text),
    ):
        inputs(*given)
    assert walk.call_count == len(counts) - 1


def test_refuses_a_tensor_name_given_twice() -> None:
    twice = tensor()
    twice.tensors.tensors.append(twice.tensors.tensors[0])

    with pytest.raises(InvalidInput, match="the name 'x' twice"):
        inputs(twice)


def test_options_are_those_that_are_set() -> None:
    assert parse.options(pb.PredictRequest()) == {}
    assert parse.options(pb.PredictRequest(options=pb.Options())) == {}
    assert parse.options(pb.PredictRequest(options=pb.Options(top_k=0))) == {"top_k": 0}
    assert parse.options(pb.PredictRequest(options=pb.Options(top_k=2**32 - 1))) == {"top_k": 2**32 - 1}


@given(st.binary(max_size=200))
def test_any_bytes_are_taken_or_refused_with_a_short_sentence(raw: bytes) -> None:
    text = ""
    try:
        message = pb.PredictRequest.FromString(raw)
        parse.check_request_id(message.request_id)
        parse.check_model(message.model, message.version)
        parse.raw_inputs(message, LIMITS)
    except DecodeError:
        pass
    except CallerFault as error:
        text = error.text
    assert len(text) < 1000


@given(
    st.lists(st.integers(-1, 5) | st.integers(-(2**63), 2**63 - 1), max_size=18),
    st.sampled_from(["BOOL", "FP16", "INT64", "X"]),
    st.binary(max_size=64),
)
def test_a_tensor_that_is_taken_has_exactly_the_bytes_of_its_shape(
    shape: list[int], datatype: str, data: bytes
) -> None:
    try:
        _, nbytes = inputs(tensor(datatype=datatype, shape=tuple(shape), data=data))
    except InvalidInput:
        return
    assert nbytes == len(data) == np.prod(shape, dtype=object) * {"BOOL": 1, "FP16": 2, "INT64": 8}[datatype]


@given(st.text())
def test_a_callers_text_is_shown_short_and_in_ascii(text: str) -> None:
    shown = parse.shown(text)

    assert len(shown) <= 102
    assert shown.replace("…", "").isascii()
