"""protobuf ⇄ `model`: what only the gRPC form can get wrong (raw entries, typed contents) is refused here."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from gateway.api.elements import Allowance
from gateway.api.open_inference import datatypes, grpc_wire
from gateway.api.open_inference.grpc_wire import Received
from gateway.api.open_inference.model import (
    InferInput,
    InferRequest,
    InferRequestedOutput,
    InferResponse,
    Parameter,
    Parameters,
)
from gateway.api.open_inference.shared_memory import REGION
from gateway.api.parse import shown
from protos.inference import grpc_service_pb2 as pb
from shared.errors import InvalidInput

_Input: TypeAlias = pb.ModelInferRequest.InferInputTensor

MAX_TENSORS = 256
"""Inputs or requested outputs of a request; no model may declare more than 64 of each."""
MAX_PARAMETERS = 256

_FIELDS: dict[str, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""Where typed contents of each datatype lie."""


def request(received: Received, arrived_s: float, deadline_s: float) -> InferRequest:
    """The request in the codecs' common form. Raises InvalidInput naming the tensor or parameter."""
    message, raw = received
    _check_count("inputs", len(message.inputs))
    _check_count("requested outputs", len(message.outputs))
    return InferRequest(
        model=message.model_name,
        version=message.model_version,
        id=message.id,
        parameters=_parameters("the request", "", message.parameters),
        inputs=_inputs(message.inputs, raw),
        outputs=[
            InferRequestedOutput(one.name, _parameters("output", one.name, one.parameters)) for one in message.outputs
        ],
        deadline_s=deadline_s,
        arrived_s=arrived_s,
    )


def response(answer: InferResponse) -> bytes:
    """The serialised ModelInferResponse."""
    return grpc_wire.serialize(_header(answer), [output.data for output in answer.outputs])


def stream_response(answer: InferResponse) -> bytes:
    """The serialised ModelStreamInferResponse; says whether it is the request's last answer."""
    header = _header(answer)
    header.parameters["triton_final_response"].bool_param = answer.final
    return grpc_wire.serialize_stream(header, [output.data for output in answer.outputs])


def stream_error(request_id: str, text: str) -> bytes:
    """A failed request of a stream. `text` must not be empty: that is what says that it failed."""
    return pb.ModelStreamInferResponse(
        error_message=text, infer_response=pb.ModelInferResponse(id=request_id)
    ).SerializeToString()


def _header(answer: InferResponse) -> pb.ModelInferResponse:
    header = pb.ModelInferResponse(model_name=answer.model, model_version=answer.version, id=answer.id)
    add = header.outputs.add
    for output in answer.outputs:
        add(name=output.name, datatype=output.datatype, shape=output.shape)
    for name, value in answer.parameters.items():
        if isinstance(value, int):
            header.parameters[name].int64_param = value
        else:
            header.parameters[name].string_param = str(value)
    return header


def _check_count(what: str, count: int) -> None:
    if count > MAX_TENSORS:
        raise InvalidInput(f"the request has {count} {what}; at most {MAX_TENSORS} are allowed")


def _inputs(given: Sequence[_Input], raw: list[memoryview]) -> list[InferInput]:
    if len(given) == len(raw) and not any(one.parameters or one.HasField("contents") for one in given):
        pairs = zip(given, raw, strict=True)  # as nearly all requests are
        return [InferInput(one.name, one.datatype, tuple(one.shape), data, {}) for one, data in pairs]
    found = [
        InferInput(one.name, one.datatype, tuple(one.shape), b"", _parameters("input", one.name, one.parameters))
        for one in given
    ]
    in_message = [number for number, one in enumerate(found) if REGION not in one.parameters]
    if raw and len(raw) != len(in_message):
        raise InvalidInput(
            f"the request has {len(raw)} raw_input_contents for {len(in_message)} inputs that are not in shared "
            "memory; one for each is needed, in their order"
        )
    allowance = Allowance()
    for number, one in enumerate(given):
        if one.HasField("contents") and (raw or REGION in found[number].parameters):
            other = "raw_input_contents" if raw else "shared memory"
            raise InvalidInput(f"input {shown(one.name)} has contents although the request uses {other}")
        if not raw and REGION not in found[number].parameters:
            found[number] = found[number]._replace(data=_typed(one, allowance))
    if raw:
        for number, data in zip(in_message, raw, strict=True):
            found[number] = found[number]._replace(data=data)
    return found


def _typed(given: _Input, allowance: Allowance) -> bytes:
    """Typed contents in raw form."""
    where = f"input {shown(given.name)}"
    if not given.HasField("contents"):
        raise InvalidInput(f"{where} has no data: neither raw_input_contents nor contents nor shared memory")
    datatypes.check_datatype(where, given.datatype)
    field = _FIELDS.get(given.datatype)
    if field is None:
        raise InvalidInput(f"{where} is {given.datatype}, which has no typed contents: use raw_input_contents")
    used = [descriptor.name for descriptor, _ in given.contents.ListFields()]
    if used not in ([field], []):
        wrong = next(name for name in used if name != field)
        raise InvalidInput(f"{where} has values in {wrong}; the values of {given.datatype} belong in {field}")
    values = getattr(given.contents, field)
    if given.datatype == datatypes.BYTES:
        allowance.take(where, len(values))
    return datatypes.pack(where, given.datatype, values)


def _parameters(what: str, name: str, given: Mapping[str, pb.InferParameter]) -> Parameters:
    if not given:
        return {}
    where = f"{what} {shown(name)}" if name else what
    if len(given) > MAX_PARAMETERS:
        raise InvalidInput(f"{where} has {len(given)} parameters; at most {MAX_PARAMETERS} are allowed")
    return {key: _value(where, key, value) for key, value in given.items()}


def _value(where: str, name: str, parameter: pb.InferParameter) -> Parameter:
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        raise InvalidInput(f"{where}: parameter {shown(name)} has no value")
    value: Parameter = getattr(parameter, choice)
    return value
