"""A request's inputs as items: each checked against the model, none with more rows than a batch may have.

Pure; used by `flow.py` before admission (so that a wrong input costs nothing else) and after the last item is done.
"""

from collections.abc import Sequence
from typing import TypeAlias

from gateway.request import Request
from gateway.served import ServedModel
from shared.errors import HeadraceError, InvalidInput
from shared.pipeline import Kind, RawInput
from shared.results import Result, Tensors
from shared.tensors import Tensor

_A = {"image": "an image", "text": "a text", "tensors": "tensors", "file": "a file", "chat": "a conversation"}


Pieces: TypeAlias = list[RawInput] | HeadraceError
"""The items of one input, or why it has none."""


def pieces_of(model: ServedModel, request: Request) -> list[Pieces]:
    """Per input, the items that it is made of; with `partial_results` a bad input is its error.

    Raises InvalidInput naming the input (or its tensor): the first bad one, or when none is good.
    """
    unreadable, partial = request.unreadable, request.partial_results
    found = [unreadable.get(index) or _or_error(model, raw) for index, raw in enumerate(request.inputs)]
    errors = [index for index, pieces in enumerate(found) if isinstance(pieces, HeadraceError)]
    if errors and (not partial or len(errors) == len(found)):
        first = found[errors[0]]
        if isinstance(first, HeadraceError):
            raise first if len(found) == 1 else at(errors[0], first)
    return [at(index, one) if isinstance(one, HeadraceError) else one for index, one in enumerate(found)]


def rows_of(pieces: Sequence[Pieces]) -> int:
    """All rows of a request."""
    return sum(raw.rows for items in pieces if isinstance(items, list) for raw in items)


def kind_of(request: Request) -> Kind:
    """What the request brings, to find a model for it."""
    return next(
        (raw.kind for index, raw in enumerate(request.inputs) if index not in request.unreadable),
        request.inputs[0].kind,
    )


def _or_error(model: ServedModel, raw: RawInput) -> Pieces:
    try:
        return _pieces(model, raw)
    except HeadraceError as error:
        return error


def _pieces(model: ServedModel, raw: RawInput) -> list[RawInput]:
    if not model.spec.takes(raw.kind):
        raise InvalidInput(f"model {model.name!r} takes {_A[model.spec.kind]}, the input is {_A[raw.kind]}")
    if not model.pipeline.passthrough:
        return [raw]
    tensors = model.pipeline.arrange(raw)
    rows, most = tensors[0].shape[0], model.limits.max_rows
    if rows <= most:
        return [RawInput(kind="tensors", tensors=tensors)]
    parts = zip(*(tensor.cut(most) for tensor in tensors), strict=True)
    return [RawInput(kind="tensors", tensors=part) for part in parts]


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
    if error.text.startswith(f"inputs[{index}]"):
        return error
    return type(error)(f"inputs[{index}]: {error.text}", retry_after_ms=error.retry_after_ms)
