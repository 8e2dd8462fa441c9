"""`/v2/models/…/generate` and `generate_stream`: Triton's extension for text, JSON without tensors."""

import re
from typing import Any

import msgspec
from fastapi.responses import Response

from gateway.api.http_call import HttpCall, HttpEdge, json_response
from gateway.api.http_events import Events
from gateway.api.open_inference import datatypes
from gateway.api.open_inference.infer import log_id
from gateway.api.open_inference.model import InferInput, InferRequest, InferResponse, Parameter
from gateway.api.open_inference.models import TEXT_INPUT, TEXT_OUTPUT, Served, find
from gateway.api.open_inference.parameters import check_known
from gateway.api.open_inference.service import OpenInference
from gateway.api.open_inference.texts import LOGPROBS
from gateway.api.parse import shown
from gateway.request import StageTimes
from shared.errors import InvalidInput
from shared.tensors import pack_bytes, unpack_bytes

_encode = msgspec.json.Encoder().encode


_UNKNOWN = re.compile(r"unknown field '(.*?)'")
_STREAM = frozenset({"stream"})
"""What clients of other servers send with every request; here the endpoint says it, so it changes nothing."""


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    text_input: str
    id: str = ""
    parameters: dict[str, Parameter | list[Any] | None] = {}


class Texts:
    """The two endpoints."""

    def __init__(self, edge: HttpEdge, parts: OpenInference) -> None:
        self._edge = edge
        self._parts = parts

    async def generate(self, call: HttpCall) -> Response:
        """`POST /v2/models/{model}[/versions/{version}]/generate`: the whole text."""
        request = await self._asked(call)
        times = _times(call)
        answer = await call.while_connected(self._parts.infer.infer(request, call.request_id, times))
        return json_response(_told(answer), call.headers())

    async def generate_stream(self, call: HttpCall, events: Events) -> None:
        """`POST /v2/models/{model}[/versions/{version}]/generate_stream`: its parts as server-sent events."""
        request = await self._asked(call)
        events.headers = call.headers()
        reader = _Reader(events)
        await call.while_connected(self._parts.infer.grow(request, call.request_id, _times(call), reader))

    async def _asked(self, call: HttpCall) -> InferRequest:
        """The request, checked as far as it is not the pipeline's business. Raises HeadraceError."""
        params = call.request.path_params
        model = find(self._parts.models, params["model"], params.get("version", ""))  # before the body is read
        if not model.pipeline.generates:
            raise InvalidInput(f"model {shown(model.name)} generates no text; ask it by infer")
        body = await _body(call)
        check_known(body.parameters, model.pipeline.options_type, _STREAM)
        if not body.text_input:
            raise InvalidInput(f"{TEXT_INPUT} is empty; at least one character is needed")
        call.request_id = log_id(body.id, call.request_id)
        timeout_us = body.parameters.get("timeout")
        if type(timeout_us) is int and timeout_us > 0:
            call.deadline_s = self._edge.limited(call.arrived_s, timeout_us / 1e6)
        return _request(model, params.get("version", ""), body, call)


async def _body(call: HttpCall) -> _Body:
    """Raises InvalidInput, also for an option that is no parameter."""
    try:
        return await call.json(_Body)
    except InvalidInput as error:
        unknown = _UNKNOWN.search(error.text)
        if unknown is None:
            raise
        fields = ", ".join(_Body.__struct_fields__)
        text = f"{shown(unknown[1])} is no field of the request, which has {fields}: options belong in parameters"
        raise InvalidInput(text) from None


def _request(model: Served, version: str, body: _Body, call: HttpCall) -> InferRequest:
    text = InferInput(TEXT_INPUT, datatypes.BYTES, (1, 1), pack_bytes([body.text_input.encode()]), {})
    parameters = {
        name: _encode(value).decode() if isinstance(value, list) else value
        for name, value in body.parameters.items()
        if value is not None
    }
    return InferRequest(model.name, version, body.id, parameters, [text], [], call.deadline_s, call.arrived_s)


def _times(call: HttpCall) -> StageTimes:
    call.times = times = StageTimes()
    return times


def _told(answer: InferResponse) -> dict[str, Any]:
    """One answer as flat JSON."""
    text = next(output for output in answer.outputs if output.name == TEXT_OUTPUT)
    told: dict[str, Any] = {"id": answer.id} if answer.id else {}
    told |= {"model_name": answer.model, "model_version": answer.version}
    told |= {TEXT_OUTPUT: unpack_bytes(text.data, 1)[0].decode(), **answer.parameters}
    if LOGPROBS in told:
        told[LOGPROBS] = msgspec.Raw(told[LOGPROBS].encode())  # here it can be JSON itself
    return told


class _Reader:
    """Each part is an event."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def begins(self) -> None:
        """Nothing is said before the first part: it may yet be refused with a status."""

    async def part(self, answer: InferResponse) -> None:
        """See Reader."""
        await self._events.write(_encode(_told(answer)))
