"""Versions that are to be pointed to: loaded and proven beside those that answer. Lives on the event loop.

Nothing is locked meanwhile: a load takes as long as it takes, and a rollback must not wait for it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from gateway.model_files import InForce
from gateway.routing import Routing
from gateway.served import ServedModel
from gateway.versions import LOAD_LIMIT_S, Versions
from shared.errors import HeadraceError, NotReady
from shared.logs import get_logger
from shared.model_config import revision_of
from shared.traffic import Traffic

log = get_logger()

UNUSED_S = 2 * LOAD_LIMIT_S
"""What was prepared for another gateway's order is kept for so long: until the slowest gateway has prepared, too."""
NO_ROOM = "worker.memory_budget_bytes"
"""A worker's refusal for want of memory names this setting."""

Prepared = dict[str, ServedModel]
"""By version."""


class _Place(NamedTuple):
    """One version with one content of model.yaml."""

    name: str
    version: str
    revision: str


class _Kept(NamedTuple):
    """What one order of another gateway needs, until it comes."""

    held: list[ServedModel]
    timer: asyncio.TimerHandle


_Order = tuple[str, tuple[str, ...]]
"""A model, and the versions that an order needs of it."""


def _order(name: str, traffic: Traffic) -> _Order:
    return name, tuple(traffic.wanted())


def _needed(traffic: Traffic, *, standby: bool) -> list[str]:
    return traffic.wanted() if standby else traffic.answering()


class _Coming:
    """A load, and how many wait for it."""

    __slots__ = ("task", "waiting")

    def __init__(self, task: "asyncio.Task[ServedModel]") -> None:
        self.task = task
        self.waiting = 0


