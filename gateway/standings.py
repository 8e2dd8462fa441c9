"""How the traffic of each served model stands, as admins see it. Lives on the event loop."""

from collections.abc import Callable
from typing import Any

from gateway.figures import VersionFigures
from gateway.model_files import InForce, ModelFiles
from gateway.orders import Standing
from gateway.routing import Routing
from gateway.state import ModelState, held
from shared.errors import UnknownModel
from shared.traffic import Traffic


class Standings:
    """What is in force, what is to come, and what is amiss; `gateway.model_control` changes it."""

    def __init__(self, disk: ModelFiles, routing: Routing) -> None:
        self._disk = disk
        self._routing = routing
        self._in_force: dict[str, InForce] = {}
        self._coming: dict[str, Traffic] = {}
        """What the files say, where that could not be put into force yet."""
        self._disk.changed = self._note_unwritten
        self.told: Callable[[str], list[VersionFigures]] = lambda _name: []
        """Who knows these figures."""
        self.changed: Callable[[], None] = lambda: None
        """Called after the traffic of a model has changed."""

    def index(self) -> list[ModelState]:
        """All versions that are served, and models that were until they were unloaded."""
        return self._routing.states()

    async def held(self) -> set[tuple[str, str]]:
        """Models and versions that are in use, whatever the disk says; with several gateways, at any of them."""
        return held(self.index())

    def traffic(self, name: str) -> Traffic:
        """What is in force. Raises UnknownModel."""
        return self._known(name).traffic

    def standing(self, name: str) -> Standing:
        """The same with what is to come, and what is amiss. Raises UnknownModel."""
        in_force, coming, split = self._known(name).traffic, self._coming.get(name), self._routing.split(name)
        refused = split.current.state.refused if split is not None else ""
        return Standing(in_force, coming, refused, self._disk.unwritten(name))

    async def history(self, name: str, limit_s: float | None = None) -> list[dict[str, Any]]:
        """Every change of the traffic, oldest first, as the disk has it now. Raises UnknownModel.

        `limit_s`: how long the disk is waited for; after that, as this gateway knows it.
        """
        return (await self._disk.before(name, self._known(name).traffic, limit_s)).history

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

    def _known(self, name: str) -> InForce:
        try:
            return self._in_force[name]
        except KeyError:
            raise UnknownModel(f"model {name[:100]!r} is not served") from None

    def _note_unwritten(self, name: str) -> None:
        split, reason = self._routing.split(name), self._disk.unwritten(name)
        for model in self._routing.of(name):
            model.state.unwritten = reason if split is not None and model is split.current else ""
        self.changed()
