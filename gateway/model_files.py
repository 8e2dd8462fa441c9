"""What the repository says of a model's traffic and configuration, read and written beside the event loop."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shared.errors import NotReady, StartupError, UnknownVersion
from shared.model_config import config_bytes
from shared.repository import Repository
from shared.repository_writer import change_traffic
from shared.traffic import Traffic


class InForce(NamedTuple):
    """What a model is served by."""

    traffic: Traffic
    config: bytes
    """model.yaml."""


class ModelFiles:
    """Every call is a thread's, since a disk may hang."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def wanted(self, name: str) -> InForce:
        """What the disk says now. Raises UnknownModel, UnknownVersion, NotReady."""
        try:
            return await asyncio.to_thread(self._read, name)
        except StartupError as error:
            raise NotReady(f"model {name[:100]!r} can't be loaded: {error.text}") from error

    async def check_there(self, name: str, traffic: Traffic) -> None:
        """Raises UnknownVersion for what is to answer; a standby that was removed is nobody's mistake."""
        there = await asyncio.to_thread(lambda: Repository(self._root).versions(name))
        named = [traffic.current, *([traffic.canary.version] if traffic.canary is not None else [])]
        for version in named:
            if version not in there:
                raise UnknownVersion(f"model {name[:100]!r} has no version {version[:100]!r}")

    async def write(self, name: str, change: Callable[[Traffic], Traffic]) -> Traffic:
        """Change traffic.json. Raises what `change` raises, NotReady when the disk refuses."""
        try:
            return await asyncio.to_thread(change_traffic, self._root, name, change)
        except StartupError as error:
            raise NotReady(error.text) from error

    def _read(self, name: str) -> InForce:
        repository = Repository(self._root)
        current = repository.current(name)
        traffic = repository.traffic(name)
        if not traffic.current:
            traffic = Traffic(current=current)
        return InForce(traffic, config_bytes(self._root / name))
