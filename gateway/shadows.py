"""Copies of requests for a shadow version: computed beside, compared, and never answered with. On the event loop.

A copy is begun when its request has been answered, so that it costs the caller nothing, and only while there is room
for it: it goes by admission like any request, behind everything else that waits for the worker.
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
from shared.pipeline import Options, RawInput
from shared.results import Result

log = get_logger()

MOST = 64
"""Copies under way; with two full batches of 32 a shadow's worker is never idle. More are left out, and counted."""

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
        self.begun = 0
        self.left_out = 0

    def copy(self, shadow: ServedModel, request: Request, answered: Results) -> None:
        """The request was answered so by the current version: what does the shadow say?"""
        if len(self._copies) >= MOST:
            self.left_out += 1
            return
        self.begun += 1
        shadow.requests += 1
        copy = asyncio.get_running_loop().create_task(self._compared(shadow, _own(request), answered))
        self._copies.add(copy)
        copy.add_done_callback(self._copies.discard)
        copy.add_done_callback(lambda _done: _leave(shadow))

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
            self._judge.compared(shadow, agrees=agree(answered, results))
        elif code is not Code.DEADLINE_EXCEEDED:  # the current version could answer it
            self._judge.compared(shadow, agrees=False)

    async def _computed(self, shadow: ServedModel, request: Request) -> Results:
        options = shadow.pipeline.parse_options(request.options)
        pieces = pieces_of(shadow, request)
        with self._admission.admit(rows_of(pieces), request.nbytes, request.arrived_s):
            terms = Terms(request.deadline_s, SHADOW_PRIORITY)
            async with asyncio.timeout_at(request.deadline_s):
                return await self._compute(shadow, pieces, request, options, terms)


def _leave(shadow: ServedModel) -> None:
    shadow.requests -= 1


def _own(request: Request) -> Request:
    """As much time again as the caller gave, from now on; bytes of our own, since the caller's memory may be reused."""
    arrived_s = now_s()
    return Request(
        model=request.model,
        version="",
        request_id=request.request_id,
        inputs=[_kept(raw) for raw in request.inputs],
        options=request.options,
        deadline_s=arrived_s + (request.deadline_s - request.arrived_s),
        arrived_s=arrived_s,
        nbytes=request.nbytes,
        partial_results=request.partial_results,
        priority=SHADOW_PRIORITY,
        unreadable=request.unreadable,
        times=StageTimes(),
    )


def _kept(raw: RawInput) -> RawInput:
    tensors = tuple(tensor._replace(data=bytes(tensor.data)) for tensor in raw.tensors)
    return RawInput(kind=raw.kind, data=bytes(raw.data), tensors=tensors)
