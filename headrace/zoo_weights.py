"""From the formats in which others publish weights to safetensors, as data: nothing in them is ever run.

Torch and h5py are imported only while weights are converted. The same input gives the same bytes, hence the same
version.
"""

import importlib
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from shared.errors import ExitCode, StartupError

if TYPE_CHECKING:
    from torch import Tensor


def state_dict_of(raw: bytes) -> "dict[str, Tensor]":
    """The tensors of a file of `torch.save`. Raises when it holds anything but tensors."""
    import torch  # noqa: PLC0415 - only while weights are converted

    return dict(torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True))


def save_tensors(tensors: "Mapping[str, Tensor]", target: Path) -> Path:
    """Names as they are, each tensor laid out anew, no metadata. Returns the file."""
    from safetensors.torch import save_file  # noqa: PLC0415 - imports torch

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target)
    return target


def save_lines(lines: Iterable[str], target: Path) -> Path:
    """Labels, one a line. Returns the file."""
    target.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return target


def save_bytes(content: bytes, target: Path) -> Path:
    """What needs no conversion. Returns the file."""
    target.write_bytes(content)
    return target


def needed(module: str) -> ModuleType:
    """A module that only a conversion needs (h5py, gguf). Raises StartupError that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        text = f"this conversion needs {module}: install it with `pip install 'headrace[zoo]'`"
        raise StartupError(ExitCode.BAD_SETTINGS, text) from None
