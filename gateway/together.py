"""What is shown of all gateways of one server, whichever of them was asked: metrics, `/debug`, figures of versions."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from gateway.expositions import merged
from gateway.figures import VersionFigures
from gateway.figures import merged as merged_figures
from gateway.model_control import ModelControl
from gateway.peers import Alive, Figures, Held, PeerGone, Show, ask
from gateway.state import held
from shared.errors import HeadraceError

SHOW_LIMIT_S = 1.0
"""A scrape must not wait for a gateway that hangs; one that works answers within some milliseconds."""


class Together:
    """One gateway's view of all of them. Event loop only."""

    def __init__(self, index: int, sockets: list[Path], control: ModelControl) -> None:
        """`sockets`: where each gateway is asked, this one's at `index`."""
        self._index = index
        self._sockets = sockets
        self._control = control
        self._own_metrics: Callable[[], bytes]
        self._own_debug: Callable[[], dict[str, Any]]

    def connect(self, own_metrics: Callable[[], bytes], own_debug: Callable[[], dict[str, Any]]) -> None:
        """What this gateway by itself has to show."""
        self._own_metrics = own_metrics
        self._own_debug = own_debug

    async def metrics(self) -> bytes:
        """All gateways' metrics as one page."""
        texts = {str(self._index): self._own_metrics().decode()}
        for index, body in (await self._shown(Show("metrics"))).items():
            texts[str(index)] = body
        return merged(dict(sorted(texts.items(), key=lambda each: int(each[0])))).encode()

    async def debug(self) -> dict[str, Any]:
        """All gateways' `/debug`; ready when each one is."""
        shown = {self._index: self._own_debug()}
        for index, body in (await self._shown(Show("debug"))).items():
            shown[index] = {"ready": False, "reason": "it does not answer"} if body is None else json.loads(body)
        not_ready = [f"gateway {index}: {each['reason']}" for index, each in sorted(shown.items()) if not each["ready"]]
        return {
            "ready": not not_ready,
            "reason": "; ".join(not_ready) or None,
            "gateways": {str(index): shown[index] for index in sorted(shown)},
        }

    async def _shown(self, question: Show) -> dict[int, Any]:
        async def one(index: int) -> str | None:
            try:
                return (await ask(self._sockets[index], question, SHOW_LIMIT_S)).decode()
            except (PeerGone, HeadraceError):
                return None

        others = self._others()
        return dict(zip(others, await asyncio.gather(*map(one, others)), strict=True))

    async def all_figures(self, name: str) -> list[VersionFigures]:
        """What the versions have done at all gateways that answer. Raises UnknownModel."""
        own = self._control.figures(name)
        asked = [ask(self._sockets[index], Figures(name), SHOW_LIMIT_S) for index in self._others()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        heard = [answer for answer in answers if isinstance(answer, bytes)]
        return merged_figures([own, *(msgspec.msgpack.decode(each, type=list[VersionFigures]) for each in heard)])

    async def held(self) -> set[tuple[str, str]]:
        """Versions that any gateway holds; one that is gone, or hangs, holds nothing that would be asked for again."""
        asked = [ask(self._sockets[index], Held(), SHOW_LIMIT_S) for index in self._others()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = held(self._control.index())
        for answer in answers:
            if isinstance(answer, bytes):
                found.update(msgspec.msgpack.decode(answer, type=list[tuple[str, str]]))
        return found

    def show(self, asked: Alive | Show | Figures | Held) -> bytes:
        """What another gateway asks to see of this one. Raises UnknownModel."""
        match asked:
            case Figures(model=name):
                return msgspec.msgpack.encode(self._control.figures(name))
            case Held():
                return msgspec.msgpack.encode(sorted(held(self._control.index())))
            case Show(what="metrics"):
                return self._own_metrics()
            case Show():
                return json.dumps(self._own_debug()).encode()
        return b""

    def _others(self) -> list[int]:
        return [index for index in range(len(self._sockets)) if index != self._index]
