"""`headrace.v1.Admin`: what is served and stored, and every change of it. Never on the inference services' port.

Reads and orders stand here; the larger ones have files of their own: `admin_upload` (AddVersion), `admin_storage`
(RemoveVersion, Verify, CollectGarbage, Diff), `admin_watch` (Watch).
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from gateway.api import admin_parse, admin_render
from gateway.api.admin_disk import Disk
from gateway.api.admin_render import Key, Notes
from gateway.api.admin_storage import Storage
from gateway.api.admin_upload import Uploads
from gateway.api.admin_watch import Watches
from gateway.api.interceptors import Call, Edge, Parse
from gateway.figures import VersionFigures
from gateway.orders import Order, Standing
from gateway.shielded import Shielded
from gateway.state import ModelState, ServerState
from protos.headrace.v1 import admin_pb2 as pb
from shared.errors import UnknownModel
from shared.logs import get_logger
from shared.settings import Settings
from shared.traffic import Traffic

SERVICE = "headrace.v1.Admin"

_Request = TypeVar("_Request")

log = get_logger()


class AdminPort(Protocol):
    """What stands behind the service: `gateway.model_control`, or for several gateways `gateway.everywhere`."""

    def index(self) -> list[ModelState]:
        """Every version that this gateway knows."""

    async def held(self) -> set[Key]:
        """Versions that any gateway of this server holds, whatever traffic.json says."""

    async def load(self, name: str) -> None:
        """Serve what traffic.json and model.yaml say now, and wait for the proof. Raises HeadraceError."""

    async def unload(self, name: str) -> None:
        """Stop serving a model. Raises HeadraceError."""

    async def order(self, name: str, order: Order, by: str) -> Traffic:
        """Change a model's traffic: load what is needed, prove it, write, switch. Raises HeadraceError."""

    def traffic(self, name: str) -> Traffic:
        """As it is in force, history included. Raises UnknownModel."""

    def standing(self, name: str) -> Standing:
        """The same with what is to come, and what is amiss. Raises UnknownModel."""

    async def all_figures(self, name: str) -> Sequence[VersionFigures]:
        """What each version has done since the canary started. Raises UnknownModel."""


class Behind(NamedTuple):
    """All that the service stands in front of."""

    port: AdminPort
    state: ServerState
    memory: Callable[[], Notes] = tuple
    """Each worker's name, and what it last said of its memory."""


