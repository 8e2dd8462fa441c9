"""A request's input tensors, checked against what the model declares → the flow's inputs. No payload is copied."""

import collections
import math
from collections.abc import Callable

from gateway.api import elements
from gateway.api.elements import Allowance
from gateway.api.open_inference import datatypes
from gateway.api.open_inference.model import InferInput, InferRequest
from gateway.api.open_inference.models import ModelView, Served
from gateway.api.parse import shown
from shared.errors import InvalidInput, TooLarge
from shared.pipeline import RawInput
from shared.settings import AdmissionSettings
from shared.tensors import RawTensor, TensorSpec

Data = Callable[[str, InferInput, int | None], bytes | memoryview]
"""Where a tensor's bytes come from: (how a sentence names it, the input, bytes it must have or None) → its bytes."""


def raw_inputs(
    model: Served, view: ModelView, request: InferRequest, limits: AdmissionSettings, data_of: Data
) -> list[RawInput]:
    """All declared inputs, once each, with one row count. Raises InvalidInput, or TooLarge naming the setting."""
    ordered = _ordered(model, view, request.inputs)
    rows: int | None = None
    allowance = Allowance()
    tensors: list[RawTensor] = []
    for spec, given in zip(view.inputs, ordered, strict=True):
        where = f"input {shown(given.name)}"
        _check_declared(where, model, spec, given)
        rows = _check_rows(where, rows, given, limits)
        fixed = None
        if given.datatype == datatypes.BYTES:
            allowance.take(where, math.prod(given.shape))
        else:
            fixed = datatypes.nbytes(given.datatype, given.shape)
        data = data_of(where, given, fixed)
        datatypes.check_data(where, given.datatype, given.shape, data)
        tensors.append(RawTensor(given.name, given.datatype, given.shape, data))
    if model.spec.kind == "tensors":
        return [RawInput(kind="tensors", tensors=tuple(tensors))]
    return _encoded(model, tensors[0], limits)


def _ordered(model: Served, view: ModelView, given: list[InferInput]) -> list[InferInput]:
    """In the order of the declaration."""
    by_name = {one.name: one for one in given}
    wanted = [spec.name for spec in view.inputs]
    if len(given) == len(wanted) and all(name in by_name for name in wanted):
        return [by_name[name] for name in wanted]
    if len(by_name) != len(given):
        twice = collections.Counter(one.name for one in given).most_common(1)[0][0]
        raise InvalidInput(f"input {shown(twice)} is given twice; each input is sent once")
    got = ", ".join(shown(one.name) for one in given[:5]) + (", …" if len(given) > 5 else "")
    raise InvalidInput(
        f"model {shown(model.name)} takes {len(wanted)} input(s) ({', '.join(wanted)[:300]}); "
        f"the request has {len(given)}" + (f" ({got})" if given else "")
    )


def _check_declared(where: str, model: Served, spec: TensorSpec, given: InferInput) -> None:
    """Datatype, rank and every dimension, before anything is multiplied."""
    if given.datatype != spec.datatype:
        datatypes.check_datatype(where, given.datatype)
        raise InvalidInput(
            f"{where} has datatype {shown(given.datatype)}; model {shown(model.name)} takes {spec.datatype}"
        )
    wanted = (-1, *spec.shape)
    shape = given.shape
    if model.spec.kind != "tensors" and len(shape) == 1:
        shape = (*shape, 1)  # one encoded image or text a row: [n] says as much as [n, 1]
    fits = len(shape) == len(wanted) and all(
        dim >= 1 and want in {-1, dim} for dim, want in zip(shape, wanted, strict=True)
    )
    if not fits:
        raise InvalidInput(
            f"{where} has shape {datatypes.shape_text(given.shape)}; model {shown(model.name)} takes "
            f"{datatypes.shape_text(wanted)}, where -1 is any size from 1 and the first dimension counts rows"
        )


def _check_rows(where: str, rows: int | None, given: InferInput, limits: AdmissionSettings) -> int:
    own = given.shape[0]
    if own > limits.max_rows:
        raise InvalidInput(f"{where} has {own} rows; a request has at most {limits.max_rows} (admission.max_rows)")
    if rows is not None and own != rows:
        raise InvalidInput(f"{where} has {own} rows, but the inputs before it have {rows}; all inputs have the same")
    return own


def _encoded(model: Served, tensor: RawTensor, limits: AdmissionSettings) -> list[RawInput]:
    """One encoded image or text a row."""
    where = f"input {shown(tensor.name)}"
    rows, most = tensor.shape[0], limits.max_inputs_per_request
    if rows > most:
        raise TooLarge(f"{where} has {rows} rows; the limit is {most} (admission.max_inputs_per_request)")
    encoded = elements.views(where, tensor.data, rows)
    for number, element in enumerate(encoded):
        if not len(element):
            raise InvalidInput(f"{where}: element {number} has 0 bytes; at least 1 is needed")
        if model.spec.kind == "text":
            _check_text(where, number, element)
    return [RawInput(kind=model.spec.kind, data=element) for element in encoded]


def _check_text(where: str, number: int, element: memoryview) -> None:
    try:
        str(element, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{where}: element {number} is not UTF-8 at byte {error.start}") from None
