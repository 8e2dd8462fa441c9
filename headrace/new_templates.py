"""The files that `headrace new` writes, by what a request brings. `NAME` stands for the model's name."""

from collections.abc import Mapping
from typing import NamedTuple


class Template(NamedTuple):
    """A model to start from."""

    files: Mapping[str, str]
    """Relative name → content."""
    call: str
    """A command that calls it at the default addresses."""
    http: bool = False
    """Whether by HTTP."""


_TRY = "curl -s http://127.0.0.1:8000/v2/models/NAME/infer -d "

_TEST_HEAD = '''\
"""That NAME answers, by the code that the server runs: `pytest models/NAME`."""

from pathlib import Path

import pytest

from headrace.testing import answer
from shared.errors import InvalidInput
from shared.pipeline import RawInput

FOLDER = Path(__file__).parent
'''

_TEST_CLASSES = """
LABELS = (FOLDER / "labels.txt").read_text().split()


def test_the_scores_of_all_classes_sum_up_to_one() -> None:
    (result,) = answer(FOLDER)
    assert {label.name for label in result.labels} == set(LABELS)
    assert sum(label.score for label in result.labels) == pytest.approx(1, abs=1e-3)
"""

_LABELS = "first\nsecond\nthird\n"

_IMAGE = Template(
    {
        "model.yaml": """\
# What goes in and what comes out. `headrace serve` serves it, and takes over what you change here while it runs.
pipeline: pipeline:Classifier      # pipeline.py in this folder
backend: torch
network: network:build             # network.py in this folder; the weights are versions (headrace models add)
labels: labels.txt                 # one a line, in the order of the network's outputs
preprocessing:
  size: 64                         # height and width of the network's input
  mean: [127, 127, 127]            # in units of 0..255
  std: [128, 128, 128]
  max_top_k: 3
batching: {max_rows: 16, sizes: [1, 4, 16]}
""",
        "labels.txt": _LABELS,
        "pipeline.py": '''\
"""What NAME takes and gives."""

from shared.pipelines.image_classification import ImageClassification


class Classifier(ImageClassification):
    """An image in, the likeliest classes out.

    All of it is inherited. Override what differs: `preprocess` (image to tensor, on the CPU), `normalise` (tensor to
    the network's input, on the device), `head` (its outputs to scores), `postprocess` (scores to an answer).
    """
''',
        "network.py": '''\
"""The network of NAME. Its weights are not here: they are versions."""

from torch import nn

CLASSES = 3


def build() -> nn.Module:
    """[n, 3, size, size] to logits [n, CLASSES]."""
    features = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU())
    return nn.Sequential(features, nn.Linear(16, CLASSES))
''',
        "test_NAME.py": _TEST_HEAD
        + _TEST_CLASSES
        + """

def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(InvalidInput):
        answer(FOLDER, RawInput(kind="image", data=b"no image"))
""",
    },
    "headrace classify photo.jpg --model NAME",
)

