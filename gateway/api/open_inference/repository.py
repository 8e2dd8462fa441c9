"""The model repository extension: what is served, and (only where the settings allow it) load and unload."""

from typing import Protocol

from gateway.shielded import Shielded
from gateway.state import ModelState, Phase, ServerState
from shared.errors import InvalidInput, UnknownModel, Unsupported

_STATES: dict[Phase, str] = {
    "ready": "READY",
    "loading": "LOADING",
    "proving": "LOADING",
    "no_worker": "UNAVAILABLE",
    "failed": "UNAVAILABLE",
    "unloaded": "UNAVAILABLE",
    "on_demand": "READY",
}
"""The protocol's word for each phase."""


class ModelControl(Protocol):
    """Loads and unloads; implemented by the gateway's composition."""

    async def load(self, name: str) -> None:
        """Serve a model of the repository, or its current version anew. Raises HeadraceError."""

    async def unload(self, name: str) -> None:
        """Stop serving a model. Raises HeadraceError."""

    def index(self) -> list[ModelState]:
        """Every model of the repository, served or not."""


class Repository:
    """What both forms of the protocol show and allow. Event loop only."""

    def __init__(self, state: ServerState, control: ModelControl | None, *, allowed: bool) -> None:
        """`allowed` is `gateway.repository_control`."""
        self._state = state
        self._control = control
        self._allowed = allowed
        self._orders = Shielded()

    @property
    def is_open(self) -> bool:
        """Whether load and unload work."""
        return self._allowed and self._control is not None

    def index(self, *, only_ready: bool) -> list[ModelState]:
        """All models, or those that can answer now."""
        models = self._state.models() if self._control is None else self._control.index()
        return [model for model in models if model.phase in {"ready", "on_demand"} or not only_ready]

    async def load(self, name: str) -> None:
        """What has begun goes on when the caller leaves.

        Raises Unsupported (switched off), InvalidInput (no name), UnknownModel, Overloaded.
        """
        await self._orders.carried_out(self._opened(name).load(name))

    async def unload(self, name: str) -> None:
        """Raises as `load`."""
        control = self._opened(name)
        if all(model.name != name for model in control.index()):
            raise UnknownModel(f"model {name[:100]!r} is not served")
        await self._orders.carried_out(control.unload(name))

    def _opened(self, name: str) -> ModelControl:
        if not self._allowed:
            raise Unsupported("loading and unloading models is switched off (gateway.repository_control)")
        if self._control is None:
            raise Unsupported("this server can't load or unload models while it runs")
        if not name:
            raise InvalidInput("the request names no model")
        return self._control


def state_word(phase: Phase) -> str:
    """READY, LOADING or UNAVAILABLE."""
    return _STATES[phase]
