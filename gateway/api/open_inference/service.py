"""`inference.GRPCInferenceService`: every method of the protocol that works here, one line each in `handlers`."""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import grpc

from gateway.api.interceptors import Call, Edge, Parse
from gateway.api.native_stream import Drain
from gateway.api.open_inference import grpc_codec, grpc_wire, metadata, statistics
from gateway.api.open_inference.grpc_wire import Received
from gateway.api.open_inference.infer import Infer, log_id
from gateway.api.open_inference.model import InferRequest, InferResponse
from gateway.api.open_inference.models import Models, can_answer, find, versions_of
from gateway.api.open_inference.repository import Repository, state_word
from gateway.api.open_inference.shared_memory import RegionStatus
from gateway.api.open_inference.stream import METHOD as STREAM
from gateway.api.open_inference.stream import Growth, InferStream
from gateway.request import StageTimes
from gateway.state import ServerState
from gateway.statistics import Statistics
from protos.inference import grpc_service_pb2 as pb
from shared.errors import Draining, HeadraceError, InvalidInput, UnknownModel, UnknownVersion, Unsupported

SERVICE = "inference.GRPCInferenceService"
_Message = TypeVar("_Message")


class OpenInference(NamedTuple):
    """What stands behind the protocol in both its forms; made by the gateway's composition, once."""

    infer: Infer
    models: Models
    statistics: Statistics
    state: ServerState
    repository: Repository


