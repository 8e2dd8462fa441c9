import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from shared.errors import StartupError
from shared.repository import META_FILE, digest_of
from shared.settings import BatchingSettings, Settings
from shared.tensors import Array
from tests.support.fake_streams import FakeDevice, FakeStreams
from tests.support.memory import proportional_bytes
from tests.support.onnx_parts import (
    CANARY,
    ONNX_YAML,
    PLACES,
    WEIGHT,
    WIDTH,
    model,
    outside,
    overlong,
    respelt,
    value,
)
from tests.support.worker_parts import toy_model
from workers.backends import torch_device
from workers.backends.base import OutOfMemory
from workers.backends.onnx_backend import OnnxNetwork, OnnxStreamRunner
from workers.backends.outliers import FACTOR, WINDOW, Outliers
from workers.backends.torch_device import TorchDevice
from workers.loading import Loader
from workers.model_pool import Key, LoadedVersion


def declared(inputs: Mapping[str, tuple[str, list[int]]], outputs: Mapping[str, tuple[str, list[int]]]) -> str:
    """A model.yaml of the tensor pipeline."""
    groups = {
        group: [{"name": name, "datatype": kind, "shape": shape} for name, (kind, shape) in tensors.items()]
        for group, tensors in (("inputs", inputs), ("outputs", outputs))
    }
    return f"pipeline: tensor\nbackend: onnxruntime\npreprocessing: {json.dumps(groups)}\n"


def ready(
    root: Path, found: onnx.ModelProto | bytes, yaml: str = ONNX_YAML, *, max_rows: int = 4, **files: bytes
) -> LoadedVersion:
    content = found if isinstance(found, bytes) else found.SerializeToString()
    version = toy_model(root, "toy", yaml, {"m.onnx": content, **files})
    return loader(root, max_rows=max_rows).load(Key("toy", version.version))


def loader(root: Path, *, device: TorchDevice | None = None, max_rows: int = 4) -> Loader:
    sizes = tuple(size for size in (1, 2, 4) if size <= max_rows)
    settings = Settings(repository=root, batching=BatchingSettings(max_rows=max_rows, sizes=sizes))
    return Loader(settings, device or torch_device.find("cpu", 0, 1))


def refused(root: Path, found: onnx.ModelProto | bytes, yaml: str = ONNX_YAML, **files: bytes) -> str:
    """The sentence with which the load fails."""
    with pytest.raises(StartupError) as caught:
        ready(root, found, yaml, **files)
    text = caught.value.text
    assert str(root) not in text
    assert "\n" not in text
    assert "toy" in text
    return text


def run(loaded: LoadedVersion, *rows: Array) -> list[Array]:
    forward = loaded.runner.run([list(rows)], len(rows[0]), "fp32")
    return [output.copy() for output in forward.outputs]


# ------------------------------------------------------------------ what it computes


def test_it_computes_what_the_file_says_for_items_side_by_side(tmp_path: Path) -> None:
    loaded = ready(tmp_path, model())
    rows = np.random.default_rng(0).random((3, WIDTH), np.float32)
    forward = loaded.runner.run([[rows[:1]], [rows[1:]]], 4, "fp32")
    np.testing.assert_allclose(forward.outputs[0], rows @ WEIGHT, rtol=1e-5)
    assert forward.finite.tolist() == [True] * 3
    assert loaded.precision == "fp32"
    assert [size for size, _ in loaded.batch_s] == [1, 2, 4]
    assert loaded.runner.memory_bytes == len(model().SerializeToString())


def test_a_row_that_is_not_finite_is_found(tmp_path: Path) -> None:
    rows = np.ones((3, WIDTH), np.float32)
    rows[1, 2] = np.nan
    assert ready(tmp_path, model()).runner.run([[rows]], 3, "fp32").finite.tolist() == [True, False, True]


def test_inputs_and_outputs_go_by_their_names(tmp_path: Path) -> None:
    nodes = [helper.make_node("Sub", ["a", "b"], ["d"]), helper.make_node("Add", ["a", "b"], ["s"])]
    found = model(nodes, inputs=[value("a"), value("b")], outputs=[value("s"), value("unused"), value("d")])
    found.graph.node.append(helper.make_node("Neg", ["a"], ["unused"]))
    pair = ("FP32", [WIDTH])
    loaded = ready(tmp_path, found, declared({"b": pair, "a": pair}, {"d": pair, "s": pair}))
    a, b = np.full((2, WIDTH), 5, np.float32), np.full((2, WIDTH), 3, np.float32)
    difference, total = run(loaded, b, a)
    assert (difference == 2).all()
    assert (total == 8).all()


