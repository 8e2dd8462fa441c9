import io
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from onnx import helper, numpy_helper
from torch import nn

from headrace import import_model
from headrace.import_config import Shape, draft, look
from headrace.import_model import ImportOptions, run
from shared.errors import StartupError
from shared.onnx_check import OnnxTensor
from shared.repository import Meta, Repository
from shared.repository_writer import add_version
from tests.support.import_parts import CLASSES, classifier, refused, saved
from tests.support.onnx_parts import WEIGHT, model, outside, value, written

# ------------------------------------------------------------------ what becomes of good files


def test_an_onnx_file_becomes_a_served_model_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    shape = (1, 4)  # a fixed batch
    found = model(weights=[outside("w.bin")], inputs=[value("x", shape=shape)], outputs=[value("y", shape=shape)])
    file = written(tmp_path, found, "linear.onnx")
    saved(tmp_path / "w.bin", WEIGHT.tobytes())
    imported = run(tmp_path / "models", "linear", file, ImportOptions(meta=Meta(owner="me")))
    assert (imported.pipeline, imported.backend) == ("tensor", "onnxruntime")
    assert imported.inputs == (OnnxTensor("x", "FP32", shape),)
    assert imported.outputs == (OnnxTensor("y", "FP32", shape),)
    assert imported.current
    assert imported.new_config
    assert not imported.present
    assert imported.unconfirmed == ()
    assert imported.rows == 1
    assert imported.batch_s > 0
    version = Repository(tmp_path / "models").open("linear")
    assert version.version == imported.version
    assert sorted(version.meta.files) == ["linear.onnx", "w.bin"]
    assert version.meta.owner == "me"
    assert version.config.batching.max_rows == 1
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["linear"]


def test_images_are_seen_and_guesses_are_named(tmp_path: Path) -> None:
    file = saved(tmp_path / "net.onnx", classifier())
    labels = saved(tmp_path / "names", b"red\ngreen\nblue\n")
    options = ImportOptions(labels=labels, shape=Shape(mean=(1.0, 2.0, 3.0)))
    imported = run(tmp_path / "models", "colours", file, options)
    assert imported.pipeline == "image_classification"
    assert imported.unconfirmed == ("std",)
    assert "green" in imported.answer
    text = (tmp_path / "models" / "colours" / "model.yaml").read_text()
    assert "std: a guess (ImageNet's), no file tells" in text
    config = Repository(tmp_path / "models").open("colours").config
    assert config.preprocessing["mean"] == [1.0, 2.0, 3.0]
    assert config.preprocessing["size"] == 8
    assert config.labels == "labels.txt"


def test_a_second_version_keeps_model_yaml_and_answers_nobody_yet(tmp_path: Path) -> None:
    root = tmp_path / "models"
    first_file = saved(tmp_path / "a.onnx", classifier())
    config = root / "m" / "model.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(draft(look(first_file), Shape(), ()).text + "# mine\n")
    first = add_version(root, "m", {"a.onnx": first_file}, Meta())
    weight = numpy_helper.from_array(np.array(2, np.float32), "two")
    twice = model(
        [
            helper.make_node("ReduceMean", ["image"], ["mean"], axes=[2, 3], keepdims=0),
            helper.make_node("Mul", ["mean", "two"], ["logits"]),
        ],
        inputs=[value("image", shape=("n", 3, 8, 8))],
        outputs=[value("logits", shape=("n", CLASSES))],
        weights=[weight],
    )
    second_file = written(tmp_path, twice, "b.onnx")
    text = refused(root, second_file, ImportOptions(shape=Shape(size=8, std=(1.0, 1.0, 1.0))))
    assert text == "m/model.yaml is there already and decides: leave out --size, --std, or edit the file"
    second = run(root, "m", second_file, ImportOptions())
    assert not second.current
    assert not second.new_config
    assert config.read_text().endswith("# mine\n")
    assert Repository(root).current("m") == first.version


def test_weights_and_archives_of_torch(tmp_path: Path) -> None:
    root = tmp_path / "models"
    (root / "weights").mkdir(parents=True)
    (root / "weights" / "net.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(48, 3))\n"
    )
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    file = saved(tmp_path / "w.safetensors", safetensors.torch.save(network.state_dict()))
    labels = saved(tmp_path / "names", b"a\nb\nc")
    options = ImportOptions(labels=labels, shape=Shape(network="net:build", size=4))
    imported = run(root, "weights", file, options)
    assert (imported.pipeline, imported.backend, imported.current) == ("image_classification", "torch", True)
    assert imported.unconfirmed == ("mean", "std")

    program = torch.export.export(network, (torch.zeros(2, 3, 4, 4),), dynamic_shapes=({0: torch.export.Dim("n")},))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    file = saved(tmp_path / "net.pt2", buffer.getvalue())
    assert "say --trust code if you trust whoever made it" in refused(root, file, name="archive")
    options = ImportOptions(labels=labels, shape=Shape(trust="code", mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)))
    imported = run(root, "archive", file, options)
    assert imported.inputs == (OnnxTensor("input", "FP32", (-1, 3, 4, 4)),)
    assert imported.unconfirmed == ()
    assert Repository(root).open("archive").config.trust == "code"


# ------------------------------------------------------------------ what leaves nothing


def test_a_network_that_does_not_serve_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "models"
    root.mkdir()
    nan = model(
        [helper.make_node("Mul", ["x", "n"], ["y"])],
        weights=[numpy_helper.from_array(np.array(np.nan, np.float32), "n")],
    )
    text = refused(root, written(tmp_path, nan))
    assert text == "model m: gives numbers that are not finite for its pipeline's example; nothing was imported"


def test_a_process_that_dies_leaves_nothing_and_a_killed_import_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "models"
    (root / "m").mkdir(parents=True)
    (root / "m" / "net.py").write_text("import os\n\n\ndef build():\n    os._exit(7)\n")
    weights = saved(tmp_path / "w.safetensors", safetensors.torch.save(nn.Linear(2, 2).state_dict()))
    labels = saved(tmp_path / "names", b"a\nb")
    options = ImportOptions(labels=labels, shape=Shape(network="net:build", size=4))
    assert "ended without an answer (exit 7); nothing was imported" in refused(root, weights, options)
    monkeypatch.setattr(import_model, "PROOF_LIMIT_S", 0.01)
    left = root / ".new-dead"
    (left / "m").mkdir(parents=True)
    with pytest.raises(StartupError, match=r"gave no answer within 0\.01 s"):
        run(root, "m", weights, options)
    assert sorted(path.name for path in root.iterdir()) == ["m"]
