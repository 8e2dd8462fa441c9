"""Copies weights from a safetensors file into a network, a few at a time. Worker only.

The file is mapped, and what has been copied is unmapped at once, so that a load needs the memory of one network. The
weights are copied rather than used where the file lies: pages of a file are given up when memory is short, and would be
read from the disk again in the middle of a batch.
"""

from collections.abc import Iterator
from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn

from workers.backends.base import LoadFailed

SUFFIX = ".safetensors"
MAPPED_BYTES = 16 * 1024 * 1024
"""Mapped at a time, or one tensor if that is larger."""
_SHOWN_KEYS = 3
"""Names of wrong weights in a message; the rest is a number."""


def fill(network: nn.Module, path: Path, name: str) -> None:
    """Copy all weights; keys, shapes and kinds of numbers must match. `name` is the model's. Raises LoadFailed.

    Floating-point numbers of any width become those of the network; whole numbers in their place were quantised or
    saved by mistake, and would be copied without a word.
    """
    told = f"model {name}: {path.name}"
    try:
        with safetensors.safe_open(path, "pt") as file:
            parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - no mapping
            shapes = {key: tuple(part.get_shape()) for key, part in parts.items()}
            dtypes = {key: str(part.get_dtype()) for key, part in parts.items()}
        own = network.state_dict()
        _compare({key: tuple(tensor.shape) for key, tensor in own.items()}, shapes, name)
        _compare_kinds({key: tensor.dtype for key, tensor in own.items()}, dtypes, name)
        for keys in _groups(own):
            with safetensors.safe_open(path, "pt") as file:
                network.load_state_dict({key: file.get_tensor(key) for key in keys}, strict=False)
    except safetensors.SafetensorError as error:
        raise LoadFailed(f"{told} can't be read as safetensors: {str(error)[:200]}") from None
    except OSError as error:
        raise LoadFailed(f"{told} can't be read ({type(error).__name__}, see the log)", str(error)[:200]) from None


def _groups(tensors: dict[str, Tensor]) -> Iterator[list[str]]:
    keys: list[str] = []
    nbytes = 0
    for key, tensor in tensors.items():
        if keys and nbytes + tensor.nbytes > MAPPED_BYTES:
            yield keys
            keys, nbytes = [], 0
        keys.append(key)
        nbytes += tensor.nbytes
    if keys:
        yield keys


def _compare(own: dict[str, tuple[int, ...]], given: dict[str, tuple[int, ...]], name: str) -> None:
    missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing or unknown:
        parts = [f"lack {_some(missing)}" if missing else "", f"hold {_some(unknown)} too much" if unknown else ""]
        raise LoadFailed(f"model {name}: the weights {' and '.join(filter(None, parts))}: not this network's weights")
    wrong = [key for key in sorted(own) if own[key] != given[key]]
    if wrong:
        key = wrong[0]
        raise LoadFailed(
            f"model {name}: weight {key} has shape {list(given[key])}, the network wants "
            f"{list(own[key])} ({len(wrong)} of {len(own)} differ)"
        )


def _compare_kinds(own: dict[str, torch.dtype], given: dict[str, str], name: str) -> None:
    wrong = [key for key in sorted(own) if _is_floating(given[key]) != own[key].is_floating_point]
    if wrong:
        key = wrong[0]
        raise LoadFailed(
            f"model {name}: weight {key} is {given[key]} in the file, the network wants "
            f"{str(own[key]).removeprefix('torch.')} ({len(wrong)} of {len(own)} differ)"
        )


def _is_floating(dtype: str) -> bool:
    """Of the names that safetensors uses: F32, F8_E4M3, BF16, …"""
    return dtype.startswith(("F", "BF"))


def _some(keys: list[str]) -> str:
    shown = ", ".join(keys[:_SHOWN_KEYS])
    return shown if len(keys) <= _SHOWN_KEYS else f"{shown} and {len(keys) - _SHOWN_KEYS} more"
