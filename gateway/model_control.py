"""Which versions of which models are served: what traffic.json and model.yaml say, and what was ordered since.

A newer version, or a newer model.yaml, is loaded and proven beside the one that answers; only then the pointer in
`routing` moves. What can't be loaded changes nothing. Lives on the event loop.
"""

from collections.abc import Callable
from contextlib import suppress

import msgspec

from gateway.model_files import InForce, ModelFiles
from gateway.name_locks import NameLocks
from gateway.orders import Order, Promote, RollBack, applied, check_known, told
from gateway.others import Nobody, Others
from gateway.preparer import Prepared, Preparer
from gateway.routing import Routing
from gateway.served import ServedModel
from gateway.split import Split
from gateway.standings import Standings
from gateway.unwritten import ChangedMeanwhile, same
from gateway.versions import Versions
from shared.errors import HeadraceError, StartupError, UnknownModel
from shared.logs import get_logger
from shared.repository_writer import now_utc, role_of
from shared.settings import Settings
from shared.traffic import Traffic

log = get_logger()

MAX_TRIES = 3
"""An order that finds the traffic changed by another one while it loaded what it needs is looked at anew so often."""
READ_LIMIT_S, WRITE_LIMIT_S = 0.25, 0.5
"""A rollback waits no longer than that for what the disk says, and for its first try to write: a second in all."""