@pytest.mark.parametrize(
    ("kind", "datatype"),
    [
        (TensorProto.FLOAT16, "FP16"),
        (TensorProto.FLOAT16, "FP32"),
        (TensorProto.FLOAT, "FP16"),
        (TensorProto.DOUBLE, "FP32"),
    ],
)
def test_floats_of_another_width_are_converted(tmp_path: Path, kind: int, datatype: str) -> None:
    weight = numpy_helper.from_array(WEIGHT.astype(helper.tensor_dtype_to_np_dtype(kind)), "w")
    found = model(inputs=[value("x", kind)], outputs=[value("y", kind)], weights=[weight])
    loaded = ready(tmp_path, found, declared({"x": (datatype, [WIDTH])}, {"y": (datatype, [WIDTH])}))
    rows = np.ones((2, WIDTH), "<f2" if datatype == "FP16" else "<f4")
    (answer,) = run(loaded, rows)
    assert answer.dtype == rows.dtype
    np.testing.assert_allclose(answer, np.ones((2, WIDTH)) @ WEIGHT, rtol=1e-2)


def test_integers_and_truth_values_pass_as_they_are(tmp_path: Path) -> None:
    nodes = [helper.make_node("Greater", ["i", "j"], ["larger"]), helper.make_node("Add", ["i", "j"], ["sum"])]
    inputs = [value(name, TensorProto.INT64, ("n", "m")) for name in "ij"]
    outputs = [value("larger", TensorProto.BOOL, ("n", "m")), value("sum", TensorProto.INT64, ("n", "m"))]
    pair = ("INT64", [-1])
    yaml = declared({"i": pair, "j": pair}, {"larger": ("BOOL", [-1]), "sum": pair})
    loaded = ready(tmp_path, model(nodes, inputs=inputs, outputs=outputs), yaml)
    i, j = np.array([[1, 2**40, 3]]), np.array([[2, 1, 3]])
    larger, total = run(loaded, i, j)
    assert larger.dtype == np.bool_
    assert larger.tolist() == [[False, True, False]]
    assert total.tolist() == [[3, 2**40 + 1, 6]]


def test_weights_beside_the_file_are_read(tmp_path: Path) -> None:
    found = model(weights=[outside("data.bin")])
    loaded = ready(tmp_path, found, **{"data.bin": WEIGHT.tobytes()})
    assert np.allclose(run(loaded, np.eye(WIDTH, dtype=np.float32))[0], WEIGHT)
    assert loaded.runner.memory_bytes == len(found.SerializeToString()) + WEIGHT.nbytes


def test_a_fixed_batch_of_one_is_served_one_by_one(tmp_path: Path) -> None:
    fixed = model(inputs=[value("x", shape=(1, WIDTH))], outputs=[value("y", shape=(1, WIDTH))])
    text = refused(tmp_path / "no", fixed)
    assert "input x has a fixed number of 1 row(s): export it with a dynamic first dimension, or set batching." in text
    loaded = ready(tmp_path / "yes", fixed, max_rows=1)
    assert np.allclose(run(loaded, np.ones((1, WIDTH), np.float32))[0], WEIGHT.sum(0))


def test_on_a_device_with_streams_two_passes_may_be_under_way(tmp_path: Path) -> None:
    version = toy_model(tmp_path, "toy", ONNX_YAML, {"m.onnx": model().SerializeToString()})
    streams = FakeStreams(row_s=0.0, copy_s=0.0)
    loaded = loader(tmp_path, device=FakeDevice(streams)).load(Key("toy", version.version))
    assert isinstance(loaded.runner, OnnxStreamRunner)
    assert not streams.of("computing", "replay")
    rows = np.random.default_rng(0).random((4, WIDTH), np.float32)
    passes = [loaded.runner.start([[rows[lane * 2 : lane * 2 + 2]]], 2, "fp32", lane) for lane in (0, 1)]
    for lane, under_way in enumerate(passes):
        np.testing.assert_allclose(under_way.wait().outputs[0], (rows @ WEIGHT)[lane * 2 : lane * 2 + 2], rtol=1e-5)


# ------------------------------------------------------------------ what does not belong together


