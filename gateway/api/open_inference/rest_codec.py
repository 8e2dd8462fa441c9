"""HTTP bodies ⇄ `model`: JSON, and JSON followed by raw tensors (the binary tensor extension).

In the binary form the header `Inference-Header-Content-Length` says how many bytes of the body are JSON; the tensors
follow without gaps, in the order of the JSON, each as long as its parameter `binary_data_size` says.
"""

from typing import Any, NamedTuple

import msgspec

from gateway.api.elements import Allowance
from gateway.api.open_inference import datatypes, rest_values
from gateway.api.open_inference.model import (
    InferInput,
    InferRequest,
    InferRequestedOutput,
    InferResponse,
    Parameter,
    Parameters,
)
from gateway.api.open_inference.shared_memory import REGION
from gateway.api.parse import sentence, shown
from shared.errors import InvalidInput

HEADER_LENGTH = "inference-header-content-length"
"""The header, as HTTP/1.1 servers see it: lower case."""

_SIZE = "binary_data_size"
_BINARY = "binary_data"
_BINARY_ALL = "binary_data_output"
_LENGTH_DIGITS = 18
_INT64, _UINT64 = -(2**63), 2**64


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Parameter] = {}
    data: msgspec.Raw = msgspec.Raw()
    """Decoded once the datatype is known; empty when it is not given."""


class _RequestedOutput(msgspec.Struct):
    name: str
    parameters: dict[str, Parameter] = {}


class _Body(msgspec.Struct):
    inputs: list[_Input]
    id: str = ""
    parameters: dict[str, Parameter] = {}
    outputs: list[_RequestedOutput] = []


_decode = msgspec.json.Decoder(_Body).decode
_encode = msgspec.json.Encoder().encode


class Target(NamedTuple):
    """What the request line and the arrival say about a request."""

    model: str
    version: str
    """Empty: the current one."""
    deadline_s: float
    arrived_s: float


class Wish(NamedTuple):
    """Which outputs the caller wants as raw bytes behind the JSON."""

    every: bool
    named: dict[str, bool]
    elsewhere: frozenset[str] = frozenset()
    """Outputs that are written to shared memory, and have no bytes in the answer."""

    def binary(self, name: str) -> bool:
        """Whether this output is to be raw."""
        return self.named.get(name, self.every)


class Encoded(NamedTuple):
    """An answer's body."""

    body: bytes
    json_bytes: int | None
    """The value of `Inference-Header-Content-Length`; None when all of the body is JSON."""


def decode(body: bytes | bytearray, header: str | None, target: Target) -> tuple[InferRequest, Wish]:
    """A request; its tensors are views into `body` where they came as raw bytes. Raises InvalidInput.

    `header` is the value of `Inference-Header-Content-Length`, None when the request has none.
    """
    view = memoryview(body)
    length = len(view) if header is None else _json_length(header, len(view))
    given = _parsed(view[:length])
    return (
        InferRequest(
            model=target.model,
            version=target.version,
            id=given.id,
            parameters=_checked(given.parameters, "parameters"),
            inputs=_inputs(given.inputs, view[length:], framed=header is not None),
            outputs=[
                InferRequestedOutput(one.name, _checked(one.parameters, f"output {shown(one.name)}"))
                for one in given.outputs
            ],
            deadline_s=target.deadline_s,
            arrived_s=target.arrived_s,
        ),
        _wish(given),
    )


def _json_length(header: str, body_bytes: int) -> int:
    if not (header.isascii() and header.isdigit() and len(header) <= _LENGTH_DIGITS):
        raise InvalidInput(f"Inference-Header-Content-Length is {shown(header)}; it has to be a number of bytes")
    length = int(header)
    if length > body_bytes:
        raise InvalidInput(f"Inference-Header-Content-Length is {length}; the body has only {body_bytes} bytes in all")
    return length


def _parsed(text: memoryview) -> _Body:
    if not text:
        raise InvalidInput("the request has no JSON: its body (or what the header length leaves of it) is empty")
    try:
        return _decode(text)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"the request's JSON does not fit: {sentence(error)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the request body is not JSON: {sentence(error)}") from None
    except RecursionError:
        raise InvalidInput("the request's JSON is nested too deeply") from None


