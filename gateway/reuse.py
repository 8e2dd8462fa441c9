"""What need not be computed: kept answers, kept tensors, and what is being computed already. Event loop only."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import msgspec

from gateway.cache import Made, ResultCache, Store, digest_of, key_of
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

    def key(self, model: ServedModel, request: Request, options: Options) -> bytes | None:
        """What this request is kept by; None when it is to be computed, whatever there is."""
        if self._results is None and self._flight is None:
            return None
        if not model.cached or not request.reuse or request.unreadable:
            return None
        made = Made(model.name, model.version, model.revision, model.number)
        inputs = [digest_of(raw) for raw in request.inputs]
        return key_of(made, inputs, _encode(options), partial=request.partial_results)

    def found(self, key: bytes | None, request: Request) -> Results | None:
        """The kept answer, if there is one."""
        if key is None or self._results is None:
            return None
        found = self._results.get(key, now_s())
        if found is not None:
            request.times.reused = "kept"
        return None if found is None else list(found)

    async def run(self, key: bytes | None, request: Request, compute: Callable[[], Awaitable[Results]]) -> Results:
        """What `compute` gives, or gives somebody who asks the same just now. Raises what `compute` raises."""
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

    def keep(self, key: bytes | None, request: Request, results: Results) -> None:
        """Keep an answer that has just been computed."""
        times = request.times
        if key is not None and self._results is not None and not times.nonfinite_rows and not times.reused:
            self._results.put(key, results, now_s())

    # ------------------------------------------------------------ prepared tensors

    def prepared_key(self, lease: Lease, raw: RawInput, options: Options) -> bytes | None:
        """What an item's tensors are kept by; None when they are not, or are to be made anew."""
        model = lease.model
        if self._prepared is None or not lease.terms.reuse or not model.cached or model.pipeline.passthrough:
            return None
        return prepared_key(model.preprocessing, digest_of(raw), _encode(options))

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
