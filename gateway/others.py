"""What an order asks of the other gateways of one server."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from gateway.figures import VersionFigures
from shared.traffic import Traffic


class Others(Protocol):
    """The other gateways of this server."""

    def prepare(self, name: str, traffic: Traffic, *, at_once: bool) -> Awaitable[None]:
        """Have every one of them load and prove what this traffic needs. Raises HeadraceError.

        `at_once`: it needs no load; who does not answer soon follows later.
        """

    def abandon(self, name: str, traffic: Traffic) -> Awaitable[None]:
        """What they have prepared is not needed."""

    def adopt(self, name: str, unwritten: Traffic | None) -> Awaitable[None]:
        """Let them read traffic.json and model.yaml again; `unwritten`: what the disk is to say and can't yet."""

    def all_figures(self, name: str) -> Awaitable[Sequence[VersionFigures]]:
        """What a model's versions have done since the canary started, at them and here."""


class Nobody:
    """There are no other gateways."""

    def __init__(self, figures: Callable[[str], list[VersionFigures]]) -> None:
        """`figures`: what is known here."""
        self._figures = figures

    async def prepare(self, name: str, traffic: Traffic, *, at_once: bool) -> None:
        """Nobody to ask."""

    async def abandon(self, name: str, traffic: Traffic) -> None:
        """Nobody to tell."""

    async def adopt(self, name: str, unwritten: Traffic | None) -> None:
        """Nobody to tell."""

    async def all_figures(self, name: str) -> list[VersionFigures]:
        """Those of this gateway."""
        return self._figures(name)
