"""Inputs that have ended two processes: refused for a while, so that sending one again costs nobody a process.

One for pool processes and workers alike; the flow asks before an item is leased anything.

Pure policy: `now_s` is passed in. Keys are digests that the gateway computes itself from model and bytes.
"""

import hashlib

from shared.errors import ModelDisabled
from shared.pipeline import RawInput

KEEP_S = 600.0
"""Long enough to end a retry loop, short enough for a repaired pipeline to be tried again."""
MOST = 1024
"""Digests kept; the oldest goes first. An attacker with more poison than that still pays two tries for each."""


def digest_of(model: int, raw: RawInput) -> bytes:
    """16 bytes that stand for this input of this model."""
    digest = hashlib.blake2b(raw.data, digest_size=16, salt=model.to_bytes(8, "little"))
    for name, datatype, shape, data in raw.tensors:
        digest.update(f"{name}\0{datatype}\0{shape}\0".encode())
        digest.update(data)
    return digest.digest()


class Quarantine:
    """A bounded set of digests with an end."""

    def __init__(self) -> None:
        self._until_s: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._until_s)

    def check(self, model: int, raw: RawInput, now_s: float) -> None:
        """Raises ModelDisabled for an input that is held. Costs nothing while there is none."""
        if self._until_s:
            self.check_digest(digest_of(model, raw), now_s)

    def check_digest(self, digest: bytes, now_s: float) -> None:
        """The same, where the digest is there already."""
        if self.holds(digest, now_s):
            raise ModelDisabled("this input has ended two processes and is refused for some minutes")

    def add(self, digest: bytes, now_s: float) -> None:
        """Refuse this input from now on."""
        self._until_s.pop(digest, None)
        if len(self._until_s) >= MOST:
            del self._until_s[next(iter(self._until_s))]
        self._until_s[digest] = now_s + KEEP_S

    def holds(self, digest: bytes, now_s: float) -> bool:
        """Whether this input is refused now."""
        while self._until_s and now_s >= next(iter(self._until_s.values())):  # oldest first: all are kept equally long
            del self._until_s[next(iter(self._until_s))]
        return digest in self._until_s
