"""Which version of which model a request goes to. Pure: no asyncio, no clock."""

from collections.abc import Iterable, Iterator

from gateway.served import ServedModel
from gateway.split import Split
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


_NOBODYS = {"coming", "shadow", "retiring"}
"""Roles of versions that nobody is answered by, not even who names them: not proven yet, only compared, or leaving."""


class Routing:
    """The served versions by number, and by model's name who of them answers whom."""

    def __init__(self, models: Iterable[ServedModel], broken: Iterable[ModelState] = ()) -> None:
        """`models`: the current versions. `broken`: models that are configured and can't be served, with the reason."""
        self._models: dict[int, ServedModel] = {}
        self._splits: dict[str, Split[ServedModel]] = {}
        self._broken = {state.name: state for state in broken}
        for model in models:
            self.add(model)
            self.point(Split(model))

    def add(self, model: ServedModel) -> None:
        """Know one more version; nobody is sent to it yet."""
        self._models[model.number] = model

    def point(self, split: "Split[ServedModel]") -> None:
        """From now on this is who answers a model's requests."""
        self._broken.pop(split.current.name, None)
        self._splits[split.current.name] = split

    def remove(self, model: ServedModel) -> None:
        """Forget a version that answers nobody any more."""
        self._models.pop(model.number, None)
        split = self._splits.get(model.name)
        if split is not None and split.current is model:
            del self._splits[model.name]

    def states(self) -> list[ModelState]:
        """All versions, and models that can't be served."""
        return [*(model.state for model in self._models.values()), *self._broken.values()]

    def models(self) -> Iterable[ServedModel]:
        """All versions, also those that answer nobody yet, or no more."""
        return self._models.values()

    def get(self, number: int) -> ServedModel | None:
        """One version by its number."""
        return self._models.get(number)

    def of(self, name: str) -> list[ServedModel]:
        """All versions of one model."""
        return [model for model in self._models.values() if model.name == name]

    def split(self, name: str) -> "Split[ServedModel] | None":
        """Who answers a model's requests; None for a model that is not served."""
        return self._splits.get(name)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def route(
        self, name: str, version: str, kind: Kind, key: str = "", request_id: str = "", *, task: str = ""
    ) -> ServedModel:
        """The version for a request; without a name, of the only model that takes this kind of input.

        `task`: where some of those that take it have this one, only they are meant. `key`: the request's routing key.
        Raises UnknownModel, UnknownVersion, or NotReady when it can't answer now.
        """
        split = self._named(name) if name else self._only(kind, task)
        if version:
            model = self._version(split, version)
        elif split.canary is None:
            model = split.current
        else:
            model = split.answers(split.key(key, request_id))
        if model.state.phase != "ready":
            _refuse_unready(model)
        return model

    def instead(self, model: ServedModel, version: str) -> ServedModel | None:
        """Who can answer what was sent to a canary that has turned out not to be able to; None when nobody can.

        `version`: the one that the request names, which is not answered by another one.
        """
        split = self._splits.get(model.name)
        if version or split is None or split.current is model:
            return None
        return split.current if split.current.state.phase == "ready" or split.current.waits_for_load else None

    def _version(self, split: "Split[ServedModel]", version: str) -> ServedModel:
        if version == split.current.version:
            return split.current
        name = split.current.name
        known = [model for model in self.of(name) if model.state.role not in _NOBODYS]
        for model in known:
            if model.version == version:
                return model
        if any(model.version == version and model.state.role == "shadow" for model in self.of(name)):
            raise UnknownVersion(f"version {version} of model {name!r} is a shadow: it gets copies, and answers nobody")
        versions = ", ".join(dict.fromkeys(model.version for model in known))
        served = f"its version is {versions}" if len(known) == 1 else f"its versions are {versions}"
        raise UnknownVersion(f"version {version[:100]!r} of model {name!r} is not served; {served}")

    def _only(self, kind: Kind, task: str) -> "Split[ServedModel]":
        known = [split for split in self._splits.values() if not split.current.state.on_trial]
        taking = [split for split in known if split.current.spec.takes(kind)]
        fitting = [split for split in taking if task and split.current.task == task] or taking
        if len(fitting) == 1:
            return fitting[0]
        names = ", ".join(split.current.name for split in fitting or known)
        if not fitting:
            raise InvalidInput(f"model is empty and of the served models none takes {kind}: {names}"[:500])
        meant = f" for {task}" if task and fitting[0].current.task == task else ""
        told = f"model is empty and of the served models several take {kind}{meant}: {names}"[:500]
        raise InvalidInput(f"{told}; name the one that is meant")

    def _named(self, name: str) -> "Split[ServedModel]":
        try:
            return self._splits[name]
        except KeyError:
            if name in self._broken:
                reason = self._broken[name].reason
                raise NotReady(f"model {name!r} can't be served: {reason}", retry_after_ms=RETRY_MS["failed"]) from None
            raise UnknownModel(f"model {name[:100]!r} is not served") from None


def _refuse_unready(model: ServedModel) -> None:
    """Raise what says why a version can't answer now; nothing for one that the request itself brings back."""
    phase = model.state.phase
    if phase == "unloaded":
        raise UnknownModel(f"model {model.name!r} has no loaded version; load it first")
    if model.waits_for_load:
        return
    raise NotReady(f"model {model.name!r} is not ready: {model.state.reason}", retry_after_ms=RETRY_MS[phase])
