"""One detector in both schemes: raw maps for the pipeline to read, and exported with its boxes worked out."""

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from headrace import zoo
from headrace.testing import answer
from shared.pipeline import RawInput
from shared.repository import Meta, Repository
from shared.repository_writer import add_version
from shared.results import Detections
from tests.support.stack import ROOT
from workers.networks.yolov3_tiny import yolov3_tiny

SCALES = ((32, ((81, 82), (135, 169), (344, 319))), (16, ((10, 14), (23, 27), (37, 58))))
YAML = """\
pipeline: object_detection
backend: onnxruntime
labels: labels.txt
preprocessing: {{size: 416, head: {{scheme: yolo_rows, objectness: {objectness}, boxes_first: {boxes_first}}}}}
"""


class Exported(nn.Module):
    """The network with its boxes worked out inside, as exporters of YOLO write them."""

    def __init__(self, network: nn.Module, objectness: bool, boxes_first: bool) -> None:
        super().__init__()
        self.network = network
        self.objectness = objectness
        self.boxes_first = boxes_first
        for stride, anchors in SCALES:
            cells = 416 // stride
            y, x = torch.meshgrid(torch.arange(cells), torch.arange(cells), indexing="ij")
            self.register_buffer(f"grid{stride}", torch.stack((x, y)).float()[None, None])
            self.register_buffer(f"anchors{stride}", torch.tensor(anchors).float()[None, :, :, None, None])

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for (stride, _), output in zip(SCALES, self.network(x), strict=True):
            numbers = output.reshape(-1, 3, 85, 416 // stride, 416 // stride)
            centre = (numbers[:, :, :2].sigmoid() + getattr(self, f"grid{stride}")) * stride
            sides = numbers[:, :, 2:4].exp() * getattr(self, f"anchors{stride}")
            there, classes = numbers[:, :, 4:5].sigmoid(), numbers[:, :, 5:].sigmoid()
            scores = (there, classes) if self.objectness else (there * classes,)
            parts.append(torch.cat((centre, sides, *scores), 2).transpose(1, 2).flatten(2))
        rows = torch.cat(parts, 2)
        return rows.transpose(1, 2) if self.boxes_first else rows


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("schemes") / "models"
    zoo.fetch("yolov3-tiny", root, cache=zoo.cache_of(ROOT / "models"))
    return root


@pytest.fixture(scope="module")
def bus() -> RawInput:
    return RawInput(kind="image", data=zoo.fetch_pictures(ROOT / "models")[0].read_bytes())


@pytest.mark.parametrize(("objectness", "boxes_first"), [(False, False), (True, True)], ids=["v8", "v5"])
def test_an_export_finds_what_the_raw_maps_say(
    models: Path, bus: RawInput, tmp_path: Path, objectness: bool, boxes_first: bool
) -> None:
    original = Repository(models).open("yolov3-tiny")
    network = yolov3_tiny().eval()
    network.load_state_dict(load_file(original.files / "model.safetensors"))
    name = f"exported-{objectness}".lower()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(
            Exported(network, objectness, boxes_first).eval(),
            (torch.zeros(2, 3, 416, 416),),
            str(tmp_path / "detector.onnx"),
            input_names=["images"],
            output_names=["rows"],
            dynamic_shapes=({0: torch.export.Dim("rows")},),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    (models / name).mkdir()
    (models / name / "model.yaml").write_text(YAML.format(objectness=objectness, boxes_first=boxes_first).lower())
    files = {"detector.onnx": tmp_path / "detector.onnx", "labels.txt": original.files / "labels.txt"}
    add_version(models, name, files, Meta())

    (wanted,), (found,) = (answer(models / each, bus, {"score_threshold": 0.3}) for each in ("yolov3-tiny", name))

    assert isinstance(wanted, Detections)
    assert isinstance(found, Detections)
    assert [one.label.name for one in found.boxes] == ["person", "person", "person", "bus", "person"]
    for mine, theirs in zip(found.boxes, wanted.boxes, strict=True):
        assert mine.label.name == theirs.label.name
        assert mine.label.score == pytest.approx(theirs.label.score, abs=1e-3)
        for side in ("left", "top", "right", "bottom"):
            assert getattr(mine, side) == pytest.approx(getattr(theirs, side), abs=0.1)
