"""The `prepare` stage: one encoded input to a pool process, its tensors back in the lease's slots."""

from typing import cast

import msgspec

from gateway.leases import Lease
from gateway.pool_client import PoolClient
from shared.messages import Prepared, PrepareJob
from shared.pipeline import Options, RawInput
from shared.tensors import SlotRef, Tensor

_encode = msgspec.msgpack.Encoder().encode


_NO_CONTEXT = _encode({})


async def prepare(pool: PoolClient, lease: Lease, raw: RawInput, options: Options, deadline_s: float) -> Prepared:
    """Prepare one item. Raises InvalidInput and the other caller's faults, DeadlineExceeded, ProcessLost."""
    if lease.model.pipeline.passthrough:
        return _pass_through(lease, raw)
    payload: bytes | SlotRef
    slots = list(lease.inputs)
    if lease.payload is not None:
        lease.payload.view[:] = raw.data  # the one copy of a large payload
        payload = lease.payload.ref
        slots.append(lease.payload)
    else:
        payload = bytes(raw.data)
    job = PrepareJob(
        0,  # the pool client numbers it
        deadline_s,
        lease.model.number,
        raw.kind,
        payload,
        _encode(options),
        [slot.ref for slot in lease.inputs],
        [Tensor(name, datatype, shape, bytes(data)) for name, datatype, shape, data in raw.tensors],
    )
    prepared = cast("Prepared", await pool.submit(job, slots, lease.priority))
    lease.prepared()
    return prepared


def _pass_through(lease: Lease, raw: RawInput) -> Prepared:
    """Nothing to prepare: the tensors' bytes go to the worker as they are, large ones through the arena."""
    tensors = []
    for number, (name, datatype, shape, data) in enumerate(raw.tensors):
        place: bytes | SlotRef
        if lease.inputs:
            slot = lease.inputs[number]
            slot.view[:] = data  # the one copy of a large tensor
            place = slot.ref
        else:
            place = bytes(data)
        tensors.append(Tensor(name, datatype, shape, place))
    lease.prepared()
    return Prepared(0, tensors, _NO_CONTEXT, 0.0)
