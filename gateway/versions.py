"""Brings versions into service beside those that answer, and takes them out again. Lives on the event loop."""

import asyncio
from collections.abc import Callable, Sequence

from gateway.build import served_model
from gateway.dispatch import Dispatcher
from gateway.pool_client import PoolClient
from gateway.readiness import Readiness
from gateway.routing import Routing
from gateway.served import ServedModel
from gateway.worker_client import WorkerClient
from shared.errors import HeadraceError, NotReady, StartupError
from shared.logs import get_logger
from shared.messages import LoadModel, OpenPipeline
from shared.repository import Repository
from shared.settings import Settings

log = get_logger()

LOAD_LIMIT_S = 120.0
"""How long an order waits for the proof; the load itself goes on. Large models on cold disks take a minute."""
_NEVER_S = float("-inf")


class Versions:
    """Everything that is told to pool, workers, dispatcher and readiness when a version comes or goes."""

    def __init__(
        self, settings: Settings, routing: Routing, dispatch: Dispatcher, pool: PoolClient, workers: WorkerClient
    ) -> None:
        self._settings = settings
        self._routing = routing
        self._dispatch = dispatch
        self._pool = pool
        self._workers = workers
        self._readiness: Readiness
        self._next_number = 1 + max((model.number for model in routing.models()), default=0)
        self._forget: Sequence[Callable[[int], None]] = ()
        self._leaving: list[ServedModel] = []
        """Let go while requests were under way: these still count for it when they end. Bounded by admission."""
        self.withdrawn: Callable[[ServedModel], None] = lambda _model: None
        """Told of what is taken out of service; whoever else than the dispatcher has work of it."""
        self.gone: Callable[[str, str], None] = lambda _name, _version: None
        """Told of the name and version of what is served no more, with whatever model.yaml."""

    def connect(self, readiness: Readiness, forget: Sequence[Callable[[int], None]] = ()) -> None:
        """Who keeps the versions' phases, and who else is told of those that are gone for good."""
        self._readiness = readiness
        self._forget = [readiness.forget, *forget]

    def serve(self, model: ServedModel) -> None:
        """Let every present and future process of ours know this version."""
        self._dispatch.configure(model)
        self._pool.open(OpenPipeline(model.number, model.name, model.version, model.config))
        self._workers.serve(LoadModel(model.number, model.name, model.version, model.config, model.pinned))

    async def read(self, name: str, version: str = "", config: bytes | None = None) -> ServedModel:
        """A version as the repository has it now, not served yet.

        Raises UnknownModel, UnknownVersion, or NotReady when its files or its pipeline can't be used.
        """
        number, self._next_number = self._next_number, self._next_number + 1
        try:
            # In a thread: the disk, and a user's constructor.
            return await asyncio.to_thread(self._read, number, name, version, config)
        except HeadraceError:
            raise
        except StartupError as error:
            raise NotReady(f"model {name[:100]!r} can't be loaded: {error.text}") from error
        except Exception as error:
            log.exception("model can't be described", model=name)
            raise NotReady(
                f"model {name[:100]!r} can't be loaded: its pipeline raised {type(error).__name__}"
            ) from error

    def _read(self, number: int, name: str, version: str, config: bytes | None) -> ServedModel:
        return served_model(
            Repository(self._settings.repository, only=name), self._settings, number, name, version, config
        )

    def start(self, model: ServedModel) -> None:
        """Have it loaded and proven beside whatever answers now."""
        model.state.role = "coming"
        self._routing.add(model)
        self._readiness.wanted(model)
        self.serve(model)
        self._workers.demand(model.number)

    def again(self, model: ServedModel) -> None:
        """Try once more to load a version that failed, or that nobody has asked for yet."""
        self._readiness.wanted(model)
        self._workers.serve(LoadModel(model.number, model.name, model.version, model.config, model.pinned))
        self._workers.demand(model.number)

    async def settled(self, model: ServedModel) -> None:
        """Wait until a version has answered a real batch. Raises NotReady when it can't."""
        changed = asyncio.Event()
        self._readiness.subscribe(changed.set)
        try:
            async with asyncio.timeout(LOAD_LIMIT_S):
                while model.state.phase not in {"ready", "failed", "unloaded"}:
                    if model.state.phase == "on_demand":
                        if model.proven_s > _NEVER_S:  # given up since, for another one's sake
                            return
                        self.again(model)  # its worker was lost, or it was given up, before anything was proven
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            raise NotReady(f"model {model.name!r} is still loading: {model.state.reason}") from None
        finally:
            self._readiness.unsubscribe(changed.set)
        if model.state.phase in {"failed", "unloaded"}:
            raise NotReady(f"model {model.name!r} can't be loaded: {model.state.reason}")

    async def proven(self, model: ServedModel) -> None:
        """Wait until a version that is there already can answer; one that failed is tried again. Raises NotReady."""
        if model.state.phase == "failed":
            self.again(model)
        await self.settled(model)

    async def bring_up(self, name: str, version: str, config: bytes) -> ServedModel:
        """A version, loaded and proven. Raises as `read`, and NotReady; then nothing of it is left."""
        model = await self.read(name, version, config)
        self.start(model)
        try:
            await self.settled(model)
        except BaseException:
            self.let_go(model)
            raise
        return model

    def retire(self, model: ServedModel) -> None:
        """It gets nothing new, and is let go when its last request is answered."""
        model.state.role = "retiring"
        self.tidy()

    def withdraw(self, model: ServedModel, reason: str = "it was unloaded by request") -> None:
        """Take a version out of service at once: what waits for it is answered, workers give its memory back."""
        self._readiness.unloaded(model, reason)
        self._workers.forget(model.number)
        self._dispatch.withdraw(model)
        self.withdrawn(model)

    def let_go(self, model: ServedModel) -> None:
        """Withdraw it, and forget that it was ever there."""
        self.withdraw(model, "it is no longer needed")
        self._routing.remove(model)
        for forget in self._forget:
            forget(model.number)
        self._leaving.append(model)
        self._tell_gone()

    def tidy(self) -> None:
        """Let go of what is done with. Called a few times a second."""
        self._tell_gone()
        for model in [model for model in self._routing.models() if model.state.role == "retiring"]:
            if not model.requests:
                self.let_go(model)

    def _tell_gone(self) -> None:
        left = [model for model in self._leaving if not model.requests]
        self._leaving = [model for model in self._leaving if model.requests]
        for model in left:
            self._pool.close(model.number)  # not before: its processes finish what they have of it
            others = [*self._routing.of(model.name), *self._leaving]
            if all((other.name, other.version) != (model.name, model.version) for other in others):
                self.gone(model.name, model.version)
