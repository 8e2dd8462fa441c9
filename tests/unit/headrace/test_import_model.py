from pathlib import Path

import pytest
from onnx import TensorProto, helper

from headrace.import_config import Shape
from headrace.import_model import ImportOptions
from tests.support.import_parts import classifier, refused, saved
from tests.support.onnx_parts import model, outside, value, written


def test_files_that_are_never_read_are_told_what_to_do(tmp_path: Path) -> None:
    root = tmp_path / "models"
    root.mkdir()
    for name in ("net.pt", "net.pth", "net.bin", "net.ckpt"):
        assert "a pickle runs code when it is opened" in refused(root, saved(tmp_path / name, b"x"))
    assert "only .onnx, .pt2, .safetensors files" in refused(root, saved(tmp_path / "net.h5", b"x"))
    assert "there is no file" in refused(root, tmp_path / "absent.onnx")
    assert "is no ONNX file" in refused(root, saved(tmp_path / "bad.onnx", b"\x80\x04pickle"))
    assert "can't be a model's name" in refused(root, written(tmp_path, model()), name="../m")
    bad = written(tmp_path, model(weights=[outside("../secret")]), "out.onnx")
    assert "only the plain name of a file beside it" in refused(root, bad)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Shape(pipeline="image_classification"), "needs one float input [rows, 3, size, size]"),
        (Shape(network="net:build"), "--network is given, but m.onnx is the network itself"),
    ],
)
def test_options_that_contradict_the_file(tmp_path: Path, options: Shape, words: str) -> None:
    assert words in refused(tmp_path, written(tmp_path, model()), ImportOptions(shape=options))


def test_images_and_labels_must_agree_with_the_file(tmp_path: Path) -> None:
    file = saved(tmp_path / "m.onnx", classifier())
    assert "--size is 9, but the file takes images of 8 × 8" in refused(
        tmp_path, file, ImportOptions(shape=Shape(size=9))
    )
    labels = saved(tmp_path / "names", b"a\nb\n")
    assert "--labels has 2 lines, but the file gives 3" in refused(tmp_path, file, ImportOptions(labels=labels))
    weights = saved(tmp_path / "w.safetensors", b"x")
    assert "name the network's factory with --network" in refused(tmp_path, weights)
    only = ImportOptions(shape=Shape(network="net:build"))
    assert "give --size and --labels" in refused(tmp_path, weights, only)


def test_what_the_tensor_pipeline_can_not_carry_is_named(tmp_path: Path) -> None:
    node = [helper.make_node("Identity", ["x"], ["y"])]
    complex_numbers = model(node, inputs=[value("x", TensorProto.COMPLEX64)])
    assert "input 'x' is no tensor of rows with a known type" in refused(tmp_path, written(tmp_path, complex_numbers))
    unknown = model(node, outputs=[value("y", shape=None)])
    assert "output 'y' is no tensor of rows" in refused(tmp_path, written(tmp_path, unknown))
