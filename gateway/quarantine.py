"""Inputs that have ended two pool processes: refused for a while, so that sending one again costs nobody a process.

Pure policy: `now_s` is passed in. Keys are digests that the gateway computes itself from model and bytes.
"""

import hashlib

KEEP_S = 600.0
"""Long enough to end a retry loop, short enough for a repaired pipeline to be tried again."""
MOST = 1024
"""Digests kept; the oldest goes first. An attacker with more poison than that still pays two tries for each."""


def digest_of(model: int, payload: bytes | memoryview) -> bytes:
    """16 bytes that stand for this input of this model."""
    return hashlib.blake2b(payload, digest_size=16, salt=model.to_bytes(8, "little")).digest()


class Quarantine:
    """A bounded set of digests with an end."""

    def __init__(self) -> None:
        self._until_s: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, digest: bytes, now_s: float) -> None:
        """Refuse this input from now on."""
        if len(self._until_s) >= MOST:
            del self._until_s[next(iter(self._until_s))]
        self._until_s[digest] = now_s + KEEP_S

    def holds(self, digest: bytes, now_s: float) -> bool:
        """Whether this input is refused now."""
        until_s = self._until_s.get(digest)
        if until_s is None:
            return False
        if now_s >= until_s:
            del self._until_s[digest]
            return False
        return True
