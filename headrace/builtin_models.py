"""The tiny built-in models: nothing is downloaded, their versions are made on the spot.

They run on numpy or only take time, and are there to try protocols and clients, and to measure the server itself.
"""

import json
import tempfile
from pathlib import Path

from shared.model_config import CONFIG_FILE
from shared.repository import Meta, ModelVersion
from shared.repository_writer import add_version

NAME = "builtin"
"""What `headrace models fetch` calls all of them together."""

_NOTHING: tuple[str, dict[str, float]] = ("builtin.json", {})
CONFIGS = {
    "identity": """\
# Built in: 16 floats in, the same out. `headrace models fetch builtin`
pipeline: tensor
backend: numpy
network: workers.networks.builtin:identity
preprocessing:
  inputs: [{name: INPUT0, datatype: FP32, shape: [16]}]
  outputs: [{name: OUTPUT0, datatype: FP32, shape: [16]}]
""",
    "identity_bytes": """\
# Built in: one string in, the same out. `headrace models fetch builtin`
pipeline: tensor
backend: numpy
network: workers.networks.builtin:identity
preprocessing:
  inputs: [{name: INPUT0, datatype: BYTES, shape: [1]}]
  outputs: [{name: OUTPUT0, datatype: BYTES, shape: [1]}]
""",
    "add_sub": """\
# Built in: two times 16 integers in, their sum and difference out. `headrace models fetch builtin`
pipeline: tensor
backend: numpy
network: workers.networks.builtin:add_sub
preprocessing:
  inputs:
    - {name: INPUT0, datatype: INT32, shape: [16]}
    - {name: INPUT1, datatype: INT32, shape: [16]}
  outputs:
    - {name: OUTPUT0, datatype: INT32, shape: [16]}
    - {name: OUTPUT1, datatype: INT32, shape: [16]}
""",
    "simulated_slow": """\
# Built in: a device that takes 100 ms a batch. `headrace models fetch builtin`
pipeline: tensor
backend: simulated
preprocessing:
  inputs: [{name: INPUT0, datatype: FP32, shape: [16]}]
  outputs: [{name: OUTPUT0, datatype: FP32, shape: [16]}]
""",
}
"""model.yaml of each, for a repository that has none."""

_FILES = {"simulated_slow": ("simulated.json", {"a_ms": 100.0, "b_ms": 0.0})}


def fetch(repository: Path) -> list[ModelVersion]:
    """Put the built-in models into the repository and make them current; the same content is stored once.

    Raises RepositoryError when the repository can't be written.
    """
    return [_add(repository, name) for name in CONFIGS]


def _add(repository: Path, name: str) -> ModelVersion:
    folder = repository / name
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / CONFIG_FILE).exists():
        (folder / CONFIG_FILE).write_text(CONFIGS[name])
    file, content = _FILES.get(name, _NOTHING)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / file
        path.write_text(json.dumps(content))
        meta = Meta(source="built in", licence="as Headrace itself")
        return add_version(repository, name, {file: path}, meta, make_current=True, by="headrace models fetch")
