"""How many bytes a network itself holds on its device. Worker only.

Counted by looking at it, never by how a process or a device fills up meanwhile: batches of other versions run during a
load, and what they take and give back would be counted with it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def of(network: nn.Module, device: torch.device) -> int:
    """Bytes of all tensors on the device that the network's modules hold, memory that several share counted once.

    In it: parameters, buffers, tensors in plain attributes, and in lists, tuples and dicts there; so also the constants
    of an exported graph, and the weights that `cpu_graph` has packed in the calls so far, a copy per form. Not in it:
    what an allocator rounds up, and what a pass needs while it runs.
    """
    sizes = {_place(tensor): _nbytes(tensor) for tensor in _tensors(network) if tensor.device.type == device.type}
    return sum(sizes.values())


def _tensors(network: nn.Module) -> Iterator[Tensor]:
    yield from network.parameters()  # of compiled modules, whose attributes are not Python's
    yield from network.buffers()
    for module in network.modules():
        for value in list(vars(module).values()):
            yield from (each for each in _parts(value) if isinstance(each, Tensor))


def _parts(value: Any) -> Iterator[Any]:  # noqa: ANN401 - whatever a user's module keeps
    if isinstance(value, dict):
        yield from list(value.values())
    elif isinstance(value, list | tuple):
        yield from value
    else:
        yield value


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided


def _place(tensor: Tensor) -> tuple[str, int]:
    """What tensors of the same memory have in common."""
    return ("memory", tensor.untyped_storage().data_ptr()) if _is_plain(tensor) else ("tensor", id(tensor))


def _nbytes(tensor: Tensor) -> int:
    """All of the memory behind it; oneDNN pads channels, which a tensor's own `nbytes` leaves out."""
    if _is_plain(tensor):
        return tensor.untyped_storage().nbytes()
    if tensor.is_mkldnn and hasattr(torch.ops.mkldnn, "_nbytes"):
        return int(torch.ops.mkldnn._nbytes(tensor))  # noqa: SLF001 - its only way to say
    return tensor.nbytes
