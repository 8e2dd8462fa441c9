"""What the repository says of a model's traffic and configuration, read and written beside the event loop."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from shared.errors import Conflict, NotReady, StartupError, UnknownVersion
from shared.model_config import config_bytes
from shared.repository import Repository
from shared.repository_writer import change_traffic
from shared.traffic import Traffic

T = TypeVar("T")


class InForce(NamedTuple):
    """What a model is served by."""

    traffic: Traffic
    config: bytes
    """model.yaml."""


class ChangedMeanwhile(Conflict):
    """What an order was made for is not in force any more."""


class ModelFiles:
    """Every call is a thread's, since a disk may hang."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def wanted(self, name: str) -> InForce:
        """What the disk says now. Raises UnknownModel, UnknownVersion, NotReady."""
        return await _in_thread(f"model {name[:100]!r} can't be loaded: ", lambda: self._read(name))

    async def check_there(self, name: str, traffic: Traffic) -> None:
        """Raises UnknownVersion for what is to answer; a standby that was removed is nobody's mistake."""
        there = await _in_thread("", lambda: Repository(self._root, only=name).versions(name))
        named = [traffic.current, *([traffic.canary.version] if traffic.canary is not None else [])]
        for version in named:
            if version not in there:
                raise UnknownVersion(f"model {name[:100]!r} has no version {version[:100]!r}")

    async def write(self, name: str, before: Traffic, change: Callable[[Traffic], Traffic]) -> Traffic:
        """Change traffic.json.

        Raises Conflict when it is not as `before` any more, what `change` raises, NotReady when the disk refuses.
        """

        def changed(now: Traffic) -> Traffic:
            if now.without_history() != before.without_history():
                raise ChangedMeanwhile(
                    f"the traffic of model {name[:100]!r} was changed by somebody else meanwhile; try again"
                )
            return change(now)

        return await _in_thread("", lambda: change_traffic(self._root, name, changed))

    def _read(self, name: str) -> InForce:
        repository = Repository(self._root, only=name)
        current = repository.current(name)
        traffic = repository.traffic(name)
        if not traffic.current:
            traffic = Traffic(current=current)
        return InForce(traffic, config_bytes(self._root / name))


async def _in_thread(prefix: str, work: Callable[[], T]) -> T:
    """Raises what it raises, NotReady with this prefix for what is wrong with the files."""
    try:
        return await asyncio.to_thread(work)
    except StartupError as error:
        raise NotReady(prefix + error.text) from error
