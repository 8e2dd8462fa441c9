"""Which versions of which models are served: what traffic.json and model.yaml say, and what was ordered since.

A newer version, or a newer model.yaml, is loaded and proven beside the one that answers; only then the pointer in
`routing` moves. What can't be loaded changes nothing. Lives on the event loop.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

from gateway.figures import VersionFigures
from gateway.model_files import ChangedMeanwhile, InForce, ModelFiles
from gateway.name_locks import NameLocks
from gateway.orders import Order, applied, role_of, told
from gateway.preparer import Preparer
from gateway.routing import Routing
from gateway.served import ServedModel
from gateway.split import Split
from gateway.state import ModelState
from gateway.versions import Versions
from shared.errors import HeadraceError, StartupError, UnknownModel
from shared.logs import get_logger
from shared.repository_writer import now_utc
from shared.settings import Settings
from shared.traffic import Traffic

log = get_logger()

MAX_TRIES = 3
"""An order that finds the traffic changed by another one while it loaded what it needs is looked at anew so often."""


class Others(Protocol):
    """The other gateways of this server."""

    def prepare(self, name: str, traffic: Traffic, *, at_once: bool) -> Awaitable[None]:
        """Have every one of them load and prove what this traffic needs. Raises HeadraceError.

        `at_once`: it needs no load; who does not answer soon follows later.
        """

    def abandon(self, name: str, traffic: Traffic) -> Awaitable[None]:
        """What they have prepared is not needed."""

    def adopt(self, name: str) -> Awaitable[None]:
        """Let them read traffic.json and model.yaml again."""


class Nobody:
    """There are no other gateways."""

    async def prepare(self, name: str, traffic: Traffic, *, at_once: bool) -> None:
        """Nobody to ask."""

    async def abandon(self, name: str, traffic: Traffic) -> None:
        """Nobody to tell."""

    async def adopt(self, name: str) -> None:
        """Nobody to tell."""


class ModelControl:
    """Puts models and versions into service and takes them out, one order after another for each model."""

    def __init__(self, settings: Settings, routing: Routing, versions: Versions) -> None:
        self._disk = ModelFiles(settings.repository)
        self._routing = routing
        self._versions = versions
        self._preparer = Preparer(routing, versions)
        self._locks = NameLocks()
        self._in_force: dict[str, InForce] = {}
        self.pointed: Callable[[str, Split[ServedModel] | None], None] = lambda _name, _split: None
        """Told of every change of who answers whom; None: the model is served no more."""
        self.told: Callable[[str], list[VersionFigures]] = lambda _name: []
        """Who knows these figures."""
        self.changed: Callable[[], None] = lambda: None
        """Called after the traffic of a model has changed."""

    def start(self, models: list[ServedModel]) -> None:
        """Serve these, which routing points to already. Their canaries and standbys follow by `reconcile`."""
        for model in models:
            self._versions.serve(model)
            self._in_force[model.name] = InForce(Traffic(current=model.version), model.config)

    # ------------------------------------------------------------ shown

    def index(self) -> list[ModelState]:
        """All versions that are served, and models that were until they were unloaded."""
        return self._routing.states()

    def traffic(self, name: str) -> Traffic:
        """What is in force. Raises UnknownModel."""
        return self._known(name).traffic

    async def history(self, name: str) -> list[dict[str, Any]]:
        """Every change of traffic.json, oldest first, as the disk has it now. Raises as `order`."""
        return (await self._disk.wanted(name)).traffic.history

    def figures(self, name: str) -> list[VersionFigures]:
        """What the versions have done since the canary started, as far as this gateway knows. Raises UnknownModel."""
        self._known(name)
        return self.told(name)

    async def all_figures(self, name: str) -> list[VersionFigures]:
        """The same; with several gateways `everywhere` asks all of them."""
        return self.figures(name)

    def names(self) -> list[str]:
        """Models that are served."""
        return list(self._in_force)

    # ------------------------------------------------------------ ordered

    async def load(self, name: str) -> None:
        """Serve a model as traffic.json and model.yaml say now, and wait until it has answered a real batch.

        Raises UnknownModel when the repository has none of that name, NotReady when it can't be loaded; a version
        that is served already goes on.
        """
        async with self._locks.held(name):
            wanted = await self._disk.wanted(name)
            if name not in self._in_force:  # nothing could go on meanwhile
                await self._serve_anew(name, wanted)
        await self._serve(name, wanted)
        split = self._routing.split(name)
        if split is not None:
            await self._versions.proven(split.current)

    async def unload(self, name: str) -> None:
        """Take a model out of service: requests are refused with NOT_FOUND, workers give its memory back.

        Raises UnknownModel.
        """
        split = self._routing.split(name)
        if split is None:
            raise UnknownModel(f"model {name[:100]!r} is not served")
        for model in self._routing.of(name):
            if model is split.current:
                self._versions.withdraw(model)
            else:
                self._versions.let_go(model)
        self._routing.point(Split(split.current))
        self._in_force.pop(name, None)
        self.pointed(name, None)
        self.changed()

    async def order(self, name: str, order: Order, by: str, others: Others | None = None) -> Traffic:
        """Change a model's traffic: load and prove what it needs, write traffic.json, move the pointer.

        Raises UnknownModel, UnknownVersion, Conflict, InvalidOption, NotReady; then everything is as before.
        """
        for _ in range(MAX_TRIES - 1):
            with suppress(ChangedMeanwhile):
                return await self._ordered(name, order, by, others or Nobody())
        return await self._ordered(name, order, by, others or Nobody())

    async def _ordered(self, name: str, order: Order, by: str, others: Others) -> Traffic:
        at = now_utc()
        known, wanted = self._known(name), await self._disk.wanted(name)
        after = applied(wanted.traffic, order, at, by)
        if after is wanted.traffic:  # it is written already; what could not be loaded then may be now
            await self._serve(name, InForce(after, known.config))
            return after
        await self._disk.check_there(name, after)
        needed = InForce(after, known.config)
        at_once = self._preparer.is_there(name, needed)
        async with self._preparer.prepared(name, needed) as found:
            try:
                await others.prepare(name, after.without_history(), at_once=at_once)
                async with self._locks.held(name):
                    after = await self._disk.write(name, wanted.traffic, lambda disk: applied(disk, order, at, by))
                    self._switch(name, InForce(after, known.config), found)
            except BaseException:
                await others.abandon(name, after.without_history())
                raise
        await others.adopt(name)
        return after

    async def prepare(self, name: str, traffic: Traffic) -> None:
        """Load and prove what this traffic needs, beside what answers; it is about to be written. Raises as `order`."""
        await self._preparer.prepare(name, InForce(traffic, self._known(name).config))

    def abandon(self, name: str, traffic: Traffic) -> None:
        """It will not be written."""
        self._preparer.abandon(name, traffic)

    async def reconcile(self, name: str) -> bool:
        """Serve what traffic.json and model.yaml say now; what can't be is noted with the version that goes on.

        False when that is so.
        """
        if name not in self._in_force:
            return True
        try:
            await self._serve(name, await self._disk.wanted(name))
        except (HeadraceError, StartupError) as error:
            self._refused(name, error.text)
            return False
        return True

    def is_whole(self, name: str) -> bool:
        """Whether everything is there that the traffic in force needs, its standby included."""
        known = self._in_force.get(name)
        return known is None or self._preparer.is_there(name, known)

    # ------------------------------------------------------------ inside

    def _known(self, name: str) -> InForce:
        try:
            return self._in_force[name]
        except KeyError:
            raise UnknownModel(f"model {name[:100]!r} is not served") from None

    async def _serve(self, name: str, wanted: InForce) -> None:
        if self._in_force.get(name) == wanted and self._preparer.is_there(name, wanted):
            self._refused(name, "")  # what was wrong has been taken back
            return
        async with self._preparer.prepared(name, wanted) as found, self._locks.held(name):
            if await self._disk.wanted(name) == wanted:  # else it was changed meanwhile, and is looked at again
                self._switch(name, wanted, found)

    async def _serve_anew(self, name: str, wanted: InForce) -> None:
        model = await self._versions.read(name, wanted.traffic.current, wanted.config)
        for gone in self._routing.of(name):  # unloaded before
            self._versions.let_go(gone)
        self._versions.start(model)
        model.state.role = "current"
        self._routing.point(Split(model))
        self._in_force[name] = InForce(Traffic(current=model.version), wanted.config)

    def _switch(self, name: str, wanted: InForce, found: dict[str, ServedModel]) -> None:
        """Move the pointer. What is not needed any more finishes what it has, and is let go."""
        if name not in self._in_force:  # unloaded meanwhile: this is what the next load serves
            return
        traffic, canary = wanted.traffic, wanted.traffic.canary
        current = found[traffic.current]
        self._routing.point(
            Split(current)
            if canary is None
            else Split(current, found[canary.version], canary.percent, canary.by, canary.shadow)
        )
        kept = {model.number for model in found.values()}
        for model in self._routing.of(name):
            if model.number in kept:
                model.state.role, model.state.refused = role_of(traffic, model.version), ""
            elif model.state.role != "coming":  # those are another order's, which has yet to say whether it needs them
                self._versions.retire(model)
        before = self._in_force.get(name)
        self._in_force[name] = wanted
        self.pointed(name, self._routing.split(name))
        if before is not None and before.traffic.without_history() != traffic.without_history():
            log.info("traffic", model=name, **told(traffic))
        self.changed()

    def _refused(self, name: str, reason: str) -> None:
        """Why what the files say is not served; empty: it is."""
        split = self._routing.split(name)
        if split is not None and split.current.state.refused != reason:
            split.current.state.refused = reason
            if reason:
                log.error("not applied", model=name, version=split.current.version, reason=reason)
            self.changed()