PAIR = ("FP32", [WIDTH])


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        (declared({"z": PAIR}, {"y": PAIR}), "inputs are x; the pipeline declares z"),
        (declared({"x": PAIR, "z": PAIR}, {"y": PAIR}), "inputs are x; the pipeline declares x, z"),
        (declared({"x": PAIR}, {"logits": PAIR}), "outputs are y; the pipeline declares logits"),
        (declared({"x": ("INT32", [WIDTH])}, {"y": PAIR}), "input x is FP32; the pipeline declares INT32"),
        (declared({"x": PAIR}, {"y": ("INT64", [WIDTH])}), "output y is FP32; the pipeline declares INT64"),
        (declared({"x": ("FP32", [5])}, {"y": PAIR}), "input x has shape [-1, 4]; the pipeline declares [-1, 5]"),
        (declared({"x": ("FP32", [-1])}, {"y": PAIR}), "input x has shape [-1, 4]; the pipeline declares [-1, -1]"),
        (
            declared({"x": PAIR}, {"y": ("FP32", [2, 2])}),
            "output y has shape [-1, 4]; the pipeline declares [-1, 2, 2]",
        ),
    ],
)
def test_a_pipeline_that_declares_something_else_is_told_what_the_file_has(
    tmp_path: Path, yaml: str, words: str
) -> None:
    assert f"model toy: m.onnx: {words}" in refused(tmp_path, model(), yaml)


def test_what_normalise_makes_must_fit_the_file(tmp_path: Path) -> None:
    yaml = "pipeline: image_classification\nbackend: onnxruntime\npreprocessing: {size: 8, classes: 4}\n"
    assert "input x has shape [-1, 4], the pipeline makes [-1, 3, 8, 8]" in refused(tmp_path / "shape", model(), yaml)
    whole = model([helper.make_node("Identity", ["x"], ["y"])], inputs=[value("x", TensorProto.UINT8, ("n", 3, 8, 8))])
    assert "input x is UINT8, the pipeline makes torch.float32" in refused(tmp_path / "kind", whole, yaml)
    two = model([helper.make_node("Add", ["x", "z"], ["y"])], inputs=[value("x"), value("z")])
    assert "has 2 inputs (x, z), the pipeline makes 1" in refused(tmp_path / "count", two, yaml)


def test_text_is_refused(tmp_path: Path) -> None:
    found = model([helper.make_node("Identity", ["x"], ["y"])], inputs=[value("x", TensorProto.STRING)])
    yaml = declared({"x": ("BYTES", [WIDTH])}, {"y": PAIR})
    assert "x is BYTES: backend onnxruntime serves tensors of numbers only" in refused(tmp_path, found, yaml)


def test_model_yaml_must_not_name_a_network_or_fp16(tmp_path: Path) -> None:
    text = refused(tmp_path / "network", model(), ONNX_YAML + "network: mine:net\n")
    assert "network is given, but backend onnxruntime takes it from the .onnx file: remove one of the two" in text
    text = refused(tmp_path / "fp16", model(), ONNX_YAML + "precision: fp16\n")
    assert "precision is fp16, but backend onnxruntime computes in what the .onnx file holds" in text


# ------------------------------------------------------------------ files


def test_a_version_must_hold_exactly_one_file(tmp_path: Path) -> None:
    assert "must have one .onnx file, in no folder; has 2" in refused(
        tmp_path, model(), **{"b.onnx": model().SerializeToString()}
    )


def test_a_network_that_onnxruntime_does_not_know_is_one_sentence(tmp_path: Path) -> None:
    text = refused(tmp_path, model([helper.make_node("NoSuchThing", ["x"], ["y"])]))
    assert "model toy: onnxruntime can't load m.onnx (" in text
    assert "see the log" in text


def test_without_the_extra_the_sentence_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert refused(tmp_path, model()).endswith("is not installed: pip install 'headrace[onnx]'")


def test_a_changed_byte_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    version = toy_model(tmp_path, "toy", ONNX_YAML, {"m.onnx": model().SerializeToString()})
    path = version.files / "m.onnx"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)
    with pytest.raises(StartupError, match=r"m\.onnx: has changed since"):
        loader(tmp_path).load(Key("toy", version.version))