class Preparer:
    """Brings up what an order needs, each version once however many ask for it, and keeps it while they do."""

    def __init__(self, routing: Routing, versions: Versions) -> None:
        self._routing = routing
        self._versions = versions
        self._coming: dict[_Place, _Coming] = {}
        self._held: dict[int, int] = {}
        """Who still needs it, by number."""
        self._kept: dict[_Order, list[_Kept]] = {}
        """What was prepared for other gateways' orders, the newest first."""

    def is_there(self, name: str, wanted: InForce) -> bool:
        """Whether nothing has to be loaded for it."""
        return not self.lacking(name, wanted)

    def lacking(self, name: str, wanted: InForce, *, standby: bool = True) -> list[str]:
        """The versions that have to be loaded for it. `standby`: whether that one is needed, too."""
        revision = revision_of(wanted.config)
        return [
            version
            for version in _needed(wanted.traffic, standby=standby)
            if self._existing(_Place(name, version, revision)) is None
        ]

    @asynccontextmanager
    async def prepared(self, name: str, wanted: InForce, *, standby: bool = True) -> AsyncIterator[Prepared]:
        """Everything that it needs, up and proven; afterwards what nobody points to is let go. Raises HeadraceError.

        `standby`: whether that is loaded, too, where it is not there.
        """
        held: list[ServedModel] = []
        try:
            yield await self._all(name, wanted, held, standby=standby)
        finally:
            for model in held:
                self._release(model)

    async def prepare(self, name: str, wanted: InForce) -> None:
        """As `prepared`, for an order that comes by traffic.json, later, or is abandoned. Raises HeadraceError."""
        held: list[ServedModel] = []
        try:
            await self._all(name, wanted, held)
        except BaseException:
            for model in held:
                self._release(model)
            raise
        order = _order(name, wanted.traffic)
        before = self._kept.get(order, ())
        timer = asyncio.get_running_loop().call_later(UNUSED_S, self._give_up, order)
        self._kept[order] = [_Kept(held, timer), *before]

    def abandon(self, name: str, traffic: Traffic) -> None:
        """An order that this was prepared for does not come."""
        self._give_up(_order(name, traffic))

    # ------------------------------------------------------------ inside

    def _give_up(self, order: _Order) -> None:
        """The oldest preparation for such an order."""
        kept = self._kept.pop(order, [])
        if not kept:
            return
        *others, oldest = kept
        if others:
            self._kept[order] = others
        oldest.timer.cancel()
        for model in oldest.held:
            self._release(model)

    async def _all(self, name: str, wanted: InForce, held: list[ServedModel], *, standby: bool = True) -> Prepared:
        revision = revision_of(wanted.config)
        found: Prepared = {}
        needed = _needed(wanted.traffic, standby=standby)
        for version in wanted.traffic.wanted():
            place = _Place(name, version, revision)
            model = self._existing(place)
            if model is None:
                if version not in needed:
                    continue
                model = await self._brought_up(place, wanted)
                if model is None:
                    continue
            self._held[model.number] = self._held.get(model.number, 0) + 1
            held.append(model)
            if self._takes_over(model, wanted.traffic):
                await self._versions.proven(model)
            found[version] = model
        return found

    async def _brought_up(self, place: _Place, wanted: InForce) -> ServedModel | None:
        """None for a standby that can't be had: nobody is answered by it."""
        try:
            return await self._made_room(place, wanted)
        except HeadraceError as error:
            canary = wanted.traffic.canary
            if place.version == wanted.traffic.current or (canary is not None and place.version == canary.version):
                raise
            log.warning("no hot standby", model=place.name, version=place.version, reason=error.text)
            return None

    async def _made_room(self, place: _Place, wanted: InForce) -> ServedModel:
        """A standby that is not to stay gives way when there is no room for what comes."""
        try:
            return await self._once(place, wanted.config)
        except NotReady as error:
            in_the_way = [model for model in self._routing.of(place.name) if self._may_go(model, place, wanted)]
            if NO_ROOM not in error.text or not in_the_way:
                raise
        for model in in_the_way:
            log.info("standby given up for a new version", model=model.name, version=model.version)
            self._versions.retire(model)
        return await self._once(place, wanted.config)

    def _may_go(self, model: ServedModel, place: _Place, wanted: InForce) -> bool:
        stays = model.version in wanted.traffic.wanted() and model.revision == place.revision
        return model.state.role == "standby" and not stays and not self._held.get(model.number)

    async def _once(self, place: _Place, config: bytes) -> ServedModel:
        """Who asks for the same waits for the same load; it goes on for those who stay."""
        coming = self._coming.get(place)
        if coming is None:
            bring_up = self._versions.bring_up(place.name, place.version, config)
            coming = self._coming[place] = _Coming(asyncio.get_running_loop().create_task(bring_up))
            coming.task.add_done_callback(lambda _done: self._came(place, coming))
        coming.waiting += 1
        try:
            return await asyncio.shield(coming.task)
        except asyncio.CancelledError:
            if coming.waiting == 1:  # nobody else wants it
                self._came(place, coming)  # who asks from now on is not to share a load that is given up
                self._leave(coming.task)
            raise
        finally:
            coming.waiting -= 1

    def _came(self, place: _Place, coming: _Coming) -> None:
        """It can't be shared any more."""
        if self._coming.get(place) is coming:
            del self._coming[place]

    def _leave(self, task: "asyncio.Task[ServedModel]") -> None:
        if not task.done():
            task.cancel()
        elif not task.cancelled() and task.exception() is None:
            self._forget_unwanted(task.result())

    def _forget_unwanted(self, model: ServedModel) -> None:
        if not self._held.get(model.number) and model.state.role == "coming":
            self._versions.let_go(model)

    def _release(self, model: ServedModel) -> None:
        held = self._held.pop(model.number, 0) - 1
        if held > 0:
            self._held[model.number] = held
        else:
            self._forget_unwanted(model)

    def _takes_over(self, model: ServedModel, traffic: Traffic) -> bool:
        """Whether one that can't answer now is to take callers away from one that can."""
        split = self._routing.split(model.name)
        if split is None or not _answers(split.current) or _answers(model):
            return False
        if model.version == traffic.current:
            return model is not split.current
        return traffic.canary is not None and model.version == traffic.canary.version and model is not split.canary

    def _existing(self, place: _Place) -> ServedModel | None:
        for model in self._routing.of(place.name):
            usable = model.state.role != "retiring" and model.state.phase != "unloaded"
            settled = model.state.role != "coming" or _answers(model)  # else who waits for it shares the load
            if usable and settled and (model.version, model.revision) == (place.version, place.revision):
                return model
        return None


def _answers(model: ServedModel) -> bool:
    return model.state.phase in {"ready", "on_demand"}
