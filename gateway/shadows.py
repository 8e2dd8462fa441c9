"""Copies of requests for a shadow version: computed beside, compared, and never answered with. On the event loop.

A copy is begun when its request has been answered, so that it costs the caller nothing, and only while there is room
for it: it goes by admission like any request, behind everything else that waits for the worker. No bytes are copied:
what an edge has received is never changed, and what lay in a caller's shared memory was read when the request came.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from gateway.admission import Admission
from gateway.agreement import agree
from gateway.judge import Judge
from gateway.pieces import Pieces, pieces_of, rows_of
from gateway.request import SHADOW_PRIORITY, Request, StageTimes
from gateway.served import ServedModel, Terms
from shared.clock import now_s
from shared.errors import Code, HeadraceError
from shared.logs import get_logger
from shared.pipeline import Options
from shared.results import Embedding, Result, Tensors

log = get_logger()

MOST = 64
"""Copies under way; with two full batches of 32 a shadow's worker is never idle. More are left out, and counted."""

MOST_BYTES = 64 << 20
"""Of inputs and answers that are kept for copies; one that is larger by itself is made while there is no other."""
FLOAT_BYTES = 32
"""Of one number in a list."""
LARGE = 256 * 1024
"""Bytes of an answer from which on it is compared in a thread: some milliseconds for a few megabytes."""

Results: TypeAlias = list[Result | HeadraceError]
Compute: TypeAlias = "Callable[[ServedModel, list[Pieces], Request, Options, Terms], Awaitable[Results]]"


class Shadows:
    """Copies under way."""

    def __init__(self, admission: Admission, judge: Judge, compute: Compute) -> None:
        """`compute` is the flow, from the lease to the results."""
        self._admission = admission
        self._judge = judge
        self._compute = compute
        self._copies: set[asyncio.Task[None]] = set()
        self._held_bytes = 0
        self.begun = 0
        self.left_out = 0

    def copy(self, shadow: ServedModel, request: Request, answered: Results) -> None:
        """The request was answered so by the current version: what does the shadow say?"""
        nbytes = request.nbytes + _nbytes(answered)
        if len(self._copies) >= MOST or (self._copies and self._held_bytes + nbytes > MOST_BYTES):
            self.left_out += 1
            return
        self.begun += 1
        shadow.requests += 1
        self._held_bytes += nbytes
        copy = asyncio.get_running_loop().create_task(self._compared(shadow, _again(request), answered))
        self._copies.add(copy)
        copy.add_done_callback(lambda done: self._ended(done, shadow, nbytes))

    def _ended(self, copy: asyncio.Task[None], shadow: ServedModel, nbytes: int) -> None:
        self._copies.discard(copy)
        shadow.requests -= 1
        self._held_bytes -= nbytes

    async def _compared(self, shadow: ServedModel, request: Request, answered: Results) -> None:
        code: Code | None = None
        results: Results = []
        try:
            results = await self._computed(shadow, request)
        except (HeadraceError, TimeoutError) as error:
            code = error.code if isinstance(error, HeadraceError) else Code.DEADLINE_EXCEEDED
            if code in {Code.OVERLOADED, Code.NOT_READY}:  # no room for copies now, or not there: nothing is learned
                self.left_out += 1
                self._judge.unloadable(shadow)
                return
        except Exception:
            log.exception("a copy failed", model=shadow.name, version=shadow.version)
            code = Code.INTERNAL
        self._judge.saw(shadow, code, now_s() - request.arrived_s, request.times)
        if code is None:
            large = _nbytes(answered) > LARGE
            agrees = await asyncio.to_thread(agree, answered, results) if large else agree(answered, results)
            self._judge.compared(shadow, agrees=agrees)
        elif code is not Code.DEADLINE_EXCEEDED:  # the current version could answer it
            self._judge.compared(shadow, agrees=False)

    async def _computed(self, shadow: ServedModel, request: Request) -> Results:
        options = shadow.pipeline.parse_options(request.options)
        pieces = pieces_of(shadow, request)
        with self._admission.admit(rows_of(pieces), request.nbytes, request.arrived_s):
            terms = Terms(request.deadline_s, SHADOW_PRIORITY)
            async with asyncio.timeout_at(request.deadline_s):
                return await self._compute(shadow, pieces, request, options, terms)


def _nbytes(results: Results) -> int:
    """Of what may be large: raw tensors, and embeddings as their floats."""
    tensors = [tensor.data for result in results if isinstance(result, Tensors) for tensor in result.tensors]
    floats = sum(len(result.values) for result in results if isinstance(result, Embedding))
    return sum(len(data) for data in tensors if isinstance(data, bytes)) + FLOAT_BYTES * floats


def _again(request: Request) -> Request:
    """The same question, with as much time again as the caller gave, from now on."""
    arrived_s = now_s()
    return Request(
        model=request.model,
        version="",
        request_id=request.request_id,
        inputs=request.inputs,
        options=request.options,
        deadline_s=arrived_s + (request.deadline_s - request.arrived_s),
        arrived_s=arrived_s,
        nbytes=request.nbytes,
        partial_results=request.partial_results,
        priority=SHADOW_PRIORITY,
        unreadable=request.unreadable,
        times=StageTimes(),
    )
