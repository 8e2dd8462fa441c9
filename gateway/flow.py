"""THE MAP: a request's life, one line a stage, each line one file away.

    admit     routing.py, split.py       which version?
              pieces.py, demand.py       valid options and inputs? loaded, or to be loaded first?
              reuse.py                   kept already? being computed already? (a large one: once it is admitted)
              admission.py, forecast.py  room for it? in time for its deadline?
    lease     leases.py                  slots in the arena: the credit to be decoded ahead of the worker
    prepare   pool_client.py             a pool process decodes straight into the slot
    batch     dispatch.py, batcher.py    company, never past what the deadline allows
    run       worker_client.py           one forward pass for the whole batch
    generate  generation_driver.py       or, of a model of texts: token by token, beside the others that are under way
    finish    finish.py, pool_client.py  labels, boxes, text
    reply     api/                       result and stage times; leaving the blocks gave back permit and slots

The deadline is checked at admission, before preparation (pool_client.py and the pool process), when a batch is formed
(dispatch.py), and before the copy to the device (the worker). Cancelling the coroutine drops the work wherever it is.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeAlias

from gateway.admission import Admission
from gateway.cache import Digests
from gateway.collect import Results, Tasks, collect, running
from gateway.dispatch import Dispatcher
from gateway.drops import Point
from gateway.finish import Finisher
from gateway.forecast import Forecast, Place
from gateway.generation_driver import Generation
from gateway.generation_job import prompt_of, too_late
from gateway.leases import Lease, Leases
from gateway.metrics import MeasuredRequest, Metrics
from gateway.pieces import Pieces, kind_of, pieces_of, rows_of
from gateway.pool_client import PoolClient
from gateway.prepare import prepare
from gateway.quarantine import Quarantine, digest_of
from gateway.request import Answer, Request, StageTimes
from gateway.reuse import Question, Reuse
from gateway.routing import Routing
from gateway.served import ServedModel, Terms
from gateway.underway import Coming, Underway
from shared.clock import now_s
from shared.errors import Code, DeadlineExceeded, HeadraceError, InvalidInput, LostTwice, NotReady
from shared.messages import Prepared
from shared.pipeline import Options, RawInput
from shared.results import Result, Text
from shared.settings_base import CacheSettings

LARGE_BYTES = 256 * 1024
"""A larger input is looked at in a thread: 16 MiB take 80 ms, in which nobody else would be answered."""

Load: TypeAlias = Callable[[ServedModel], Awaitable[None]]


class Door(NamedTuple):
    """Who may refuse a request: for want of room or time, or for what it did before."""

    admission: Admission
    forecast: Forecast
    quarantine: Quarantine


class Flow:
    """Answers requests; one instance, used on the event loop by every edge."""

    def __init__(
        self,
        door: Door,
        routing: Routing,
        leases: Leases,
        pool: PoolClient,
        dispatch: Dispatcher,
        metrics: Metrics,
    ) -> None:
        self._admission, self._forecast, self._quarantine = door
        self._routing = routing
        self._leases = leases
        self._pool = pool
        self._dispatch = dispatch
        self._metrics = metrics
        self._finisher = Finisher(pool)
        self.generation: Generation
        """What runs models of texts; set by the composition."""
        self.load: Load
        """Waits until a version that is loaded on demand can run; set by the composition."""
        self.reuse = Reuse(CacheSettings())
        """What need not be computed; off, unless the composition puts another one here."""
        self.answered: Callable[[ServedModel, Request, Results], None] = lambda *_: None
        """Told of every answer before it leaves: a shadow may get a copy of the request."""

    async def answer(self, request: Request) -> Answer:
        """Answer a request within its deadline. Raises HeadraceError; cancelling drops all of its work."""
        with self._metrics.request(request) as measured:
            kind = kind_of(request)
            model = self._routing.route(
                request.model, request.version, kind, request.routing_key, request.request_id, task=request.task
            )
            digests = Digests()
            try:
                results = await self._answered_by(model, request, measured, digests)
            except NotReady:  # a canary that could not be loaded: its callers did not choose it
                instead = self._routing.instead(model, request.version)
                if instead is None or request.times.first_s:  # a text that has begun can't begin anew
                    raise
                model = instead
                results = await self._answered_by(model, request, measured, digests)
            self.answered(model, request, results)
            return Answer(model.name, model.version, results)

    async def _answered_by(
        self, model: ServedModel, request: Request, measured: MeasuredRequest, digests: Digests
    ) -> Results:
        """From the version that it was sent to on."""
        measured.routed(model)
        if request.write is not None and not model.pipeline.generates:
            raise InvalidInput(f"model {model.name!r} generates no text; ask it by Predict")
        question = Question(model, request, model.pipeline.parse_options(request.options), digests)
        request.times.version = model.version
        results = None if question.is_large else await self.reuse.look(question)
        return await self._admitted(question, measured) if results is None else results

    async def _admitted(self, question: Question, measured: MeasuredRequest) -> Results:
        """By the door, and from there on together with whoever asks the same."""
        model, request = question.model, question.request
        measured.pieces = pieces = pieces_of(model, request)
        measured.rows = rows_of(pieces)
        with self._admission.admit(measured.rows, request.nbytes, request.arrived_s):
            try:
                async with asyncio.timeout_at(request.deadline_s):
                    results = await self.reuse.look(question) if question.is_large else None
                    if results is not None:
                        measured.rows = 0  # nothing is computed, as when it is found before the door
                        return results
                    if model.waits_for_load:
                        await self.load(model)
                    results = await self.reuse.run(question, lambda: self._computed(question, measured))
            except TimeoutError:
                raise too_late(model, question.options, measured.rows, request.times) from None
        self.reuse.keep(question, results)
        return results

    async def _computed(self, question: Question, measured: MeasuredRequest) -> Results:
        """What the forecast promises in time, computed."""
        model, request = question.model, question.request
        if model.pipeline.generates:
            return await self._generated(question, measured)
        admitted_s = now_s()
        place = Place(request.priority, request.deadline_s)
        promise = self._forecast.check(model, measured.rows, request.deadline_s - admitted_s, place)
        terms = _terms(question)
        measured.terms = terms
        request.times.admit_s = admitted_s - request.arrived_s
        try:
            results = await self.all(model, measured.pieces, request, question.options, terms)
        except (DeadlineExceeded, asyncio.CancelledError) as error:
            if not isinstance(error, asyncio.CancelledError) or now_s() >= request.late_s:
                self._forecast.missed(model, promise)
            raise
        self._forecast.answered(model, promise, now_s() - admitted_s)
        return results

    async def _generated(self, question: Question, measured: MeasuredRequest) -> Results:
        """Texts that may begin in time, generated; one is handed over while it grows if that is wanted."""
        model, request, admitted_s = question.model, question.request, now_s()
        terms = _terms(question)
        terms.write = request.write
        self.generation.check(model, question.options, measured.rows, terms)
        measured.terms = terms
        request.times.admit_s = admitted_s - request.arrived_s
        try:
            return await self.all(model, measured.pieces, request, question.options, terms)
        except DeadlineExceeded:
            raise too_late(model, question.options, measured.rows, request.times) from None

    async def all(
        self, model: ServedModel, pieces: list[Pieces], request: Request, options: Options, terms: Terms
    ) -> Results:
        """All inputs of the request side by side; each of their items stands by itself in every queue."""
        first = pieces[0]
        if len(pieces) == 1 and isinstance(first, list) and len(first) == 1:  # the common case needs no task of its own
            return list(await self.item(model, first[0], options, terms, request.times))
        with Coming(model, terms, [raw for items in pieces if isinstance(items, list) for raw in items]):
            return await self._side_by_side(model, pieces, request, options, terms)

    async def _side_by_side(
        self, model: ServedModel, pieces: list[Pieces], request: Request, options: Options, terms: Terms
    ) -> Results:
        """Each item in a task of its own."""
        loop, times = asyncio.get_running_loop(), []
        tasks: list[Tasks | HeadraceError] = []
        for items in pieces:
            if isinstance(items, HeadraceError):
                tasks.append(items)
                continue
            spent = [StageTimes() for _ in items]
            times += spent
            tasks.append(
                [
                    loop.create_task(self.item(model, raw, options, terms, stages))
                    for raw, stages in zip(items, spent, strict=True)
                ]
            )
        try:
            return await collect(tasks, partial=request.partial_results)
        except HeadraceError as error:
            terms.ended = error.code
            raise
        finally:
            request.times.slowest_of(times)
            for task in running(tasks):
                task.cancel()  # those still running when one input failed the whole request

    async def item(
        self, model: ServedModel, raw: RawInput, options: Options, terms: Terms, times: StageTimes
    ) -> list[Result]:
        """One item, and the memory of those that end processes. Raises HeadraceError."""
        try:
            if model.pipeline.generates:
                return [await self._text(model, raw, options, terms, times)]
            return await self._item(model, raw, options, terms, times)
        except HeadraceError as error:
            times.ended_workers += isinstance(error, LostTwice)
            if error.poison:
                self._quarantine.add(digest_of(model.number, raw), now_s())
            if error.code is Code.MODEL_DISABLED:
                self._metrics.drops.add(model.name, Point.ADMISSION, error.code, terms.priority)
            raise

    async def _item(
        self, model: ServedModel, raw: RawInput, options: Options, terms: Terms, times: StageTimes
    ) -> list[Result]:
        """One item, from the caller's bytes to its results."""
        asked_s, deadline_s = now_s(), terms.deadline_s
        await self._check(model, raw, asked_s)
        with (
            Underway(model, raw.rows, terms, self._metrics.drops) as underway,
            await self._leases.acquire(model, raw, terms) as lease,
        ):
            prepared = await self._prepared(lease, raw, options, deadline_s)
            underway.prepared(prepared.elapsed_s)
            times.prepare_s = prepared.elapsed_s
            times.wait_s = now_s() - asked_s - prepared.elapsed_s

            outcome = await self._dispatch.submit(model, prepared.tensors, lease, deadline_s)
            underway.ran()
            times.batch_s, times.copy_s, times.run_s = outcome.batch_s, outcome.copy_s, outcome.run_s
            times.batch_rows, times.nonfinite_rows = outcome.batch_rows, outcome.nonfinite_rows

            ran_s = now_s()
            results = await self._finisher.finish(lease, outcome.tensors, prepared.context, options, deadline_s)
            times.finish_s = now_s() - ran_s
        return results

    async def _text(self, model: ServedModel, raw: RawInput, options: Options, terms: Terms, times: StageTimes) -> Text:
        """One prompt, from the caller's bytes to its text."""
        asked_s = now_s()
        await self._check(model, raw, asked_s)
        with (
            Underway(model, raw.rows, terms, self._metrics.drops) as underway,
            self.generation.enter(model, options, terms) as job,
        ):
            with await self._leases.acquire(model, raw, terms) as lease:  # its tokens are few bytes: no slot is kept
                prepared = await self._prepared(lease, raw, options, terms.deadline_s)
                job.prompt = prompt_of(prepared.tensors, lease.arena_memory)
            underway.prepared(prepared.elapsed_s)
            times.prepare_s = prepared.elapsed_s
            times.wait_s = now_s() - asked_s - prepared.elapsed_s
            return await self.generation.run(job, times, asked_s)

    async def _check(self, model: ServedModel, raw: RawInput, at_s: float) -> None:
        """Raises ModelDisabled for an input that has ended two processes."""
        if not len(self._quarantine) or raw.nbytes <= LARGE_BYTES:
            self._quarantine.check(model.number, raw, at_s)
        else:
            self._quarantine.check_digest(await asyncio.to_thread(digest_of, model.number, raw), at_s)

    async def _prepared(self, lease: Lease, raw: RawInput, options: Options, deadline_s: float) -> Prepared:
        """The item's tensors, kept from before or made by a pool process."""
        key = await self.reuse.prepared_key(lease, raw, options)
        prepared = self.reuse.prepared(key, lease)
        if prepared is None:
            prepared = await prepare(self._pool, lease, raw, options, deadline_s)
            self.reuse.keep_prepared(key, prepared, self._leases.memory)
        return prepared


def _terms(question: Question) -> Terms:
    """What a request asks of every queue."""
    asked = question.request
    return Terms(
        asked.deadline_s,
        asked.priority,
        asked.late_s,
        question.digests,
        reuse=asked.reuse,
        chosen=bool(asked.version),
    )
