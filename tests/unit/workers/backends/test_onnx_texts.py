"""Networks of texts in ONNX files: their inputs by the usual names, their batches of mixed lengths."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from shared.errors import StartupError
from shared.settings import BatchingSettings, Settings
from shared.tensors import Array
from tests.support.onnx_parts import model, value
from tests.support.text_parts import write_tokeniser
from tests.support.worker_parts import toy_model
from workers.backends.torch_device import find
from workers.loaded import Key, LoadedVersion
from workers.loading import Loader

YAML = """\
pipeline: text_embedding
backend: onnxruntime
preprocessing:
  max_tokens: 16
  normalize: false
  arguments: [{}]
"""


def network(*names: str) -> onnx.ModelProto:
    """States `[rows, length, inputs]`: each input as it is, in the order of the file."""
    nodes = [helper.make_node("Cast", [name], [f"{name}_f"], to=TensorProto.FLOAT) for name in names]
    nodes += [helper.make_node("Unsqueeze", [f"{name}_f", "axis"], [f"{name}_u"]) for name in names]
    nodes.append(helper.make_node("Concat", [f"{name}_u" for name in names], ["states"], axis=2))
    return model(
        nodes,
        inputs=[value(name, TensorProto.INT64, ("rows", "length")) for name in names],
        outputs=[value("states", TensorProto.FLOAT, ("rows", "length", len(names)))],
        weights=[numpy_helper.from_array(np.array([2], np.int64), "axis")],
    )


def loaded(root: Path, found: onnx.ModelProto, arguments: str) -> LoadedVersion:
    tokeniser = write_tokeniser(root).read_bytes()
    files = {"m.onnx": found.SerializeToString(), "tokenizer.json": tokeniser}
    version = toy_model(root / "models", "texts", YAML.format(arguments), files)
    settings = Settings(repository=root / "models", batching=BatchingSettings(max_rows=4))
    return Loader(settings, find("cpu", 0, 1)).load(Key("texts", version.version, version.revision))


def vectors(ready: LoadedVersion, *rows: Array) -> list[list[float]]:
    """As the network made them: not of length 1."""
    unit, norms = ready.runner.run([[row] for row in rows], len(rows), "fp32").outputs
    return [[round(float(each), 4) for each in row] for row in unit * norms]


SHORT, LONG = np.array([[7, 9]], np.int32), np.array([[1, 2, 3, 4, 5]], np.int32)


@pytest.mark.parametrize(
    ("names", "arguments", "expected"),
    [
        (("input_ids", "attention_mask"), "tokens, mask", [[8, 1], [3, 1]]),
        (("attention_mask", "input_ids"), "tokens, mask", [[1, 8], [1, 3]]),
        (("token_type_ids", "attention_mask", "input_ids"), "tokens, mask, types", [[0, 1, 8], [0, 1, 3]]),
        (("a", "b"), "mask, tokens", [[1, 8], [1, 3]]),  # unknown names: by position
        (("input_ids",), "tokens", [[8], [3]]),
    ],
)
def test_inputs_go_by_their_usual_names_and_padding_counts_for_nothing(
    tmp_path: Path, names: tuple[str, ...], arguments: str, expected: list[list[float]]
) -> None:
    ready = loaded(tmp_path, network(*names), arguments)
    assert vectors(ready, SHORT, LONG) == expected
    assert [vectors(ready, row)[0] for row in (SHORT, LONG)] == expected
    assert [bucket for bucket, _ in ready.buckets] == [(16,)]


def test_a_file_with_more_inputs_than_the_pipeline_makes_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"has 3 inputs \(input_ids, attention_mask, token_type_ids\), .* makes 2"):
        loaded(tmp_path, network("input_ids", "attention_mask", "token_type_ids"), "tokens, mask")
