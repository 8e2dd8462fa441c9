"""A request's inputs as items: each checked against the model, none with more rows than a batch may have.

Pure; used by `flow.py` before admission (so that a wrong input costs nothing else) and after the last item is done.
"""

from gateway.served import ServedModel
from shared.errors import HeadraceError, InvalidInput
from shared.pipeline import RawInput
from shared.results import Result, Tensors
from shared.tensors import Tensor

_A = {"image": "an image", "text": "a text", "tensors": "tensors"}


def pieces_of(model: ServedModel, inputs: list[RawInput]) -> list[list[RawInput]]:
    """Per input, the items that it is made of. Raises InvalidInput naming the input (or its tensor)."""
    try:
        return [_pieces(model, raw) for raw in inputs]
    except HeadraceError as error:
        if len(inputs) == 1:
            raise
        index = _first_bad(model, inputs)
        raise at(index, error) from None


def _first_bad(model: ServedModel, inputs: list[RawInput]) -> int:
    for index, raw in enumerate(inputs):
        try:
            _pieces(model, raw)
        except HeadraceError:
            return index
    return 0


def _pieces(model: ServedModel, raw: RawInput) -> list[RawInput]:
    if raw.kind != model.spec.kind:
        raise InvalidInput(f"model {model.name!r} takes {_A[model.spec.kind]}, the input is {_A[raw.kind]}")
    if not model.pipeline.passthrough:
        return [raw]
    tensors = model.pipeline.arrange(raw)
    rows, most = tensors[0].shape[0], model.limits.max_rows
    if rows <= most:
        return [RawInput(kind="tensors", tensors=tensors)]
    return [
        RawInput(kind="tensors", tensors=tuple(tensor.rows(first, min(first + most, rows)) for tensor in tensors))
        for first in range(0, rows, most)
    ]


def joined(results: list[list[Result]]) -> Result:
    """The results of an input's items as the input's one result; tensors are joined along their rows."""
    parts = [result for piece in results for result in piece]
    if len(parts) == 1:
        return parts[0]
    tensors = [part.tensors for part in parts if isinstance(part, Tensors)]
    return Tensors([_along_rows(list(same)) for same in zip(*tensors, strict=True)])


def _along_rows(parts: list[Tensor]) -> Tensor:
    """Row-major bytes one after the other are the joined tensor's bytes."""
    first = parts[0]
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return Tensor(
        first.name, first.datatype, shape, b"".join(part.data for part in parts if isinstance(part.data, bytes))
    )


def at(index: int, error: HeadraceError) -> HeadraceError:
    """The same failure, naming the input."""
    return type(error)(f"inputs[{index}]: {error.text}", retry_after_ms=error.retry_after_ms)