def smuggled(root: Path, files: Mapping[str, bytes]) -> Path:
    """A version whose hashes agree, written past the writer, which refuses such files; its folder."""
    folder = root / "toy"
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_text(declared({"x": PAIR}, {"y": PAIR}))
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    digest = digest_of(hashes)
    place = folder / "versions" / digest[:16]
    place.mkdir(parents=True)
    for name, content in files.items():
        (place / name).write_bytes(content)
    (place / META_FILE).write_text(json.dumps({"digest": digest, "files": hashes}))
    return place


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("location", ["absolute", "../../canary", "symlink", "hard link"])
def test_no_file_outside_is_ever_read(
    tmp_path: Path, place: str, location: str, capfd: pytest.CaptureFixture[str]
) -> None:
    canary = tmp_path / "repository" / "toy" / "canary"
    linked = location.endswith("link")
    where = "data.bin" if linked else location.replace("absolute", str(canary))
    content = PLACES[place](where).SerializeToString()
    folder = smuggled(tmp_path / "repository", {"m.onnx": content, **({"data.bin": CANARY} if linked else {})})
    canary.write_bytes(CANARY)
    if linked:
        (folder / "data.bin").unlink()
        if location == "symlink":
            (folder / "data.bin").symlink_to(canary)
        else:
            os.link(canary, folder / "data.bin")
    with pytest.raises(StartupError) as caught:
        loader(tmp_path / "repository").load(Key("toy", folder.name))
    said = capfd.readouterr()
    assert "CANARY" not in caught.value.text + said.out + said.err + str(caught.value.__dict__)
    assert "is a link or no plain file" in caught.value.text or "only the plain name" in caught.value.text


def test_weights_in_a_hidden_place_are_not_read(tmp_path: Path) -> None:
    """onnxruntime knows a field by the low 32 bits of its key, and would read a file by it that no hash covers."""
    plain = model(weights=[outside(META_FILE)]).SerializeToString()
    fields = {"TensorProto.external_data", "TensorProto.data_location"}
    hidden = respelt(plain, onnx.ModelProto.DESCRIPTOR, fields, overlong)
    folder = smuggled(tmp_path, {"m.onnx": hidden})
    with pytest.raises(StartupError, match="is no ONNX file: it has a field whose number no protobuf message may have"):
        loader(tmp_path).load(Key("toy", folder.name))


# ------------------------------------------------------------------ memory


def hungry() -> onnx.ModelProto:
    """As many numbers as the first one of each batch says."""
    nodes = [
        helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT64),
        helper.make_node("ReduceMax", ["i"], ["size"], keepdims=0),
        helper.make_node("Reshape", ["size", "one"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["many"]),
        helper.make_node("ReduceMax", ["many"], ["largest"], keepdims=0),
        helper.make_node("Add", ["x", "largest"], ["y"]),
    ]
    return model(nodes, weights=[numpy_helper.from_array(np.array([1], np.int64), "one")])


def test_a_batch_that_does_not_fit_is_out_of_memory_and_the_next_one_runs(tmp_path: Path) -> None:
    loaded = ready(tmp_path, hungry())
    few = np.full((1, WIDTH), 100, np.float32)
    with pytest.raises(OutOfMemory):
        run(loaded, few * 1e14)
    assert (run(loaded, few)[0] == 100).all()


def test_memory_that_an_outlier_took_is_given_back(tmp_path: Path) -> None:
    """200 MB for one pass whose input has a hundred times the usual rows."""
    loaded = ready(tmp_path, hungry())
    network = loaded.runner._network  # type: ignore[attr-defined]  # to see what it did
    assert isinstance(network, OnnxNetwork)
    small = np.full((1, WIDTH), 100, np.float32)
    for _ in range(WINDOW):
        run(loaded, small)
    assert network.shrunk == 0
    before = proportional_bytes([os.getpid()])
    large = np.zeros((100, WIDTH), np.float32)
    large[0] = 50_000_000
    run(loaded, large)
    assert network.shrunk == 1
    assert proportional_bytes([os.getpid()]) - before < 50_000_000


def test_an_outlier_is_much_larger_than_all_of_the_last_passes() -> None:
    outliers = Outliers()
    assert not any(outliers.saw(nbytes) for nbytes in [10, 1000] * (WINDOW // 2)), "the first ones tell what is usual"
    assert not outliers.saw(int(1000 * FACTOR))
    assert outliers.saw(int(1000 * FACTOR * FACTOR) + 1)
    assert not outliers.saw(int(1000 * FACTOR * FACTOR) + 1), "it has just been seen"
    assert not any(outliers.saw(10) for _ in range(WINDOW))
    assert outliers.saw(21)
