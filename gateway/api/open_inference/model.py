"""The protocol's request and answer, free of protobuf and JSON: what both codecs (gRPC, REST) meet in.

Tensor bytes are in the protocol's raw form: little endian, row-major, without padding; BYTES elements each have a
4-byte little-endian length before them. Typed contents and JSON lists are brought into this form by their codec.
"""

from typing import NamedTuple, TypeAlias

Parameter: TypeAlias = bool | int | str | float
Parameters: TypeAlias = dict[str, Parameter]


class InferInput(NamedTuple):
    """One input tensor as sent."""

    name: str
    datatype: str
    """The protocol's name, e.g. `FP32`; not yet known to be a valid one."""
    shape: tuple[int, ...]
    """As sent: not yet known to be sensible."""
    data: bytes | memoryview
    """Raw form; may be a view into the received message."""
    parameters: Parameters


class InferRequestedOutput(NamedTuple):
    """One output that the caller asks for."""

    name: str
    parameters: Parameters


class InferRequest(NamedTuple):
    """ModelInferRequest, or the body of `POST /v2/models/…/infer`."""

    model: str
    version: str
    id: str
    parameters: Parameters
    inputs: list[InferInput]
    outputs: list[InferRequestedOutput]
    """Empty: all outputs, in the order of the metadata."""
    deadline_s: float
    """Absolute, monotonic; of the transport (gRPC deadline) or the default. `parameters["timeout"]` may shorten it."""
    arrived_s: float


class InferOutput(NamedTuple):
    """One output tensor."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview
    """Raw form."""
    parameters: Parameters


class InferResponse(NamedTuple):
    """ModelInferResponse."""

    model: str
    version: str
    """Never empty."""
    id: str
    """The caller's, byte for byte; empty stays empty."""
    outputs: list[InferOutput]
    parameters: Parameters = {}  # noqa: RUF012 - a NamedTuple's default, never changed
    final: bool = True
    """False: another answer to the same request follows."""
