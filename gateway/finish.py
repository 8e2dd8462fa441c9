"""The `finish` stage: output tensors of one item to its results, here or in a pool process."""

from typing import Any, cast

import msgspec

from gateway.leases import Lease
from gateway.pool_client import PoolClient
from shared.messages import Finished, FinishJob
from shared.pipeline import Options
from shared.results import Result, Tensors
from shared.tensors import SlotRef, Tensor, as_array

_encode = msgspec.msgpack.Encoder().encode
_decode_context = msgspec.msgpack.Decoder(dict[str, Any]).decode


class Finisher:
    """Runs `postprocess` inline where the pipeline says that it is trivial: a process hop would cost more."""

    def __init__(self, pool: PoolClient) -> None:
        self._pool = pool

    async def finish(
        self, lease: Lease, tensors: list[Tensor], context: bytes, options: Options, deadline_s: float
    ) -> list[Result]:
        """One result per row. Raises DeadlineExceeded or what the pipeline's `postprocess` raises."""
        pipeline = lease.model.pipeline
        if pipeline.passthrough:
            return [Tensors([_copied_out(tensor, lease) for tensor in tensors])]
        if pipeline.postprocess_is_trivial:
            arrays = [as_array(tensor, _memory(lease)) for tensor in tensors]
            return pipeline.postprocess(arrays, _decode_context(context), options)
        job = FinishJob(0, deadline_s, lease.model.number, _encode(options), context, tensors)
        finished = cast("Finished", await self._pool.submit(job, lease.outputs, lease.priority))
        return finished.results


def _memory(lease: Lease) -> memoryview | None:
    return lease.arena_memory if lease.outputs else None


def _copied_out(tensor: Tensor, lease: Lease) -> Tensor:
    """The slot is given back before the answer has left: its bytes move into the answer here."""
    if not isinstance(tensor.data, SlotRef):
        return tensor
    place = tensor.data
    data = bytes(lease.arena_memory[place.offset : place.offset + place.nbytes])
    return Tensor(tensor.name, tensor.datatype, tensor.shape, data)
