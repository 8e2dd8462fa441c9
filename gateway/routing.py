"""Which served model version a request goes to. Pure: no asyncio, no clock."""

from collections.abc import Iterable

from gateway.served import ServedModel
from gateway.state import Phase
from shared.errors import InvalidInput, NotReady, UnknownModel, UnknownVersion

RETRY_MS: dict[Phase, int] = {"no_worker": 1000, "loading": 1000, "proving": 100, "failed": 5000}
"""When a retry may find the model ready: about the time that each phase takes."""


class Routing:
    """Served models by name; one version each, until traffic shares make it several."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._by_name = {model.name: model for model in models}

    def models(self) -> Iterable[ServedModel]:
        """All served models."""
        return self._by_name.values()

    def route(self, name: str, version: str) -> ServedModel:
        """The model for a request. Raises UnknownModel, UnknownVersion, or NotReady when it can't answer now."""
        model = self._named(name)
        if version and version != model.version:
            raise UnknownVersion(f"version {version[:100]!r} of model {model.name!r} is not served")
        if model.state.phase != "ready":
            raise NotReady(
                f"model {model.name!r} is not ready: {model.state.reason}", retry_after_ms=RETRY_MS[model.state.phase]
            )
        return model

    def _named(self, name: str) -> ServedModel:
        if not name and len(self._by_name) == 1:
            return next(iter(self._by_name.values()))
        if not name:
            raise InvalidInput(f"model is empty and several are served: {', '.join(self._by_name)}"[:500])
        try:
            return self._by_name[name]
        except KeyError:
            raise UnknownModel(f"model {name[:100]!r} is not served") from None
