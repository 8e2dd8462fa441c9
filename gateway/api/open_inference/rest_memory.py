"""`/v2/systemsharedmemory/…`: regions of this machine's shared memory, for clients that lay their tensors there."""

import msgspec
from fastapi.responses import Response

from gateway.api.http_call import HttpCall, json_response
from gateway.api.open_inference.shared_memory import RegionStatus, SharedMemory


class _Register(msgspec.Struct):
    key: str
    byte_size: int
    offset: int = 0


_STATUS = ("name", "key", "offset", "byte_size")
"""The words for `RegionStatus`, in its order."""


class Regions:
    """The endpoints; 501 unless `gateway.system_shared_memory_prefix` is set."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    async def status(self, call: HttpCall) -> Response:
        """`GET /v2/systemsharedmemory[/region/{region}]/status`."""
        found = self._memory.status(_name(call))
        return json_response([dict(zip(_STATUS, one, strict=True)) for one in found])

    async def register(self, call: HttpCall) -> Response:
        """`POST /v2/systemsharedmemory/region/{region}/register`."""
        given = await call.json(_Register)
        self._memory.register(RegionStatus(_name(call), given.key, given.offset, given.byte_size))
        return json_response({})

    async def unregister(self, call: HttpCall) -> Response:
        """`POST /v2/systemsharedmemory[/region/{region}]/unregister`; without a region all of them."""
        self._memory.unregister(_name(call))
        return json_response({})


def _name(call: HttpCall) -> str:
    name: str = call.request.path_params.get("region", "")
    return name
