"""Which served model version a request goes to. Pure: no asyncio, no clock."""

from collections.abc import Iterable, Iterator

from gateway.served import ServedModel
from gateway.state import ModelState, Phase
from shared.errors import InvalidInput, NotReady, UnknownModel, UnknownVersion
from shared.pipeline import Kind

RETRY_MS: dict[Phase, int] = {
    "no_worker": 1000,
    "loading": 1000,
    "proving": 100,
    "failed": 5000,
    "unloaded": 5000,
    "on_demand": 1000,
}
"""When a retry may find the model ready: about the time that each phase takes."""


class Routing:
    """Served models by name; one version each, until traffic shares make it several."""

    def __init__(self, models: Iterable[ServedModel], broken: Iterable[ModelState] = ()) -> None:
        """`broken`: models that are configured and can't be served, with the reason."""
        self._by_name = {model.name: model for model in models}
        self._broken = {state.name: state for state in broken}

    def add(self, model: ServedModel) -> None:
        """Serve one more model."""
        self._broken.pop(model.name, None)
        self._by_name[model.name] = model

    def states(self) -> list[ModelState]:
        """All models, those that can't be served included."""
        return [*(model.state for model in self._by_name.values()), *self._broken.values()]

    def models(self) -> Iterable[ServedModel]:
        """All served models."""
        return self._by_name.values()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._by_name.values())

    def route(self, name: str, version: str, kind: Kind) -> ServedModel:
        """The model for a request; without a name, the only one that takes this kind of input.

        Raises UnknownModel, UnknownVersion, or NotReady when it can't answer now.
        """
        model = self._named(name) if name else self._only(kind)
        if version and version != model.version:
            raise UnknownVersion(
                f"version {version[:100]!r} of model {model.name!r} is not served; its version is {model.version}"
            )
        if model.state.phase == "unloaded":
            raise UnknownModel(f"model {model.name!r} has no loaded version; load it first")
        if model.state.phase != "ready":
            raise NotReady(
                f"model {model.name!r} is not ready: {model.state.reason}", retry_after_ms=RETRY_MS[model.state.phase]
            )
        return model

    def _only(self, kind: Kind) -> ServedModel:
        fitting = [model for model in self._by_name.values() if model.spec.kind == kind]
        if len(fitting) == 1:
            return fitting[0]
        names = ", ".join(model.name for model in fitting or self._by_name.values())
        many = f"several take {kind}" if fitting else f"none takes {kind}"
        raise InvalidInput(f"model is empty and of the served models {many}: {names}"[:500])

    def _named(self, name: str) -> ServedModel:
        try:
            return self._by_name[name]
        except KeyError:
            if name in self._broken:
                reason = self._broken[name].reason
                raise NotReady(f"model {name!r} can't be served: {reason}", retry_after_ms=RETRY_MS["failed"]) from None
            raise UnknownModel(f"model {name[:100]!r} is not served") from None