class ModelControl(Standings):
    """Puts models and versions into service and takes them out, one order after another for each model."""

    def __init__(self, settings: Settings, routing: Routing, versions: Versions) -> None:
        super().__init__(ModelFiles(settings.repository), routing)
        self._versions = versions
        self._preparer = Preparer(routing, versions)
        self._locks = NameLocks()
        self.pointed: Callable[[str, Split[ServedModel] | None], None] = lambda _name, _split: None
        """Told of every change of who answers whom; None: the model is served no more."""

    def start(self, models: list[ServedModel]) -> None:
        """Serve these, which routing points to already. Their canaries and standbys follow by `reconcile`."""
        for model in models:
            self._versions.serve(model)
            self._in_force[model.name] = InForce(Traffic(current=model.version), model.config)

    # ------------------------------------------------------------ ordered

    async def load(self, name: str) -> None:
        """Serve a model as traffic.json and model.yaml say now, and wait until it has answered a real batch.

        Raises UnknownModel when the repository has none of that name, NotReady when it can't be loaded; a version
        that is served already goes on.
        """
        async with self._locks.held(name):
            wanted = await self._wanted(name)
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
        self._coming.pop(name, None)
        self.pointed(name, None)
        self.changed()

    async def order(self, name: str, order: Order, by: str, others: Others | None = None) -> Traffic:
        """Change a model's traffic: load and prove what it needs, write traffic.json, move the pointer.

        A rollback moves the pointer first, and is written as soon as the disk lets it (`standing` says if not yet);
        where it needs no load the others are told afterwards, since one that hangs must not keep a bad version alive.
        Raises UnknownModel, UnknownVersion, Conflict, InvalidOption, NotReady; then everything is as before.
        """
        others = others or Nobody(self.figures)
        for _ in range(MAX_TRIES - 1):
            with suppress(ChangedMeanwhile):
                return await self._ordered(name, order, by, others)
        return await self._ordered(name, order, by, others)

    async def _ordered(self, name: str, order: Order, by: str, others: Others) -> Traffic:
        at, known, first = now_utc(), self._known(name), isinstance(order, RollBack)
        before = await self._disk.before(name, known.traffic, READ_LIMIT_S if first else None)
        after = applied(before, order, at, by)
        if isinstance(order, Promote):
            check_known(name, before, await others.all_figures(name))
        needed = InForce(after, known.config)
        if after is before:  # it is written already; what could not be loaded then may be now
            await self._serve(name, needed)
            return after
        lacking = self._preparer.lacking(name, needed, standby=not first)
        if lacking:  # else nothing is asked of the disk: it may hang
            await self._disk.check_there(name, [version for version in lacking if version in after.answering()])
        asks = bool(lacking) or not first
        async with self._preparer.prepared(name, needed, standby=not first) as found:
            try:
                if asks:
                    await others.prepare(name, after.without_history(), at_once=not lacking)
                async with self._locks.held(name):
                    if first:
                        await self._put_in_force(name, before, needed, found)
                    else:
                        doubt = found[after.answering()[-1]].state.doubt
                        after = await self._disk.write(
                            name, before, lambda disk: applied(disk, order, at, by, doubt), known.traffic
                        )
                        self._switch(name, InForce(after, known.config), found)
            except BaseException:
                if asks:
                    await others.abandon(name, after.without_history())
                raise
        if first:
            await self._disk.write_kept(name, WRITE_LIMIT_S)
        await others.adopt(name, after if self._disk.unwritten(name) else None)
        return after

    async def follow(self, name: str, unwritten: Traffic) -> None:
        """Another gateway has put this in force, and could not write it. Raises HeadraceError.

        Its history: what is new in it.
        """
        known = self._known(name)
        before = await self._disk.before(name, known.traffic, READ_LIMIT_S)
        if same(before, unwritten):
            return
        after = msgspec.structs.replace(unwritten, history=[*before.history, *unwritten.history])
        needed = InForce(after, known.config)
        async with self._preparer.prepared(name, needed, standby=False) as found, self._locks.held(name):
            await self._put_in_force(name, before, needed, found, len(unwritten.history))
        with suppress(ChangedMeanwhile):  # which the watch sees
            await self._disk.write_kept(name, WRITE_LIMIT_S)

    async def _put_in_force(
        self, name: str, before: Traffic, wanted: InForce, found: Prepared, changes: int = 1
    ) -> None:
        """Move the pointer before anything is written. Raises ChangedMeanwhile."""
        now = self._in_force.get(name, wanted).traffic
        if not same(await self._disk.before(name, now, READ_LIMIT_S), before):
            raise ChangedMeanwhile(f"the traffic of model {name[:100]!r} was changed by somebody else meanwhile")
        self._disk.keep(name, before, wanted.traffic, changes)
        self._switch(name, wanted, found)

    def unwritten(self) -> list[str]:
        """Models whose traffic could not be written, and is to be tried again now."""
        return self._disk.due()

    def kept(self) -> dict[str, Traffic]:
        """All that could not be written, for a gateway that comes: its disk says what is not in force any more."""
        return self._disk.kept()

    async def write(self, name: str) -> None:
        """Try again."""
        with suppress(ChangedMeanwhile):  # which the watch sees
            await self._disk.write_kept(name)

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
            await self._serve(name, await self._wanted(name))
        except (HeadraceError, StartupError) as error:
            self._refused(name, error.text)
            return False
        return True

    def is_whole(self, name: str) -> bool:
        """Whether everything is there that the traffic in force needs, its standby included."""
        known = self._in_force.get(name)
        return known is None or self._preparer.is_there(name, known)

    # ------------------------------------------------------------ inside

    async def _wanted(self, name: str) -> InForce:
        return await self._disk.wanted(name, {model.version for model in self._routing.of(name)})

    async def _serve(self, name: str, wanted: InForce) -> None:
        in_force = self._in_force.get(name)
        if in_force == wanted and self._preparer.is_there(name, wanted):
            self._coming.pop(name, None)
            self._refused(name, "")  # what was wrong has been taken back
            return
        if in_force is not None and not same(in_force.traffic, wanted.traffic):
            self._coming[name] = wanted.traffic
            self.changed()
        async with self._preparer.prepared(name, wanted) as found, self._locks.held(name):
            if await self._wanted(name) == wanted:  # else it was changed meanwhile, and is looked at again
                self._switch(name, wanted, found)

    async def _serve_anew(self, name: str, wanted: InForce) -> None:
        model = await self._versions.read(name, wanted.traffic.current, wanted.config)
        known = [state for state in self._routing.states() if state.name == name and state.phase != "unloaded"]
        model.state.on_trial = not known  # what could not be served at the start has been waited for since
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
                model.state.role, model.state.refused = role_of(traffic, model.version) or "standby", ""
            elif model.state.role != "coming":  # those are another order's, which has yet to say whether it needs them
                self._versions.retire(model)
        before = self._in_force.get(name)
        self._in_force[name] = wanted
        self._coming.pop(name, None)
        self.pointed(name, self._routing.split(name))
        if before is not None and before.traffic.without_history() != traffic.without_history():
            log.info("traffic", model=name, **told(traffic))
        self._note_unwritten(name)

    def _refused(self, name: str, reason: str) -> None:
        """Why what the files say is not served; empty: it is."""
        split = self._routing.split(name)
        if split is not None and split.current.state.refused != reason:
            split.current.state.refused = reason
            if reason:
                log.error("not applied", model=name, version=split.current.version, reason=reason)
            self.changed()
