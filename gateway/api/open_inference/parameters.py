"""Parameters of a request: the protocol's reserved ones, the pipeline's options by name; others are ignored."""

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec

from gateway.api.open_inference.model import InferRequest, Parameter, Parameters
from gateway.api.parse import check_routing_key, may_reuse, shown
from gateway.request import DEFAULT_PRIORITY, SHADOW_PRIORITY
from shared.errors import InvalidInput
from shared.pipeline import Options

_EMPTY_FINAL = "triton_enable_empty_final_response"
"""perf_analyzer sends it with every stream request; our last answer always says that it is, so it changes nothing."""

_RESERVED: dict[str, tuple[tuple[type, ...], str]] = {
    "timeout": ((int,), "a whole number of microseconds, 0 or more"),
    "priority": ((int,), "a whole number, 0 or more"),
    "routing_key": ((str,), "a text"),
    "cache": ((str,), "the text bypass"),
    "sequence_id": ((int, str), "a whole number, 0 or more, or a text"),
    "sequence_start": ((bool,), "a boolean"),
    "sequence_end": ((bool,), "a boolean"),
    _EMPTY_FINAL: ((bool,), "a boolean"),
}


def check(parameters: Parameters) -> None:
    """Raises InvalidInput for a reserved parameter of the wrong type or range, and for unknown `triton_…` ones."""
    for name, value in parameters.items():
        reserved = _RESERVED.get(name)
        if reserved is None:
            if name.startswith("triton_"):
                raise InvalidInput(f"parameter {shown(name)} is reserved and unknown to this server")
            continue
        types, text = reserved
        if type(value) not in types or (type(value) is int and value < 0):
            raise InvalidInput(f"parameter {shown(name)} is {shown(str(value))}; it takes {text}")


def check_known(names: Iterable[str], options_type: type[Options], also: Collection[str] = ()) -> None:
    """Raises InvalidInput for a parameter that is neither reserved nor an option of the model.

    Where the protocol leaves it to us: its own infer ignores what it does not know.
    """
    known = [*_readers(options_type), *(name for name in _RESERVED if name != _EMPTY_FINAL)]
    for name in names:
        if name not in known and name not in _RESERVED and name not in also:
            raise InvalidInput(f"parameter {shown(name)} is unknown; known: {', '.join(known)}")


def deadline_s(request: InferRequest) -> float:
    """The transport's deadline or the request's own `timeout`, whichever ends first; absolute, monotonic."""
    timeout_us = request.parameters.get("timeout")
    if not timeout_us or not isinstance(timeout_us, int):
        return request.deadline_s
    return min(request.deadline_s, request.arrived_s + timeout_us / 1e6)


def priority(parameters: Parameters) -> int:
    """1 is the most urgent; 0 or none is the default, which lies behind 1..99."""
    value = parameters.get("priority")
    return min(value, SHADOW_PRIORITY - 1) if value and isinstance(value, int) else DEFAULT_PRIORITY


def routing_key(parameters: Parameters) -> str:
    """What keeps a caller at one version while another one has a share. Raises InvalidInput."""
    key = str(parameters.get("routing_key", ""))
    check_routing_key(key)
    return key


def reuse(parameters: Parameters) -> bool:
    """Whether the caches may answer. Raises InvalidInput."""
    return may_reuse(str(parameters.get("cache", "")))


_LISTS = (msgspec.inspect.ListType, msgspec.inspect.VarTupleType, msgspec.inspect.TupleType)
_NUMBERS = (msgspec.inspect.IntType, msgspec.inspect.FloatType)
_TEXTS = (msgspec.inspect.StrType, msgspec.inspect.BytesType)


@functools.lru_cache(maxsize=256)
def _readers(options: type[Options]) -> dict[str, Callable[[Parameter], Any]]:
    """By the options' names: what makes of a parameter what the option takes."""
    return {
        field.encode_name: _reader(msgspec.inspect.type_info(field.type)) for field in msgspec.structs.fields(options)
    }


def _reader(kind: msgspec.inspect.Type) -> Callable[[Parameter], Any]:
    kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    if any(isinstance(one, _LISTS) for one in kinds):
        return _several
    numbers = any(isinstance(one, _NUMBERS) for one in kinds) and not any(isinstance(one, _TEXTS) for one in kinds)
    return _number if numbers else _itself


def options(parameters: Parameters, options_type: type[Options]) -> dict[str, Any]:
    """The parameters that are options of the model's pipeline; it checks their values itself.

    The protocol's parameters are single values: where an option takes several, one of them, or a JSON list of them.
    A number may come as text: tritonclient's gRPC form sends no fractions.
    """
    if not parameters:
        return {}
    known = _readers(options_type)
    return {name: known[name](value) for name, value in parameters.items() if name in known}


def _itself(value: Parameter) -> Parameter:
    return value


def _number(value: Parameter) -> Parameter:
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return value  # a text that is none, too: the pipeline refuses it


def _several(value: Parameter) -> list[Any]:
    if isinstance(value, str) and value.startswith("["):
        try:
            return msgspec.json.decode(value, type=list[Any])
        except msgspec.DecodeError:
            pass  # a text that begins so
    return [value]


def whole_number(where: str, parameters: Parameters, name: str, default: int | None) -> int:
    """A non-negative integer of a tensor's parameters. Raises InvalidInput; without a default it is required."""
    value = parameters.get(name, default)
    if type(value) is not int or value < 0:
        given = "is missing" if value is None else f"is {shown(str(value))}"
        raise InvalidInput(f"{where}: parameter {name} {given}; it takes a whole number, 0 or more")
    return value
