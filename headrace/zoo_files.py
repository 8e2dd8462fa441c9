"""The zoo's models that look at files of any kind."""

import json
from pathlib import Path

from headrace.zoo_model import Fetched, ZooModel
from headrace.zoo_packages import Package
from headrace.zoo_weights import save_bytes, save_lines

_FOLDER = "magika/models/standard_v3_3"
_NOT_CLASSES = ("unknown", "empty")
"""What magika answers without being a class of its network."""


def _magika(fetched: Fetched, folder: Path) -> dict[str, Path]:
    config = json.loads(fetched.read(f"{_FOLDER}/config.min.json"))
    kinds = json.loads(fetched.read("magika/config/content_types_kb.min.json"))
    classes = config["target_labels_space"]
    rules = {
        "min_bytes": config["min_file_size_for_dl"],
        "threshold": config["medium_confidence_threshold"],
        "thresholds": config["thresholds"],
        "overwrite": config["overwrite_map"],
        "text": sorted(name for name in {*classes, "txt"} if kinds[name]["is_text"]),
    }
    text = json.dumps(rules, indent=1, sort_keys=True) + "\n"
    return {
        "model.onnx": save_bytes(fetched.read(f"{_FOLDER}/model.onnx"), folder / "model.onnx"),
        "labels.txt": save_lines([*classes, *_NOT_CLASSES], folder / "labels.txt"),
        "rules.json": save_bytes(text.encode(), folder / "rules.json"),
    }


MODELS = {
    "magika": ZooModel(
        about="Magika, 214 kinds of files by their bytes",
        task="file_classification",
        package=Package(
            "magika",
            "1.0.3",
            "3e9b49134e8116ee40b431664dcbed9e199413efddcce1a173c734b4e0521529",
            "magika-1.0.3-py3-none-manylinux_2_28_x86_64.whl",
            16_244_594,
        ),
        convert=_magika,
        licence="Apache-2.0",
        metrics={"agrees_with_magika": 1.0},
        data_version="not in the package; 214 kinds of files",
        config="""\
# Magika, what kind of file some bytes are: `headrace models add zoo:magika` (16 MB, Apache-2.0).
pipeline: file_classification
backend: onnxruntime
labels: labels.txt
preprocessing:
  head_bytes: 1024
  tail_bytes: 1024
  block_bytes: 4096
  padding: 256
  rules: rules.json
  classes: 214
""",
    ),
}
"""By name."""
