"""Generate: one prompt, and its text while it grows ⇄ `gateway.request`."""

from typing import Protocol

import grpc

from gateway.api import parse, render
from gateway.api.interceptors import Call, Edge
from gateway.api.native_stream import Drain
from gateway.request import GENERATION, Answer, Part, Request, StageTimes, Write
from protos.headrace.v1 import inference_pb2 as pb
from shared.errors import Cancelled, Draining, InvalidInput
from shared.pipeline import RawInput


class Answers(Protocol):
    """What stands behind the edge; `gateway/flow.py` implements it."""

    async def answer(self, request: Request) -> Answer:
        """Answer one request. Raises HeadraceError; cancellation means that the caller has left."""


class Generate:
    """The method. HTTP/2's flow control holds up who reads slowly: what grows meanwhile comes as one message."""

    def __init__(self, edge: Edge, flow: Answers, drain: Drain) -> None:
        self._edge = edge
        self._flow = flow
        self._drain = drain

    async def __call__(self, message: pb.GenerateRequest, call: Call) -> None:
        """Raises HeadraceError."""
        text = _Growing(call)
        try:
            request = self.request(message, call, text.write)
            with self._drain.waits_for():
                await self._flow.answer(request)
        except grpc.aio.BaseError:  # of a write
            raise Cancelled("the caller has left") from None

    def request(self, message: pb.GenerateRequest, call: Call, write: Write) -> Request:
        """Check every field. Fills the call's `request_id` and `times`, so that a refusal carries them, too."""
        parse.check_request_id(message.request_id)
        call.request_id = request_id = message.request_id or self._edge.make_id()
        call.times = times = StageTimes()
        if self._drain.started:
            raise Draining("the server is stopping and takes no new requests")
        parse.check_model(message.model, message.version)
        parse.check_routing_key(message.routing_key)
        raw = _prompt(message)
        return Request(
            model=message.model,
            version=message.version,
            request_id=request_id,
            inputs=[raw],
            options=parse.options(message),
            deadline_s=call.deadline_s,
            arrived_s=call.arrived_s,
            nbytes=raw.nbytes,
            routing_key=message.routing_key,
            times=times,
            task=GENERATION,
            write=write,
        )


class _Growing:
    """Writes the parts of one text; the first message says whose it is."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._first = True

    async def write(self, part: Part) -> None:
        """One message."""
        message = pb.GenerateResponse(text=part.text, tokens=map(render.token, part.tokens))
        if part.end is not None:
            message.finished.CopyFrom(render.finished(part.end))
        if self._first:
            self._first = False
            message.model, message.version, message.request_id = part.model, part.version, self._call.request_id
        await self._call.context.write(message.SerializeToString())


def _prompt(message: pb.GenerateRequest) -> RawInput:
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidInput("the request has no prompt; set text or chat")
    if kind == "chat":
        return RawInput(kind="chat", data=parse.chat(message.chat, "chat"))
    if not message.text:
        raise InvalidInput("text has 0 bytes; at least 1 is needed")
    return RawInput(kind="text", data=message.text.encode())
