import os
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from shared import onnx_wire
from shared.model_config import RepositoryError
from shared.onnx_check import OnnxTensor, check, read
from tests.support.onnx_parts import (
    CANARY,
    PLACES,
    WEIGHT,
    model,
    outside,
    overlong,
    padded,
    respelt,
    value,
    varint,
    written,
)

Damage = Callable[[Path], str]
"""Given a folder with a canary file above it: what a bad model calls that file."""


def refused(path: Path, *names: str) -> str:
    with pytest.raises(RepositoryError) as caught:
        check(path, {path.name, *names}, "m: m.onnx")
    text = caught.value.text
    assert text.startswith("m: m.onnx: ")
    assert "\n" not in text
    assert str(path.parent) not in text.replace("/etc", "")
    assert CANARY.decode() not in text + str(caught.value.__dict__)
    return text


def test_inputs_and_outputs_are_read_as_they_are_declared(tmp_path: Path) -> None:
    kinds = [TensorProto.FLOAT16, TensorProto.INT64, TensorProto.STRING, TensorProto.COMPLEX64]
    inputs = [value(f"i{number}", kind, ("n", 3, "h", 5)) for number, kind in enumerate(kinds)]
    weight = numpy_helper.from_array(WEIGHT, "w")
    found = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        inputs=[value("x"), *inputs, value("w", shape=(4, 4)), value("scalar", shape=()), value("any", shape=None)],
        outputs=[value("y", shape=(2, 4))],
        weights=[weight],
    )
    file = read(written(tmp_path, found), "m")
    assert file.inputs == (
        OnnxTensor("x", "FP32", (-1, 4)),
        OnnxTensor("i0", "FP16", (-1, 3, -1, 5)),
        OnnxTensor("i1", "INT64", (-1, 3, -1, 5)),
        OnnxTensor("i2", "BYTES", (-1, 3, -1, 5)),
        OnnxTensor("i3", "", (-1, 3, -1, 5)),
        OnnxTensor("scalar", "FP32", ()),
        OnnxTensor("any", "FP32", None),
    )
    assert file.outputs == (OnnxTensor("y", "FP32", (2, 4)),)
    assert file.external == ()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "location",
    [
        "/etc/hostname",
        "../canary",
        "a/../../canary",
        "sub/data",
        "./data",
        "..",
        ".",
        "",
        "data\0x",
        "C:\\x",
        "*/_ORT_MEM_ADDR_/*",
    ],
)
def test_a_weight_that_lies_anywhere_but_beside_the_file_is_refused(tmp_path: Path, place: str, location: str) -> None:
    (tmp_path / "canary").write_bytes(CANARY)
    text = refused(written(tmp_path / "v", PLACES[place](location)), "data", location)
    assert "only the plain name of a file beside it is allowed" in text


@pytest.mark.parametrize("place", PLACES)
def test_a_weight_in_no_named_file_is_refused(tmp_path: Path, place: str) -> None:
    assert "no file is named" in refused(written(tmp_path, PLACES[place](None)))


@pytest.mark.parametrize("place", PLACES)
def test_a_file_that_the_version_does_not_have_is_refused(tmp_path: Path, place: str) -> None:
    path = written(tmp_path, PLACES[place]("data.bin"))
    (tmp_path / "data.bin").write_bytes(CANARY)
    assert "keeps weights in data.bin, which is none of the version's files" in refused(path)


def _symlink(folder: Path) -> None:
    (folder / "data.bin").symlink_to(folder.parent / "canary")


def _hard_link(folder: Path) -> None:
    os.link(folder.parent / "canary", folder / "data.bin")


def _folder(folder: Path) -> None:
    (folder / "data.bin").mkdir()


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "data.bin")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("link", [_symlink, _hard_link, _folder, _pipe])
def test_a_link_is_refused(tmp_path: Path, place: str, link: Callable[[Path], None]) -> None:
    (tmp_path / "canary").write_bytes(CANARY)
    path = written(tmp_path / "v", PLACES[place]("data.bin"))
    link(tmp_path / "v")
    assert "is a link or no plain file" in refused(path, "data.bin")


@pytest.mark.parametrize("place", PLACES)
def test_a_plain_file_of_the_version_is_allowed(tmp_path: Path, place: str) -> None:
    path = written(tmp_path, PLACES[place]("data.bin"))
    (tmp_path / "data.bin").write_bytes(WEIGHT.tobytes())
    assert check(path, {"m.onnx", "data.bin"}, "m").external == ("data.bin",)


def test_either_sign_of_external_data_counts(tmp_path: Path) -> None:
    quiet = outside("../canary")
    quiet.data_location = TensorProto.DEFAULT
    assert "only the plain name" in refused(written(tmp_path, model(weights=[quiet])))


def test_a_second_location_and_a_second_graph_are_seen_too(tmp_path: Path) -> None:
    double = outside("data.bin")
    entry = double.external_data.add()
    entry.key, entry.value = "location", "/etc/hostname"
    (tmp_path / "data.bin").write_bytes(WEIGHT.tobytes())
    assert "only the plain name" in refused(written(tmp_path, model(weights=[double])), "data.bin")
    bad = model(weights=[outside("/etc/hostname")]).SerializeToString()
    (tmp_path / "m.onnx").write_bytes(model().SerializeToString() + bad)  # protobuf takes both together as one
    assert "only the plain name" in refused(tmp_path / "m.onnx")