_TEXT = Template(
    {
        "model.yaml": """\
# What goes in and what comes out. `headrace serve` serves it, and takes over what you change here while it runs.
pipeline: pipeline:Classifier      # pipeline.py in this folder
backend: torch
network: network:build             # network.py in this folder; the weights are versions (headrace models add)
labels: labels.txt                 # one a line, in the order of the network's outputs
batching: {max_rows: 16, sizes: [1, 4, 16]}
""",
        "labels.txt": _LABELS,
        "pipeline.py": '''\
"""What NAME takes and gives. The server reads this without torch: import it inside `normalise` and `head` only."""

from typing import TYPE_CHECKING, Any

import numpy as np

from shared.errors import InvalidInput
from shared.pipeline import Options, Pipeline, PipelineSpec, Prepared, RawInput
from shared.results import Classification, Label, Result
from shared.tensors import Array, TensorSpec

if TYPE_CHECKING:
    import torch

MAX_BYTES = 256


class Classifier(Pipeline[Options]):
    """A text in, its classes out. The network sees its bytes, with zeros behind: put your tokeniser here."""

    postprocess_is_trivial = True

    @property
    def spec(self) -> PipelineSpec:
        """`text` UINT8 [256] to `scores` FP32 [classes]."""
        text = TensorSpec(name="text", datatype="UINT8", shape=(MAX_BYTES,))
        scores = TensorSpec(name="scores", datatype="FP32", shape=(len(self.labels),))
        return PipelineSpec(kind="text", inputs=(text,), outputs=(scores,))

    def preprocess(self, item: RawInput, options: Options, out: list[Array]) -> Prepared:
        """One text to one row. Raises InvalidInput."""
        data = bytes(item.data)
        if not 1 <= len(data) <= MAX_BYTES:
            raise InvalidInput(f"the text has {len(data)} bytes: must have 1 to {MAX_BYTES}")
        out[0][0] = 0
        out[0][0, : len(data)] = np.frombuffer(data, np.uint8)
        return Prepared(tensors=[out[0]])

    def normalise(self, inputs: "dict[str, torch.Tensor]") -> "tuple[torch.Tensor, ...]":
        """What the network takes."""
        return (inputs["text"].long(),)

    def head(self, outputs: "tuple[torch.Tensor, ...]") -> "tuple[torch.Tensor, ...]":
        """Logits to probabilities."""
        return (outputs[0].float().softmax(dim=1),)

    def postprocess(self, outputs: list[Array], context: dict[str, Any], options: Options) -> list[Result]:
        """All classes, best first."""
        return [
            Classification(
                [Label(index=int(i), name=self.labels[i], score=float(row[i])) for i in np.argsort(-row, kind="stable")]
            )
            for row in outputs[0]
        ]

    def example(self) -> RawInput:
        """For the warm-up, the proof that it answers, and tests."""
        return RawInput(kind="text", data=b"an example")
''',
        "network.py": '''\
"""The network of NAME. Its weights are not here: they are versions."""

from torch import nn

CLASSES = 3


def build() -> nn.Module:
    """Bytes [n, 256] to logits [n, CLASSES]."""
    return nn.Sequential(nn.EmbeddingBag(256, 16), nn.ReLU(), nn.Linear(16, CLASSES))
''',
        "test_NAME.py": _TEST_HEAD
        + _TEST_CLASSES
        + """

def test_a_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidInput, match="must have 1 to 256"):
        answer(FOLDER, RawInput(kind="text", data=b"x" * 257))
""",
    },
    _TRY + """'{"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["hello"]}]}'""",
    http=True,
)

_TENSOR = Template(
    {
        "model.yaml": """\
# What goes in and what comes out. `headrace serve` serves it, and takes over what you change here while it runs.
pipeline: pipeline:Numbers         # pipeline.py in this folder
backend: torch
network: network:build             # network.py in this folder; the weights are versions (headrace models add)
preprocessing:                     # shapes are those of one row
  inputs: [{name: x, datatype: FP32, shape: [4]}]
  outputs: [{name: y, datatype: FP32, shape: [2]}]
batching: {max_rows: 16, sizes: [1, 4, 16]}
""",
        "pipeline.py": '''\
"""What NAME takes and gives."""

from shared.pipelines.tensor import TensorPipeline


class Numbers(TensorPipeline):
    """The tensors that model.yaml declares, checked and passed on; no process but the worker touches them.

    Override what differs: `arrange` (check a request's tensors), `normalise` and `head` (before and after the network,
    on the device).
    """
''',
        "network.py": '''\
"""The network of NAME. Its weights are not here: they are versions."""

from torch import nn


def build() -> nn.Module:
    """[n, 4] to [n, 2]."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
''',
        "test_NAME.py": _TEST_HEAD.replace("import pytest\n", "import numpy as np\nimport pytest\n").replace(
            "from shared.pipeline import RawInput\n",
            "from shared.pipeline import RawInput\nfrom shared.tensors import RawTensor\n",
        )
        + """

def test_every_row_has_its_answer() -> None:
    rows = np.arange(8, dtype="<f4").reshape(2, 4)
    (result,) = answer(FOLDER, RawInput(kind="tensors", tensors=(RawTensor("x", "FP32", (2, 4), rows.tobytes()),)))
    (y,) = result.tensors
    assert (y.name, y.datatype, tuple(y.shape)) == ("y", "FP32", (2, 2))


def test_another_shape_is_refused() -> None:
    with pytest.raises(InvalidInput, match="x has shape"):
        answer(FOLDER, RawInput(kind="tensors", tensors=(RawTensor("x", "FP32", (1, 3), bytes(12)),)))
""",
    },
    _TRY + """'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}'""",
    http=True,
)

_PYTEST = """\
# So that plugins which the test does not need have nothing to say. Delete it for your own project's settings to count.
[pytest]
addopts = -p no:asyncio
"""

TEMPLATES: Mapping[str, Template] = {
    kind: template._replace(files={**template.files, "pytest.ini": _PYTEST})
    for kind, template in {"image": _IMAGE, "text": _TEXT, "tensor": _TENSOR}.items()
}
