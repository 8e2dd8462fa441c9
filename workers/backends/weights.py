"""Copies weights from a safetensors file into a network, a few at a time. Worker only.

The file is mapped, and what has been copied is unmapped at once, so that a load needs the memory of one network. The
weights are copied rather than used where the file lies: pages of a file are given up when memory is short, and would be
read from the disk again in the middle of a batch.
"""

from collections.abc import Iterator
from pathlib import Path

import safetensors
from torch import Tensor, nn

from workers.backends.base import LoadFailed

SUFFIX = ".safetensors"
MAPPED_BYTES = 16 * 1024 * 1024
"""Mapped at a time, or one tensor if that is larger."""
_SHOWN_KEYS = 3
"""Names of wrong weights in a message; the rest is a number."""


def fill(network: nn.Module, path: Path, name: str) -> None:
    """Copy all weights; keys and shapes must match exactly. `name` is the model's. Raises LoadFailed."""
    told = f"model {name}: {path.name}"
    try:
        with safetensors.safe_open(path, "pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - no mapping
        own = network.state_dict()
        _compare({key: tuple(tensor.shape) for key, tensor in own.items()}, shapes, name)
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


def _some(keys: list[str]) -> str:
    shown = ", ".join(keys[:_SHOWN_KEYS])
    return shown if len(keys) <= _SHOWN_KEYS else f"{shown} and {len(keys) - _SHOWN_KEYS} more"
