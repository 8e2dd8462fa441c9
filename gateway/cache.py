"""Answers that are kept, so that the same question costs no second pass. Off unless a budget is set. Pure.

A key is made by the server alone, of everything that an answer depends on and nothing that a caller claims: two callers
share an answer exactly when their bytes, options and the model's bytes are the same. Answers are kept encoded, so that
their size is known to the byte, and each hit is a copy that nobody else holds.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from shared.errors import HeadraceError
from shared.pipeline import RawInput
from shared.results import Result

V = TypeVar("V")

ENTRY_BYTES = 400
"""What an entry takes beside its payload: key, bookkeeping and the objects' own headers, rounded up."""


class Made(NamedTuple):
    """What makes an answer: a version as this gateway serves it."""

    name: str
    version: str
    """The content hash."""
    revision: str
    """Which content of model.yaml."""
    number: int
    """The gateway's own for what it has loaded: labels and code in the model's folder have no hash of their own."""


class KeyMaker:
    """A digest over parts that can't run into each other: each is preceded by its length."""

    __slots__ = ("_hash",)

    def __init__(self, what: str) -> None:
        """`what`: the kind of key, so that no key of one kind is one of another."""
        self._hash = hashlib.sha256()
        self.text(what)

    def data(self, data: bytes | memoryview) -> None:
        """One part."""
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        self._hash.update(size.to_bytes(8, "little"))
        self._hash.update(data)

    def text(self, text: str) -> None:
        """One part. JSON may bring half of a surrogate pair."""
        self.data(text.encode(errors="surrogatepass"))

    def numbers(self, numbers: Sequence[int]) -> None:
        """How many, and each."""
        self.data(b"".join(number.to_bytes(8, "little", signed=True) for number in numbers))

    def key(self) -> bytes:
        """32 bytes."""
        return self._hash.digest()


def digest_of(raw: RawInput) -> bytes:
    """32 bytes that stand for an input: kind, bytes, and tensors with all that they are. About 1 ms for a megabyte."""
    maker = KeyMaker("input")
    maker.text(raw.kind)
    maker.data(raw.data)
    maker.numbers((len(raw.tensors),))
    for name, datatype, shape, data in raw.tensors:
        maker.text(name)
        maker.text(datatype)
        maker.numbers(shape)
        maker.data(data)
    return maker.key()


class Digests:
    """Of one request's inputs: each is made once, for every cache that asks."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[int, tuple[RawInput, bytes]] = {}
        """By the object's id; the object is held, so that no other one gets its id."""

    def missing_bytes(self, inputs: Sequence[RawInput]) -> int:
        """Bytes that `of` would have to read."""
        return sum(raw.nbytes for raw in inputs if id(raw) not in self._found)

    def of(self, inputs: Sequence[RawInput]) -> list[bytes]:
        """The digest of each."""
        for raw in inputs:
            if id(raw) not in self._found:
                self._found[id(raw)] = raw, digest_of(raw)
        return [self._found[id(raw)][1] for raw in inputs]


def key_of(made: Made, inputs: Sequence[bytes], options: bytes, *, partial: bool = False) -> bytes:
    """The key of a question.

    `inputs`: the digest of each, in order. `options`: the parsed ones, encoded, so that a default that is spelt out is
    the same question. `partial`: whether failures of single inputs come back as results: who shares an answer while it
    is computed must want the same of them.
    """
    maker = KeyMaker("answer")
    maker.text(made.name)
    maker.text(made.version)
    maker.text(made.revision)
    maker.numbers((made.number, partial))
    maker.data(options)
    for digest in inputs:
        maker.data(digest)
    return maker.key()


class _Entry(NamedTuple, Generic[V]):
    value: V
    nbytes: int
    until_s: float


class Store(Generic[V]):
    """What was used last stays, up to a budget in bytes and for a time. Values must never be changed by anybody."""

    def __init__(self, budget_bytes: int, ttl_s: float) -> None:
        """`ttl_s` counts from when it was put; being used does not prolong it."""
        self._budget_bytes = budget_bytes
        self._ttl_s = ttl_s
        self._entries: OrderedDict[bytes, _Entry[V]] = OrderedDict()
        self.nbytes = 0
        """Of all entries, `ENTRY_BYTES` for each included."""
        self.hits = self.misses = 0
        self.evictions = 0
        """Thrown out before their time, for want of room."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes, now_s: float) -> V | None:
        """What is kept under this key, if it is."""
        entry = self._entries.get(key)
        if entry is not None and now_s >= entry.until_s:
            self._drop(key)
            entry = None
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry.value

    def put(self, key: bytes, value: V, nbytes: int, now_s: float) -> None:
        """Keep it; what is larger than a quarter of the budget is not worth all that would have to go for it."""
        size = nbytes + ENTRY_BYTES
        self._drop(key)
        if size > self._budget_bytes // 4:
            return
        self._entries[key] = _Entry(value, size, now_s + self._ttl_s)
        self.nbytes += size
        while self.nbytes > self._budget_bytes:
            oldest, entry = next(iter(self._entries.items()))
            self._drop(oldest)
            self.evictions += now_s < entry.until_s

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.nbytes -= entry.nbytes


class ResultCache:
    """Answers of whole requests."""

    def __init__(self, budget_bytes: int, ttl_s: float) -> None:
        self.store: Store[bytes] = Store(budget_bytes, ttl_s)
        """With the counters."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(list[Result]).decode

    def get(self, key: bytes, now_s: float) -> list[Result] | None:
        """The answer, the caller's own to change."""
        found = self.store.get(key, now_s)
        return None if found is None else self._decode(found)

    def put(self, key: bytes, results: Sequence[Result | HeadraceError], now_s: float) -> None:
        """Keep an answer. One with failures in it is not kept: the next try may go better.

        Nor should the caller bring one with rows of NaN or infinity: what says so is in the stage times, not in it.
        """
        if any(isinstance(result, HeadraceError) for result in results):
            return
        data = self._encode(results)
        self.store.put(key, data, len(data), now_s)
