"""The rows of a batch's items: read where the gateway put them, written where it wants them. Worker only."""

from collections.abc import Iterable, Sequence

import msgspec

from shared.arena import AttachedArena
from shared.messages import BatchItem
from shared.tensors import DTYPES, Array, SlotRef, Tensor, TensorSpec, as_array, wire_bytes


class Item(msgspec.Struct):
    """An item whose input rows can be read."""

    message: BatchItem
    arrays: list[Array]
    """One per input, `[rows, …]`: views of the arena or of the message."""


def rows_of(items: Iterable[Item]) -> int:
    """All their rows."""
    return sum(item.message.rows for item in items)


def read(item: BatchItem, specs: Sequence[TensorSpec], arena: AttachedArena) -> Item:
    """Views of an item's inputs, checked. Raises ValueError, KeyError or IndexError where they are not as declared."""
    return Item(item, [_view(item, number, spec, arena) for number, spec in enumerate(specs)])


def written(
    item: BatchItem, specs: Sequence[TensorSpec], outputs: Sequence[Array], arena: AttachedArena
) -> list[Tensor]:
    """An item's rows of each output, copied into its slots or inline: the next pass overwrites them.

    Raises ValueError where they are not as declared, or a slot is too small.
    """
    return [
        _tensor(item, number, spec, output, arena)
        for number, (spec, output) in enumerate(zip(specs, outputs, strict=True))
    ]


def _view(item: BatchItem, number: int, spec: TensorSpec, arena: AttachedArena) -> Array:
    tensor = item.tensors[number]
    _check(tensor, spec, item.rows)
    if isinstance(tensor.data, SlotRef) and tensor.datatype != "BYTES":
        return arena.array(tensor.data, tensor.datatype, tensor.shape)
    return as_array(tensor, arena.memory)


def _tensor(item: BatchItem, number: int, spec: TensorSpec, output: Array, arena: AttachedArena) -> Tensor:
    shape = output.shape
    if output.dtype != DTYPES[spec.datatype]:
        raise ValueError(f"output {spec.name} is {output.dtype}, declared {spec.datatype}")
    if not item.slots:
        return Tensor(spec.name, spec.datatype, shape, wire_bytes(output))
    slot = item.slots[number] if number < len(item.slots) else SlotRef(0, 0)
    arena.array(slot, spec.datatype, shape)[...] = output
    return Tensor(spec.name, spec.datatype, shape, slot)


def _check(tensor: Tensor, spec: TensorSpec, rows: int) -> None:
    """Raises ValueError when a tensor is not what the pipeline declares."""
    shape = tensor.shape
    fits = len(shape) == 1 + len(spec.shape) and shape[0] == rows >= 1
    if not fits or any(want not in (-1, have) for want, have in zip(spec.shape, shape[1:], strict=True)):
        raise ValueError(f"input {spec.name} has shape {list(shape)} for {rows} rows, declared {list(spec.shape)}")
    if tensor.datatype != spec.datatype:
        raise ValueError(f"input {spec.name} is {tensor.datatype}, declared {spec.datatype}")
