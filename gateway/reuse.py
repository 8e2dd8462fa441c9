"""What need not be computed: kept answers, kept tensors, and what is being computed already. Event loop only."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import msgspec

from gateway.cache import Digests, Made, ResultCache, Store, key_of
from gateway.leases import Lease
from gateway.prepared_cache import Kept, PreparedCache, prepared_key
from gateway.request import Request
from gateway.served import ServedModel
from gateway.single_flight import SingleFlight
from shared.clock import now_s
from shared.errors import HeadraceError
from shared.messages import Prepared
from shared.pipeline import Options, RawInput
from shared.results import Result
from shared.settings_base import CacheSettings
from shared.tensors import SlotRef, Tensor

Results: TypeAlias = list[Result | HeadraceError]

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


BEFORE_THE_DOOR = 256 * 1024
"""Bytes of a request that is looked up before admission, so that what is kept needs no room: at most 0.2 ms each. What
is larger is hashed once it is let in: a flood of requests that are to be refused must cost next to nothing."""


IN_A_THREAD = 1 << 20
"""Bytes; as many take about 1 ms, for which nobody else is answered. A thread's round trip takes 0.1 ms."""


class Question:
    """A request at the version that is to answer it, and what it is kept by."""

    __slots__ = ("digests", "key", "model", "options", "request")

    def __init__(self, model: ServedModel, request: Request, options: Options, digests: Digests | None = None) -> None:
        self.model = model
        self.request = request
        self.options = options
        self.digests = digests or Digests()
        self.key: bytes | None = None
        """Once it was looked up; None: it is to be computed, whatever there is."""

    @property
    def is_large(self) -> bool:
        """Whether it is to be admitted before it is looked up."""
        return self.request.nbytes > BEFORE_THE_DOOR


class Reuse:
    """All of it, each part only when it is switched on."""

    def __init__(self, settings: CacheSettings) -> None:
        self._results: ResultCache | None = None
        if settings.results_budget_bytes:
            self._results = ResultCache(settings.results_budget_bytes, settings.ttl_s)
        self._prepared: PreparedCache | None = None
        if settings.prepared_budget_bytes:
            self._prepared = PreparedCache(settings.prepared_budget_bytes, settings.ttl_s)
        self._flight: SingleFlight[tuple[Results, int]] | None = SingleFlight() if settings.single_flight else None

    async def look(self, question: Question) -> Results | None:
        """The kept answer, if there is one. From here on it is known what this question is kept by."""
        key = question.key = await self._key(question)
        if key is None or self._results is None:
            return None
        found = self._results.get(key, now_s())
        if found is not None:
            question.request.times.reused = "kept"
        return None if found is None else list(found)

    async def _key(self, question: Question) -> bytes | None:
        model, request = question.model, question.request
        if self._results is None and self._flight is None:
            return None
        if not model.cached or not request.reuse or request.unreadable:
            return None
        made = Made(model.name, model.version, model.revision, model.number)
        inputs = await _digests(question.digests, request.inputs)
        return key_of(made, inputs, _encode(question.options), partial=request.partial_results)

    async def run(self, question: Question, compute: Callable[[], Awaitable[Results]]) -> Results:
        """What `compute` gives, or gives somebody who asks the same just now. Raises what `compute` raises."""
        key, request = question.key, question.request
        if key is None or self._flight is None:
            return await compute()
        led = False

        async def lead() -> tuple[Results, int]:
            nonlocal led
            led = True
            return await compute(), request.times.nonfinite_rows

        try:
            results, nonfinite_rows = await self._flight.run(key, lead)
        except Exception:
            if not led:  # what failed once must not count once for everybody who asked
                request.times.reused = "shared"
            raise
        if not led:
            request.times.reused, request.times.nonfinite_rows = "shared", nonfinite_rows
        return list(results)

    def keep(self, question: Question, results: Results) -> None:
        """Keep an answer that has just been computed."""
        key, times = question.key, question.request.times
        if key is not None and self._results is not None and not times.nonfinite_rows and not times.reused:
            self._results.put(key, results, now_s())

    # ------------------------------------------------------------ prepared tensors

    async def prepared_key(self, lease: Lease, raw: RawInput, options: Options) -> bytes | None:
        """What an item's tensors are kept by; None when they are not, or are to be made anew."""
        model = lease.model
        if self._prepared is None or not lease.terms.reuse or not model.cached or model.pipeline.passthrough:
            return None
        (digest,) = await _digests(lease.terms.digests, [raw])
        return prepared_key(model.preprocessing, digest, _encode(options))

    def prepared(self, key: bytes | None, lease: Lease) -> Prepared | None:
        """The kept tensors, written into the lease's slots, if there are any and they fit."""
        kept = self._prepared.get(key, now_s()) if self._prepared is not None and key is not None else None
        tensors = _placed(kept, lease) if kept is not None else None
        if kept is None or tensors is None:
            return None
        lease.prepared()
        return Prepared(0, tensors, kept.context, 0.0)

    def keep_prepared(self, key: bytes | None, prepared: Prepared, arena: memoryview) -> None:
        """Keep what a pool process has just made."""
        if self._prepared is not None and key is not None:
            self._prepared.put(key, prepared.tensors, prepared.context, arena, now_s())

    # ------------------------------------------------------------ shown

    def stores(self) -> Sequence[tuple[str, Store[bytes] | Store[Kept]]]:
        """Those that are switched on, by name."""
        found: list[tuple[str, Store[bytes] | Store[Kept]]] = []
        if self._results is not None:
            found.append(("results", self._results.store))
        if self._prepared is not None:
            found.append(("prepared", self._prepared.store))
        return found

    def joined(self) -> int:
        """Requests that were answered by what another one computed at the same time."""
        return self._flight.joined if self._flight is not None else 0


async def _digests(digests: Digests, inputs: Sequence[RawInput]) -> list[bytes]:
    """Of each input. The loop's executor bounds how many threads are busy, admission how many requests wait for one."""
    if digests.missing_bytes(inputs) > IN_A_THREAD:
        return await asyncio.to_thread(digests.of, inputs)
    return digests.of(inputs)


def _placed(kept: Kept, lease: Lease) -> list[Tensor] | None:
    """The tensors in the slots that a pool process would have written; None when they don't fit these."""
    if not lease.inputs:
        return list(kept.tensors)
    if len(lease.inputs) != len(kept.tensors):
        return None
    placed: list[Tensor] = []
    for slot, tensor in zip(lease.inputs, kept.tensors, strict=True):
        if isinstance(tensor.data, SlotRef) or len(tensor.data) != len(slot.view):
            return None
        slot.view[:] = tensor.data
        placed.append(Tensor(tensor.name, tensor.datatype, tensor.shape, slot.ref))
    return placed
