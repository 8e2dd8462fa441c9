"""`headrace.v1.Inference`: Predict, PredictStream and Generate ⇄ `gateway.request`."""

from collections.abc import Mapping
from typing import Any, Protocol

import grpc

from gateway.api import native_wire, parse, render
from gateway.api.interceptors import Call, Edge
from gateway.api.native_generate import Generate
from gateway.api.native_stream import Drain, Stream
from gateway.api.native_wire import Received
from gateway.api.parse import NO_IMAGES
from gateway.request import Answer, Request, StageTimes
from protos.headrace.v1 import inference_pb2 as pb
from shared.errors import Draining
from shared.settings import Settings

SERVICE = "headrace.v1.Inference"


class Answers(Protocol):
    """What stands behind the edge; `gateway/flow.py` implements it."""

    async def answer(self, request: Request) -> Answer:
        """Answer one request. Raises HeadraceError; cancellation means that the caller has left."""


class Inference:
    """The service's methods."""

    def __init__(self, edge: Edge, flow: Answers, settings: Settings) -> None:
        self._edge = edge
        self._flow = flow
        self._settings = settings
        self.drain = Drain()
        """Once it is started, new requests are refused and open streams end."""
        self.generate = Generate(edge, flow, self.drain)

    def handlers(self) -> dict[str, "grpc.RpcMethodHandler[Any, Any]"]:
        """Method name → handler; an added RPC is one more line."""
        return {
            "Predict": self._edge.unary("Predict", native_wire.parse, self.predict),
            "PredictStream": self._edge.stream("PredictStream", self.predict_stream),
            "Generate": self._edge.growing("Generate", pb.GenerateRequest.FromString, self.generate),
        }

    async def predict(self, received: Received, call: Call) -> bytes:
        """One request, one answer."""
        request = self.request(received.message, call, call.deadline_s, received.images)
        del received  # the message is not needed while its request waits
        answer = await self._flow.answer(request)
        return render.response(answer, request.request_id).SerializeToString()

    async def predict_stream(self, call: Call) -> None:
        """Many requests; see `native_stream`."""
        await Stream(self, self._edge, call, self._settings.gateway, self.drain).run()

    async def stream_answer(self, message: pb.PredictRequest, call: Call) -> pb.PredictResponse:
        """One request of a stream. `call` is its own, made by the stream."""
        request = self.request(message, call, call.deadline_s)
        return render.response(await self._flow.answer(request), request.request_id)

    def request(
        self, message: pb.PredictRequest, call: Call, deadline_s: float, images: Mapping[int, memoryview] = NO_IMAGES
    ) -> Request:
        """Check every field. Fills the call's `request_id` and `times`, so that a refusal carries them, too.

        `images`: by index, those that are not in the message itself (`native_wire`).
        """
        parse.check_request_id(message.request_id)
        call.request_id = request_id = message.request_id or self._edge.make_id()
        call.times = times = StageTimes()
        if self.drain.started:
            raise Draining("the server is stopping and takes no new requests")
        parse.check_model(message.model, message.version)
        parse.check_task(message.task)
        parse.check_routing_key(message.routing_key)
        given = parse.raw_inputs(message, self._settings.admission, images)
        return Request(
            model=message.model,
            version=message.version,
            request_id=request_id,
            inputs=given.inputs,
            options=parse.options(message),
            deadline_s=deadline_s,
            arrived_s=call.arrived_s,
            nbytes=given.nbytes,
            partial_results=message.partial_results,
            routing_key=message.routing_key,
            reuse=message.cache != pb.CACHE_USE_BYPASS,
            unreadable=given.unreadable,
            task=message.task,
            times=times,
        )