WAYS = {
    "initialiser": "ModelProto.graph GraphProto.initializer",
    "values of a sparse one": "GraphProto.sparse_initializer SparseTensorProto.values",
    "indices of a sparse one": "SparseTensorProto.indices",
    "attribute of a node": "GraphProto.node NodeProto.attribute AttributeProto.t",
    "list in an attribute": "AttributeProto.tensors",
    "sparse attribute": "AttributeProto.sparse_tensor",
    "graph inside a node": "AttributeProto.g",
    "function": "ModelProto.functions FunctionProto.node",
    "training graph": "ModelProto.training_info TrainingInfoProto.initialization",
}
"""Place → the fields that lead there, those named before left out."""
HIDDEN = [(place, field) for place, fields in WAYS.items() for field in fields.split()] + [
    ("initialiser", f"TensorProto.{name}") for name in ("external_data", "data_location")
]


@pytest.mark.parametrize("spell", [overlong, padded])
@pytest.mark.parametrize(("place", "field"), HIDDEN)
def test_no_field_can_be_hidden_by_spelling_its_number_otherwise(
    tmp_path: Path, place: str, field: str, spell: Callable[[int], bytes]
) -> None:
    plain = PLACES[place]("data.bin").SerializeToString()
    spelt = respelt(plain, onnx.ModelProto.DESCRIPTOR, {field}, spell)
    assert spelt != plain
    assert respelt(plain, onnx.ModelProto.DESCRIPTOR, {field}, varint) == plain
    (tmp_path / "data.bin").write_bytes(WEIGHT.tobytes())
    (tmp_path / "m.onnx").write_bytes(spelt)
    assert "is no ONNX file: it " in refused(tmp_path / "m.onnx", "data.bin")


def test_nor_can_the_words_that_say_where_or_a_node_of_compiled_code(tmp_path: Path) -> None:
    node = helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft", ep_cache_context="../x.so")
    for found, field in (
        (PLACES["initialiser"]("../canary"), "StringStringEntryProto.key"),
        (PLACES["initialiser"]("../canary"), "StringStringEntryProto.value"),
        (model([node]), "NodeProto.op_type"),
    ):
        content = respelt(found.SerializeToString(), onnx.ModelProto.DESCRIPTOR, {field}, overlong)
        (tmp_path / "m.onnx").write_bytes(content)
        assert "a field whose number no protobuf message may have" in refused(tmp_path / "m.onnx")


def test_a_place_in_another_file_counts_with_bits_that_protobuf_drops(tmp_path: Path) -> None:
    tensor = varint(8 << 3 | 2) + b"\x01w" + varint(14 << 3) + varint(1 << 32 | 1)
    graph = varint(5 << 3 | 2) + varint(len(tensor)) + tensor
    (tmp_path / "m.onnx").write_bytes(varint(7 << 3 | 2) + varint(len(graph)) + graph)
    assert "no file is named" in refused(tmp_path / "m.onnx")


def test_compiled_code_in_a_node_is_refused(tmp_path: Path) -> None:
    node = helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft", ep_cache_context="../x.so")
    assert "holds a node EPContext" in refused(written(tmp_path, model([node])))


def test_what_is_no_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    for content, words in (
        (b"", "is empty"),
        (b"\x80\x04\x95pickle", "is no ONNX file"),
        (b"PK\x03\x04" + bytes(100), "is no ONNX file"),
        (b"\x08\x09", "it holds no graph"),
        (b"\x3a\xff\xff\xff\xff\x0f", "it ends too early"),
        (b"\x3a" + b"\xff" * 11, "a number of more than 64 bits"),
        (b"\x08" + b"\xff" * 9 + b"\x02", "a number of more than 64 bits"),
        (b"\x08\x89\x00", "in more bytes than it takes"),
        (b"\x3a\x80\x00", "in more bytes than it takes"),
        (b"\x02\x00", "a field whose number no protobuf message may have"),
        (b"\xba\x80\x80\x80\x10\x00", "a field whose number no protobuf message may have"),
        (b"\x3b\x00", "wire type 3"),
    ):
        path.write_bytes(content)
        assert words in refused(path)
    path.unlink()
    assert "can't be read" in refused(path)


def test_every_truncation_is_refused_or_harmless(tmp_path: Path) -> None:
    whole = PLACES["graph inside a node"]("data.bin").SerializeToString()
    path = tmp_path / "m.onnx"
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        try:
            read(path, "m")
        except RepositoryError:
            continue


def test_graphs_inside_graphs_end_somewhere(tmp_path: Path) -> None:
    graph = b""
    for _ in range(200):  # attribute.g of a node of a graph, again and again
        for tag in (0x32, 0x2A, 0x0A):
            graph = bytes([tag]) + varint(len(graph)) + graph
    (tmp_path / "m.onnx").write_bytes(b"\x3a" + varint(len(graph)) + graph)
    assert "nested more than 64 deep" in refused(tmp_path / "m.onnx")


def test_fields_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_wire, "MAX_FIELDS", 1000)
    (tmp_path / "m.onnx").write_bytes(b"\x08\x09" * 2000)
    assert "more than 1000 fields" in refused(tmp_path / "m.onnx")


@given(data=st.data())
def test_damage_never_raises_anything_else(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    place = data.draw(st.sampled_from(sorted(PLACES)))
    content = bytearray(PLACES[place]("data.bin").SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "m.onnx"
    path.write_bytes(content)
    try:
        names = set(read(path, "m").external)
    except RepositoryError:
        return
    assert all("/" not in name and ".." not in name for name in names)
    assert names >= set(_locations(bytes(content)))


def _locations(content: bytes) -> list[str]:
    """As the reference library finds them in initialisers of the graph itself; none where it can't read the file."""
    try:
        found = onnx.load_model_from_string(content)
    except Exception:  # noqa: BLE001 - what it raises is its own business
        return []
    entries = [entry for tensor in found.graph.initializer for entry in tensor.external_data]
    return [entry.value for entry in entries if entry.key == "location"]
