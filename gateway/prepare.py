"""The `prepare` stage: one encoded input to a pool process, its tensors back in the lease's slots."""

from typing import cast

import msgspec

from gateway.leases import Lease
from gateway.pool_client import PoolClient
from shared.messages import Prepared, PrepareJob
from shared.pipeline import Options, RawInput
from shared.tensors import SlotRef

_encode = msgspec.msgpack.Encoder().encode


async def prepare(pool: PoolClient, lease: Lease, raw: RawInput, options: Options, deadline_s: float) -> Prepared:
    """Prepare one input. Raises InvalidInput and the other caller's faults, DeadlineExceeded, ProcessLost."""
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
        list(raw.tensors),
    )
    prepared = cast("Prepared", await pool.submit(job, slots))
    lease.prepared()
    return prepared