class Admin:
    """The service's methods. Event loop only."""

    def __init__(self, settings: Settings, behind: Behind) -> None:
        self._behind = behind
        self._port = behind.port
        self._disk = Disk(settings.repository)
        self._uploads = Uploads(settings.repository, self._disk)
        self._storage = Storage(settings.repository, self._disk, self._port.held)
        self._watches = Watches(self.states, self._traffic, lambda: admin_render.memory(behind.memory()))
        self._orders = Shielded()
        behind.state.subscribe(self._watches.notify)

    def close(self) -> None:
        """End all watches, so that the server need not wait for them."""
        self._watches.close()

    def handlers(self, edge: Edge) -> dict[str, "grpc.RpcMethodHandler[Any, Any]"]:
        """Method name → handler."""
        storage = self._storage

        def one(name: str, parse: Parse[_Request], serve: Callable[[_Request, Call], Awaitable[Message]]) -> Any:  # noqa: ANN401 - a handler of gRPC's
            return edge.unary(name, parse, _answering(edge, serve))

        def stream(name: str, serve: Callable[[Edge, Call], Awaitable[None]]) -> Any:  # noqa: ANN401 - the same
            return edge.stream(name, lambda call: serve(edge, call))

        return {
            "ListModels": one("ListModels", pb.ListModelsRequest.FromString, self.list_models),
            "GetModel": one("GetModel", pb.GetModelRequest.FromString, self.get_model),
            "AddVersion": stream("AddVersion", self.add_version),
            "RemoveVersion": one("RemoveVersion", pb.RemoveVersionRequest.FromString, storage.remove),
            "Verify": stream("Verify", storage.verify),
            "CollectGarbage": one("CollectGarbage", pb.CollectGarbageRequest.FromString, storage.collect),
            "Diff": one("Diff", pb.DiffRequest.FromString, storage.diff),
            "Load": one("Load", pb.LoadRequest.FromString, self.load),
            "Unload": one("Unload", pb.UnloadRequest.FromString, self.unload),
            "SetTraffic": one("SetTraffic", pb.SetTrafficRequest.FromString, self.set_traffic),
            "GetTraffic": one("GetTraffic", pb.GetTrafficRequest.FromString, self.get_traffic),
            "Watch": stream("Watch", self._watches.watch),
        }

    # ------------------------------------------------------------ shown

    def states(self) -> dict[Key, pb.VersionState]:
        """Every version that the gateway knows, by model and version."""
        uses = admin_render.uses(self._behind.memory())
        shares: dict[str, dict[str, float]] = {}
        found = []
        for state in self._port.index():
            if state.name not in shares:
                shares[state.name] = admin_render.shares(self._traffic(state.name))
            share = 0.0 if state.role == "retiring" else shares[state.name].get(state.version, 0.0)
            use = uses.get((state.name, state.version), admin_render.Uses())
            found.append(admin_render.version_state(state, share, use))
        return admin_render.by_key(found)

    def _traffic(self, name: str) -> Traffic:
        """Empty for a model that is not served."""
        try:
            return self._port.traffic(name)
        except UnknownModel:
            return Traffic(current="")

    async def list_models(self, _request: pb.ListModelsRequest, _call: Call) -> pb.ListModelsResponse:
        """All models, whether served or only stored."""
        stored = await self._disk.run(self._storage.stored)
        known = self.states()
        only_stored = [pb.VersionState(model=name, version=version) for name, version in stored - known.keys()]
        versions = admin_render.by_key([*known.values(), *only_stored]).values()
        return pb.ListModelsResponse(versions=versions, memory=admin_render.memory(self._behind.memory()))

    async def get_model(self, request: pb.GetModelRequest, _call: Call) -> pb.GetModelResponse:
        """One model; its traffic is what is in force, or what the repository says of one that is not served."""
        name = admin_parse.model(request.model)
        found = await self._disk.run(self._storage.model, name)
        known = self.states()
        for version in found.versions:
            state = known.get((name, version.state.version))
            if state is not None:
                stored_bytes = version.state.stored_bytes
                version.state.CopyFrom(state)
                version.state.stored_bytes = stored_bytes
        in_force = self._traffic(name)
        if in_force.current:
            found.traffic.CopyFrom(admin_render.traffic(in_force))
        return found

    async def get_traffic(self, request: pb.GetTrafficRequest, _call: Call) -> pb.GetTrafficResponse:
        """Who is answered by which version, and how well."""
        name = admin_parse.model(request.model)
        standing = self._port.standing(name)
        shares, figures = admin_render.shares(standing.traffic), await self._port.all_figures(name)
        return pb.GetTrafficResponse(
            traffic=admin_render.traffic(standing.traffic),
            figures=[admin_render.figures(each, shares.get(each.version, 0.0)) for each in figures],
            coming=admin_render.traffic(standing.coming, last=0) if standing.coming is not None else None,
            refused=standing.refused,
            unwritten=standing.unwritten,
        )

    # ------------------------------------------------------------ ordered

    async def add_version(self, edge: Edge, call: Call) -> None:
        """A stream of bytes becomes a version; one answer at its end."""
        answer = await self._uploads.add(edge, call)
        await call.context.write(answer.SerializeToString())

    async def load(self, request: pb.LoadRequest, call: Call) -> pb.LoadResponse:
        """Serve a model as its files say now."""
        name, by = admin_parse.model(request.model), admin_parse.by(request.user, call.context)
        log.info("load ordered", model=name, by=by)
        await self._orders.carried_out(self._port.load(name))
        return pb.LoadResponse(versions=[state for key, state in self.states().items() if key[0] == name])

    async def unload(self, request: pb.UnloadRequest, call: Call) -> pb.UnloadResponse:
        """Stop serving a model."""
        name, by = admin_parse.model(request.model), admin_parse.by(request.user, call.context)
        log.info("unload ordered", model=name, by=by)
        await self._orders.carried_out(self._port.unload(name))
        return pb.UnloadResponse()

    async def set_traffic(self, request: pb.SetTrafficRequest, call: Call) -> pb.SetTrafficResponse:
        """Change who is answered by which version."""
        name, by = admin_parse.model(request.model), admin_parse.by(request.user, call.context)
        order = admin_parse.order(request)
        traffic = await self._orders.carried_out(self._port.order(name, order, by))
        return pb.SetTrafficResponse(traffic=admin_render.traffic(traffic, last=1), unwritten=self._unwritten(name))

    def _unwritten(self, name: str) -> str:
        try:
            return self._port.standing(name).unwritten
        except UnknownModel:  # unloaded since
            return ""


def _answering(
    edge: Edge, serve: Callable[[_Request, Call], Awaitable[Message]]
) -> Callable[[_Request, Call], Awaitable[bytes]]:
    async def answer(request: _Request, call: Call) -> bytes:
        call.request_id = edge.make_id()
        return (await serve(request, call)).SerializeToString()

    return answer
