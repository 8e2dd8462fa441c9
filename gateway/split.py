"""Which of two versions a request goes to: sticky, the same in every gateway and after every restart. Pure.

A key (a user's routing key, or the request's id) has a fixed point in [0, 1), and a version with a share of p percent
gets the keys below p/100. So a growing share only ever moves keys towards the canary, and nobody goes back and forth.
The point depends on the canary, so that it is not always the same users who try what is new.
"""

import hashlib
from typing import Generic, NamedTuple, Protocol, TypeVar

from shared.traffic import By


class _State(Protocol):
    @property
    def phase(self) -> str: ...


class _Version(Protocol):
    """What is needed of a served version."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def state(self) -> _State: ...


M = TypeVar("M", bound=_Version)

_ANSWERS = ("ready", "on_demand")
"""Phases of a canary that can take its share; in all others the current version answers everybody."""


def point(model: str, canary: str, key: str) -> float:
    """Where a key stands in [0, 1) as far as this canary of this model goes.

    53 of the hash's 64 bits: as many as a float holds, so that rounding never makes a 1 of it.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (model, canary, key):
        data = part.encode(errors="surrogatepass")  # JSON may bring half of a pair
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return (int.from_bytes(digest.digest(), "little") >> 11) / (1 << 53)


class Split(NamedTuple, Generic[M]):
    """How the callers of one model are divided."""

    current: M
    canary: M | None = None
    percent: float = 0.0
    """Of the callers, 0 to 100: answered by the canary, or copied to it."""
    by: By = "routing_key"
    shadow: bool = False
    """Whether the canary only gets copies, and never answers."""

    def key(self, routing_key: str, request_id: str) -> str:
        """What of a request decides; one without a routing key goes by its id."""
        return request_id if self.by == "request_id" else routing_key or request_id

    def answers(self, key: str) -> M:
        """The version that answers this key: the current one, unless the canary has it and can answer."""
        found = None if self.shadow else self._canary(key)
        return self.current if found is None else found

    def copies(self, key: str) -> M | None:
        """The shadow that is to get a copy of what this key asks, if any."""
        return self._canary(key) if self.shadow else None

    def _canary(self, key: str) -> M | None:
        canary = self.canary
        if canary is None or canary.state.phase not in _ANSWERS:
            return None
        return canary if point(canary.name, canary.version, key) < self.percent / 100 else None