def _checked(parameters: Parameters, where: str) -> Parameters:
    """Integers of at most 64 bits, as in the gRPC form. Raises InvalidInput naming the parameter."""
    for name, value in parameters.items():
        if type(value) is int and not _INT64 <= value < _UINT64:
            raise InvalidInput(f"{where}: parameter {shown(name)} is {str(value)[:40]}, which 64 bits can't hold")
    return parameters


def _inputs(given: list[_Input], raw: memoryview, *, framed: bool) -> list[InferInput]:
    inputs: list[InferInput] = []
    at, allowance = 0, Allowance()
    for one in given:
        parameters, shape = _checked(one.parameters, f"input {shown(one.name)}"), tuple(one.shape)
        size = parameters.pop(_SIZE, None)
        if size is not None:
            end = at + _size(one, size, framed=framed)
            if end > len(raw):
                raise InvalidInput(
                    f"input {shown(one.name)} has binary_data_size {size}, and {len(raw) - at} bytes are left of the "
                    f"{len(raw)} bytes behind the JSON"
                )
            data: bytes | memoryview = raw[at:end]
            at = end
        else:
            data = _listed(one, shape, allowance)
        inputs.append(InferInput(one.name, one.datatype, shape, data, parameters))
    if at != len(raw):
        raise InvalidInput(f"{len(raw)} bytes follow the JSON, and the inputs' binary_data_size add up to {at}")
    return inputs


def _size(given: _Input, size: Parameter, *, framed: bool) -> int:
    name = shown(given.name)
    if type(size) is not int or size < 0:
        raise InvalidInput(f"input {name} has binary_data_size {shown(str(size))}; it has to be a number of bytes")
    if given.data:
        raise InvalidInput(f"input {name} has both data and binary_data_size; only one of them may be given")
    if not framed:
        raise InvalidInput(
            f"input {name} has binary_data_size {size}, and the request has no header Inference-Header-Content-Length"
        )
    return size


def _listed(given: _Input, shape: tuple[int, ...], allowance: Allowance) -> bytes:
    if given.data:
        if given.datatype == datatypes.BYTES:
            where = f"input {shown(given.name)}"
            allowance.take(where, datatypes.count(where, shape))
        return rest_values.to_raw(given.data, given.name, given.datatype, shape)
    if REGION in given.parameters:
        return b""  # its bytes lie in shared memory
    raise InvalidInput(f"input {shown(given.name)} has no data: neither data nor binary_data_size is given")


def _wish(given: _Body) -> Wish:
    every = _flag(given.parameters, _BINARY_ALL, default=False)
    named = {one.name: _flag(one.parameters, _BINARY, default=every) for one in given.outputs}
    return Wish(every, named, frozenset(one.name for one in given.outputs if REGION in one.parameters))


def _flag(parameters: Parameters, name: str, *, default: bool) -> bool:
    value = parameters.pop(name, default)
    if not isinstance(value, bool):
        raise InvalidInput(f"parameter {name} is {shown(str(value))}; it has to be true or false")
    return value


def encode(response: InferResponse, wish: Wish) -> Encoded:
    """The answer's body. Raises InvalidInput or NonfiniteOutput for an output that has to be asked for as binary."""
    outputs: list[dict[str, Any]] = []
    raws: list[bytes | memoryview] = []
    for output in response.outputs:
        told: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
        parameters = output.parameters
        if output.name in wish.elsewhere:
            pass
        elif wish.binary(output.name):
            parameters = {**parameters, _SIZE: len(output.data)}
            raws.append(output.data)
        else:
            told["data"] = rest_values.from_raw(output)
        if parameters:
            told["parameters"] = parameters
        outputs.append(told)
    answer: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        answer["id"] = response.id
    if response.parameters:
        answer["parameters"] = response.parameters
    answer["outputs"] = outputs
    text = _encode(answer)
    return Encoded(b"".join((text, *raws)), len(text)) if raws else Encoded(text, None)
