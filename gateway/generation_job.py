"""One text between its request and a worker: what has come of it, and who waits for more. Event loop only."""

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import msgspec

from gateway.drops import Drops, Point
from gateway.generation import Ticket
from gateway.request import StageTimes
from gateway.served import ServedModel, Terms
from shared.board import ELSEWHERE, Doing
from shared.clock import now_s
from shared.errors import Code, DeadlineExceeded, HeadraceError, rebuild
from shared.generation import GenerationOptions
from shared.generation_messages import Generate, Piece
from shared.pipeline import Options
from shared.tensors import SlotRef, Tensor

_encode = msgspec.msgpack.Encoder().encode
_TOKEN_BYTES = 4
"""Tokens are INT32."""


class Job:
    """Used as a context for as long as its request is interested in it; a worker may have it for longer.

    A reader who is slower than the worker finds everything new in one piece: at most the whole text waits for it.
    """

    def __init__(
        self,
        ticket: Ticket,
        model: ServedModel,
        options: GenerationOptions,
        terms: Terms,
        left: Callable[["Job"], None],
    ) -> None:
        self.ticket = ticket
        self.model = model
        self.options = options
        self.terms = terms
        self.prompt = b""
        """INT32, little endian, once it is prepared."""
        self.deaths = 0
        self.has_grown = False
        """Something of it has come, so that it can't be begun anew."""
        self.ended = False
        """The worker's last piece came, or it failed here: nobody does anything for it any more."""
        self.left: Code | None = None
        """Why its request left while a worker had it."""
        self.ended_s = 0.0
        """When its last piece came."""
        self.waits_since_s: float | None = None
        """Since when there has been no worker for it."""
        self._left = left
        self._new: Piece | None = None
        self._error: HeadraceError | None = None
        self._wake: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left(self)

    def message(self) -> Generate:
        """For a worker."""
        return Generate(
            self.ticket.number, self.model.number, self.terms.deadline_s, self.prompt, _encode(self.options)
        )

    async def more(self) -> Piece:
        """What is new; waits for it. Raises HeadraceError when it ends without an end, after what came before."""
        while self._new is None and self._error is None:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        piece, self._new = self._new, None
        if piece is None:
            raise self._error or HeadraceError("a text has neither grown nor failed")
        return piece

    def grow(self, piece: Piece) -> None:
        """A worker's piece; one with a failure ends it with that."""
        if piece.failure is not None:
            self.fail(rebuild(piece.failure.code, piece.failure.text))
            return
        self.has_grown = True
        self.ended = self.ended or piece.end is not None
        before = self._new
        if before is not None:  # its reader is slow
            text, tokens = before.text + piece.text, [*before.tokens, *piece.tokens]
            piece = Piece(self.ticket.number, text, tokens, piece.end, count=piece.count)
        self._new = piece
        self._ring()

    def fail(self, error: HeadraceError) -> None:
        """It ends here; the first reason counts."""
        if not self.ended:
            self.ended, self._error = True, error
            self._ring()

    def drop(self, drops: Drops, point: Point, reason: Code | None = None) -> None:
        """Count that nobody computes it any more; by default for the reason why its request left."""
        why = reason or self.left or self.terms.why_left(now_s())
        drops.add(self.model.name, point, why, self.terms.priority)

    def _ring(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def generation_options(options: Options) -> GenerationOptions:
    """The options of a pipeline that generates. Raises TypeError for a pipeline that has others: a bug in it."""
    if not isinstance(options, GenerationOptions):
        raise TypeError(f"a pipeline that generates has GenerationOptions, not {type(options).__name__}")
    return options


def too_late(model: ServedModel, options: Options, texts: int, times: StageTimes) -> DeadlineExceeded:
    """Of a request whose time is over; one for texts is told how far they have come."""
    if not model.pipeline.generates:
        return DeadlineExceeded("the deadline passed before the answer was ready")
    most = texts * generation_options(options).max_tokens
    return DeadlineExceeded(
        f"the deadline passed after {times.tokens} of {most} tokens (the call's own, or else "
        "gateway.default_deadline_ms)"
    )


def prompt_of(tensors: list[Tensor], arena: memoryview) -> bytes:
    """The tokens that `preprocess` made, copied out of their slot if they are in one."""
    data = tensors[0].data
    if isinstance(data, SlotRef):
        return bytes(arena[data.offset : data.offset + data.nbytes])
    return bytes(data)


def token_count(prompt: bytes) -> int:
    """How many tokens a prompt has."""
    return len(prompt) // _TOKEN_BYTES


def context_of(model: ServedModel) -> int:
    """Tokens that prompt and answer may have together, as the pipeline says it. Raises TypeError where it does not."""
    context = getattr(model.pipeline, "context", None)
    if not isinstance(context, int):
        raise TypeError("a pipeline that generates has a `context`: tokens of prompt and answer together")
    return context


def was_not_begun(job: Job, code: str | None) -> bool:
    """Whether a worker gives back what it was sent: it stops, or had given the version up meanwhile."""
    return code == Code.DRAINING or (code == Code.NOT_READY and not job.model.pinned)


def may_have_been(doing: Doing | None) -> bool:
    """Whether a text may have ended the worker that left this record: it was at none of our batches."""
    return doing is None or doing.batch == ELSEWHERE


def is_repeatable(options: Mapping[str, Any]) -> bool:
    """Whether a request's options, as they were given and found right, give the same text each time."""
    return not options.get("temperature") or options.get("seed") is not None