class OpenInferenceService:
    """The service's methods. Event loop only."""

    def __init__(self, edge: Edge, parts: OpenInference, drain: Drain) -> None:
        self._edge = edge
        self._parts = parts
        self._drain = drain
        self._most_s = edge.settings.max_deadline_ms / 1e3

    def handlers(self) -> dict[str, "grpc.RpcMethodHandler[Any, Any]"]:
        """Method name → handler; an added RPC is one more line."""
        found: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

        def add(method: str, parse: Parse[_Message], serve: Callable[[_Message, Call], Awaitable[bytes]]) -> None:
            found[method] = self._edge.unary(method, parse, serve)

        add("ServerLive", pb.ServerLiveRequest.FromString, self.server_live)
        add("ServerReady", pb.ServerReadyRequest.FromString, self.server_ready)
        add("ModelReady", pb.ModelReadyRequest.FromString, self.model_ready)
        add("ServerMetadata", pb.ServerMetadataRequest.FromString, self.server_metadata)
        add("ModelMetadata", pb.ModelMetadataRequest.FromString, self.model_metadata)
        add("ModelInfer", grpc_wire.parse, self.model_infer)
        found[STREAM] = self._edge.stream(STREAM, self.model_stream_infer)
        add("ModelConfig", pb.ModelConfigRequest.FromString, self.model_config)
        add("ModelStatistics", pb.ModelStatisticsRequest.FromString, self.model_statistics)
        add("RepositoryIndex", pb.RepositoryIndexRequest.FromString, self.index)
        add("RepositoryModelLoad", pb.RepositoryModelLoadRequest.FromString, self.load)
        add("RepositoryModelUnload", pb.RepositoryModelUnloadRequest.FromString, self.unload)
        add("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest.FromString, self.regions)
        add("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest.FromString, self.register)
        add("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest.FromString, self.unregister)
        return found

    # ------------------------------------------------------------ inference

    async def model_infer(self, received: Received, call: Call) -> bytes:
        """One request, one answer."""
        has_deadline = call.context.time_remaining() is not None
        transport_s = call.deadline_s if has_deadline else None
        request, times = self._request(received, call, transport_s)
        return grpc_codec.response(await self._parts.infer.infer(request, call.request_id, times))

    async def model_stream_infer(self, call: Call) -> None:
        """Many requests; see `stream`."""
        await InferStream(self, self._edge, call, self._edge.settings, self._drain).run()

    async def stream_answer(
        self, received: Received, call: Call, transport_s: float | None, growth: Growth
    ) -> bytes | None:
        """One request of a stream. `call` is its own, made by the stream. None: `growth` has taken all of a text."""
        request, times = self._request(received, call, transport_s)
        answer = await self._parts.infer.grow(request, call.request_id, times, _Parts(growth))
        return None if answer is None else grpc_codec.stream_response(answer)

    def _request(self, received: Received, call: Call, transport_s: float | None) -> tuple[InferRequest, StageTimes]:
        """Fills the call's `request_id` and `times`, so that a refusal carries them, too."""
        message = received.message
        call.request_id = log_id(message.id, self._edge.make_id())
        call.times = times = StageTimes()
        if self._drain.started:
            raise Draining("the server is stopping and takes no new requests")
        try:
            request = grpc_codec.request(received, call.arrived_s, 0.0)
        except HeadraceError as error:
            self._parts.infer.refused(message.model_name, error, call.arrived_s)
            raise
        call.limit_s = self._limit_s(request, transport_s)
        return request._replace(deadline_s=call.deadline_s), times

    def _limit_s(self, request: InferRequest, transport_s: float | None) -> float:
        """Seconds: until the transport's deadline; without one the request's own `timeout`, or else the default."""
        if transport_s is not None:
            return min(transport_s - request.arrived_s, self._most_s)
        timeout_us = request.parameters.get("timeout")
        if type(timeout_us) is int and timeout_us > 0:
            return min(timeout_us / 1e6, self._most_s)
        return self._edge.settings.default_deadline_ms / 1e3

    # ------------------------------------------------------------ facts

    async def server_live(self, _: pb.ServerLiveRequest, __: Call) -> bytes:
        """The event loop answers."""
        return pb.ServerLiveResponse(live=True).SerializeToString()

    async def server_ready(self, _: pb.ServerReadyRequest, __: Call) -> bytes:
        """Whether every served model can answer now."""
        ready = self._parts.state.not_ready_reason() is None
        return pb.ServerReadyResponse(ready=ready).SerializeToString()

    async def model_ready(self, asked: pb.ModelReadyRequest, _: Call) -> bytes:
        """Whether this model can; an unknown one can't, and that is no error to a client that waits for it."""
        try:
            ready = can_answer(find(self._parts.models, asked.name, asked.version))
        except (UnknownModel, UnknownVersion):
            ready = False
        return pb.ModelReadyResponse(ready=ready and not self._drain.started).SerializeToString()

    async def server_metadata(self, _: pb.ServerMetadataRequest, __: Call) -> bytes:
        """Who answers, and what works."""
        extensions = metadata.extensions(
            shared_memory=self._parts.infer.memory.is_on, repository=self._parts.repository.is_open
        )
        return pb.ServerMetadataResponse(
            name=metadata.SERVER_NAME, version=metadata.server_version(), extensions=extensions
        ).SerializeToString()

    async def model_metadata(self, asked: pb.ModelMetadataRequest, _: Call) -> bytes:
        """Inputs and outputs. Raises UnknownModel, UnknownVersion."""
        model = find(self._parts.models, asked.name, asked.version)
        versions = [each.version for each in versions_of(self._parts.models, model.name)]
        return metadata.model_metadata(model, versions).SerializeToString()

    async def model_config(self, asked: pb.ModelConfigRequest, _: Call) -> bytes:
        """Batching. Raises UnknownModel, UnknownVersion."""
        config = metadata.model_config(find(self._parts.models, asked.name, asked.version))
        return pb.ModelConfigResponse(config=config).SerializeToString()

    async def model_statistics(self, asked: pb.ModelStatisticsRequest, _: Call) -> bytes:
        """Of one model, or of all. Raises InvalidInput for an unknown one, as clients expect it of this method."""
        models = self._parts.models
        try:
            chosen = [find(models, asked.name, asked.version)] if asked.name else list(models.models())
        except (UnknownModel, UnknownVersion) as error:
            raise InvalidInput(error.text) from None
        counted = self._parts.statistics
        version = asked.version if asked.name else ""
        counts = [statistics.message(model, counted.of(model.name, model.version), version) for model in chosen]
        return pb.ModelStatisticsResponse(model_stats=counts).SerializeToString()

    # ------------------------------------------------------------ repository

    async def index(self, asked: pb.RepositoryIndexRequest, _: Call) -> bytes:
        """Every model and its state."""
        if asked.repository_name:
            raise Unsupported("there is one repository, which has no name: leave repository_name empty")
        answer = pb.RepositoryIndexResponse()
        for model in self._parts.repository.index(only_ready=asked.ready):
            state = state_word(model.phase)
            answer.models.add(name=model.name, version=model.version, state=state, reason=model.reason)
        return answer.SerializeToString()

    async def load(self, asked: pb.RepositoryModelLoadRequest, _: Call) -> bytes:
        """Raises Unsupported unless the settings allow it, UnknownModel."""
        name = asked.model_name or asked.repository_name
        if asked.parameters:
            raise Unsupported("a model is configured by its folder; load takes no parameters")
        await self._parts.repository.load(name)
        return pb.RepositoryModelLoadResponse(model_name=name, isLoaded=True).SerializeToString()

    async def unload(self, asked: pb.RepositoryModelUnloadRequest, _: Call) -> bytes:
        """Raises as `load`."""
        name = asked.model_name or asked.repository_name
        await self._parts.repository.unload(name)
        return pb.RepositoryModelUnloadResponse(model_name=name, isUnloaded=True).SerializeToString()

    # ------------------------------------------------------------ shared memory

    async def regions(self, asked: pb.SystemSharedMemoryStatusRequest, _: Call) -> bytes:
        """Registered regions."""
        answer = pb.SystemSharedMemoryStatusResponse()
        for name, key, offset, nbytes in self._parts.infer.memory.status(asked.name):
            region = answer.regions[name]
            region.name, region.key, region.offset, region.byte_size = name, key, offset, nbytes
        return answer.SerializeToString()

    async def register(self, asked: pb.SystemSharedMemoryRegisterRequest, _: Call) -> bytes:
        """Raises as `SharedMemory.register`."""
        self._parts.infer.memory.register(RegionStatus(asked.name, asked.key, asked.offset, asked.byte_size))
        return pb.SystemSharedMemoryRegisterResponse().SerializeToString()

    async def unregister(self, asked: pb.SystemSharedMemoryUnregisterRequest, _: Call) -> bytes:
        """Requests that use the region now still finish."""
        self._parts.infer.memory.unregister(asked.name)
        return pb.SystemSharedMemoryUnregisterResponse().SerializeToString()


class _Parts:
    """A text's answers, as they are on the wire."""

    def __init__(self, growth: Growth) -> None:
        self._growth = growth

    def begins(self) -> None:
        """See Reader."""
        self._growth.begins()

    async def part(self, answer: InferResponse) -> None:
        """See Reader."""
        await self._growth.write(grpc_codec.stream_response(answer))
