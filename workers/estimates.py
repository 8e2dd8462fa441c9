"""What a version will need before it has ever been loaded, from its files alone. Read, not yet verified.

- Weights: a network holds each of them once, floating-point ones as 4 bytes whatever the file holds (FP16 layers on
  CUDA are made of these as they run). The header of a safetensors file tells their number, so the sum is exact but for
  what a network makes without having it in the file; a 20th is added for that. A CPU packs the weights of convolutions
  a second time, which no file tells: there a first load may turn out larger.
- Other archives (ONNX, torch.export): their size, with the same addition.
- A network in numpy is the user's own and may keep whatever it likes: its files' size.
- A simulated one needs what it says.

After the first load what was measured counts.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors

from shared.repository import ModelVersion
from workers.backends import simulated

_ADDED = 1.05
_FLOAT_BYTES = 4
_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Of one number on the device; what is not listed is a floating-point format that becomes FP32."""


def of(version: ModelVersion) -> int:
    """Bytes. Raises OSError when a file can't be read."""
    if version.config.backend == "simulated":
        return simulated.expected_bytes(version)
    size: Callable[[Path], int] = _weights if version.config.backend == "torch" else _size
    return int(sum(size(version.files / name) for name in version.meta.files) * _ADDED)


def _size(path: Path) -> int:
    return path.stat().st_size


def _weights(path: Path) -> int:
    if path.suffix != ".safetensors":
        return _size(path)
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return sum(_tensor(file.get_slice(name)) for name in file.keys())  # noqa: SIM118 - no mapping
    except safetensors.SafetensorError:  # the load will say what is wrong with it
        return _size(path)


def _tensor(part: Any) -> int:  # noqa: ANN401 - a class of Rust's, without types
    return int(math.prod(part.get_shape())) * _BYTES.get(part.get_dtype(), _FLOAT_BYTES)
