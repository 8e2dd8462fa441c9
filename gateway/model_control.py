"""Loading and unloading of models by request, while everything else is served. Lives on the event loop."""

import asyncio

from gateway.build import served_model
from gateway.dispatch import Dispatcher
from gateway.name_locks import NameLocks
from gateway.pool_client import PoolClient
from gateway.readiness import Readiness
from gateway.routing import Routing
from gateway.served import ServedModel
from gateway.state import ModelState
from gateway.worker_client import WorkerClient
from shared.errors import HeadraceError, NotReady, StartupError, UnknownModel
from shared.logs import get_logger
from shared.messages import LoadModel, OpenPipeline
from shared.repository import Repository
from shared.settings import Settings

log = get_logger()

LOAD_LIMIT_S = 120.0
"""How long a load request waits for the proof; the load itself goes on. Large models on cold disks take a minute."""


class ModelControl:
    """Puts models into service and takes them out; used by the start and by the repository RPCs."""

    def __init__(
        self, settings: Settings, routing: Routing, dispatch: Dispatcher, pool: PoolClient, workers: WorkerClient
    ) -> None:
        self._settings = settings
        self._routing = routing
        self._dispatch = dispatch
        self._pool = pool
        self._workers = workers
        self._readiness: Readiness
        self._locks = NameLocks()
        self._next_number = 1 + max((model.number for model in routing.models()), default=0)

    def connect(self, readiness: Readiness) -> None:
        """Who keeps the models' phases."""
        self._readiness = readiness

    def index(self) -> list[ModelState]:
        """All models that are served, or were until they were unloaded."""
        return self._routing.states()

    def serve(self, model: ServedModel) -> None:
        """Let every present and future process of ours know this model."""
        self._dispatch.configure(model)
        self._pool.open(OpenPipeline(model.number, model.name, model.version, model.config))
        self._workers.serve(LoadModel(model.number, model.name, model.version, model.config, model.pinned))

    async def load(self, name: str) -> None:
        """Serve a model of the repository at its current version and wait until it has answered a real batch.

        Nothing to do for one that is served already. Raises UnknownModel when the repository has none of that name,
        NotReady when it can't be loaded.
        """
        async with self._locks.held(name):
            model = self._find(name)
            if model is None or model.state.phase == "unloaded":
                model = await self._from_repository(name, model)
                self._routing.add(model)
                self._readiness.wanted(model)
                self.serve(model)
        await self._settled(model)

    async def unload(self, name: str) -> None:
        """Take a model out of service: requests are refused with NOT_FOUND, workers give its memory back.

        Raises UnknownModel.
        """
        model = self._find(name)
        if model is None:
            raise UnknownModel(f"model {name[:100]!r} is not served")
        self._readiness.unloaded(model)
        self._workers.forget(model.number)
        self._dispatch.withdraw(model)

    def _find(self, name: str) -> ServedModel | None:
        return next((model for model in self._routing.models() if model.name == name), None)

    async def _from_repository(self, name: str, before: ServedModel | None) -> ServedModel:
        """The model at its current version; the one `before` when that is still current."""
        number, self._next_number = self._next_number, self._next_number + 1
        try:
            model = await asyncio.to_thread(self._read, number, name)  # disk, and a user's constructor
        except HeadraceError:
            raise
        except StartupError as error:
            raise NotReady(f"model {name[:100]!r} can't be loaded: {error.text}") from error
        except Exception as error:
            log.exception("model can't be described", model=name)
            raise NotReady(
                f"model {name[:100]!r} can't be loaded: its pipeline raised {type(error).__name__}"
            ) from error
        return before if before is not None and before.version == model.version else model

    def _read(self, number: int, name: str) -> ServedModel:
        return served_model(Repository(self._settings.repository), self._settings, number, name)

    async def _settled(self, model: ServedModel) -> None:
        """Wait until the model is ready or has failed."""
        changed = asyncio.Event()
        self._readiness.subscribe(changed.set)
        try:
            async with asyncio.timeout(LOAD_LIMIT_S):
                while model.state.phase not in {"ready", "failed", "unloaded"}:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            raise NotReady(f"model {model.name!r} is still loading: {model.state.reason}") from None
        finally:
            self._readiness.unsubscribe(changed.set)
        if model.state.phase != "ready":
            raise NotReady(f"model {model.name!r} can't be loaded: {model.state.reason}")
