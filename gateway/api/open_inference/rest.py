"""The Open Inference Protocol's REST form: `/v2/…`. Mounted by `gateway/api/http.py`."""

from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response

from gateway.api.http_call import JSON, DirectRoute, HttpCall, HttpEdge, json_response
from gateway.api.http_docs import Endpoint, add
from gateway.api.open_inference import rest_codec, rest_facts
from gateway.api.open_inference.infer import log_id
from gateway.api.open_inference.model import InferRequest
from gateway.api.open_inference.models import Served, can_answer, find
from gateway.api.open_inference.rest_docs import DOCS
from gateway.api.open_inference.rest_generate import Texts
from gateway.api.open_inference.rest_memory import Regions
from gateway.api.open_inference.service import OpenInference
from gateway.request import StageTimes
from shared.errors import HeadraceError, InvalidInput, NotReady, Unsupported

_BINARY = "application/octet-stream"


class Rest:
    """The endpoints. One per server, built at start; event loop only."""

    def __init__(self, edge: HttpEdge, parts: OpenInference) -> None:
        """`parts`: the same as behind the gRPC form."""
        self._edge = edge
        self._parts = parts

    def router(self) -> APIRouter:
        """All routes, each with its description in `rest_docs`."""
        edge, router = self._edge, APIRouter(route_class=DirectRoute)
        regions, texts = Regions(self._parts.infer.memory), Texts(edge, self._parts)
        endpoints: dict[str, Endpoint] = {
            "infer": edge.counted("RestInfer", self.infer),
            "generate": edge.counted("RestGenerate", texts.generate),
            "generate_stream": edge.growing("RestGenerateStream", texts.generate_stream),
            "live": edge.plain(self.live),
            "ready": edge.plain(self.ready),
            "server": edge.plain(self.server),
            "model": edge.plain(self.model),
            "model_ready": edge.plain(self.model_ready),
            "config": edge.plain(self.config),
            "stats": edge.plain(self.stats),
            "index": edge.plain(self.index),
            "load": edge.counted("RestLoad", self.load),
            "unload": edge.counted("RestUnload", self.unload),
            "regions": edge.plain(regions.status),
            "register": edge.plain(regions.register),
            "unregister": edge.plain(regions.unregister),
        }
        for operation in DOCS:
            add(router, operation, endpoints[operation.endpoint])
        return router

    async def infer(self, call: HttpCall) -> Response:
        """`POST /v2/models/{model}[/versions/{version}]/infer`."""
        parts, headers = self._parts, call.request.headers
        name, version = _named(call)
        find(parts.models, name, version)  # before the body is read
        if headers.get("content-type", "").lower().startswith("multipart/"):
            raise InvalidInput("the body is a form, and has to be JSON; POST /v1/classify takes forms")
        body = await call.body.read()
        target = rest_codec.Target(name, version, call.deadline_s, call.arrived_s)
        try:
            request, wish = rest_codec.decode(body, headers.get(rest_codec.HEADER_LENGTH), target)
        except HeadraceError as error:
            parts.infer.refused(name, error, call.arrived_s)
            raise
        call.request_id = log_id(request.id, call.request_id)
        call.times = times = StageTimes()
        response = await call.while_connected(parts.infer.infer(self._with_deadline(request), call.request_id, times))
        encoded = rest_codec.encode(response, wish)
        told = call.headers()
        if encoded.json_bytes is None:
            return Response(encoded.body, media_type=JSON, headers=told)
        told[rest_codec.HEADER_LENGTH] = str(encoded.json_bytes)
        return Response(encoded.body, media_type=_BINARY, headers=told)

    def _with_deadline(self, request: InferRequest) -> InferRequest:
        """HTTP has no deadline of its own: the parameter `timeout` (microseconds) replaces the default."""
        timeout_us = request.parameters.get("timeout")
        if type(timeout_us) is not int or timeout_us <= 0:
            return request
        return request._replace(deadline_s=self._edge.limited(request.arrived_s, timeout_us / 1e6))

    async def live(self, _: HttpCall) -> Response:
        """`GET /v2/health/live`."""
        return json_response({"live": True})

    async def ready(self, _: HttpCall) -> Response:
        """`GET /v2/health/ready`: 200 when every served model can answer, else 503 and why."""
        reason = self._parts.state.not_ready_reason()
        if reason is not None:
            raise NotReady(reason)
        return json_response({"ready": True})

    async def server(self, _: HttpCall) -> Response:
        """`GET /v2`."""
        return json_response(rest_facts.server(self._parts))

    async def model(self, call: HttpCall) -> Response:
        """`GET /v2/models/{model}[/versions/{version}]`."""
        return json_response(rest_facts.model(self._parts, self._found(call)))

    async def model_ready(self, call: HttpCall) -> Response:
        """`GET /v2/models/{model}[/versions/{version}]/ready`: 200, or 503 and why."""
        model = self._found(call)
        if not can_answer(model):
            raise NotReady(f"model {model.name!r} is not ready: {model.state.reason}")
        return json_response({"name": model.name, "ready": True})

    async def config(self, call: HttpCall) -> Response:
        """`GET /v2/models/{model}[/versions/{version}]/config`."""
        return json_response(rest_facts.config(self._found(call)))

    async def stats(self, call: HttpCall) -> Response:
        """`GET /v2/models[/{model}[/versions/{version}]]/stats`."""
        params = call.request.path_params
        chosen = [self._found(call)] if params else list(self._parts.models.models())
        return json_response(rest_facts.counts(self._parts, chosen, params.get("version", "")))

    async def index(self, call: HttpCall) -> Response:
        """`POST /v2/repository/index`."""
        asked = await call.json(_Index)
        return json_response(rest_facts.index(self._parts, only_ready=asked.ready))

    async def load(self, call: HttpCall) -> Response:
        """`POST /v2/repository/models/{model}/load`."""
        if (await call.json(_Load)).parameters:
            raise Unsupported("a model is configured by its folder; load takes no parameters")
        await self._parts.repository.load(_named(call)[0])
        return json_response({})

    async def unload(self, call: HttpCall) -> Response:
        """`POST /v2/repository/models/{model}/unload`."""
        await self._parts.repository.unload(_named(call)[0])
        return json_response({})

    def _found(self, call: HttpCall) -> Served:
        return find(self._parts.models, *_named(call))


class _Index(msgspec.Struct):
    ready: bool = False


class _Load(msgspec.Struct):
    parameters: dict[str, Any] = {}


def _named(call: HttpCall) -> tuple[str, str]:
    """Model and version as the path has them."""
    params = call.request.path_params
    return params["model"], params.get("version", "")
