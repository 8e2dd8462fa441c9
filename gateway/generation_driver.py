"""Drives the generation of texts: into the line, to a worker, pieces back to whoever reads, to exactly one end each.

All decisions are in `generation.py` and `generation_pace.py` (pure policy). A worker takes up what it is sent between
two steps, so a text joins and leaves the others without waiting for any of them to end. A text whose caller has left
is cancelled at once, and keeps its room until the worker has let it go.
"""

from collections.abc import Callable

from gateway.drops import Drops, Point
from gateway.generation import Limits, Ticket
from gateway.generation_hangs import Hangs
from gateway.generation_job import Job, context_of, generation_options, may_have_been, token_count, was_not_begun
from gateway.generation_lobby import Lobby
from gateway.generation_pace import Ask
from gateway.inflight import InFlight
from gateway.pauses import Pauses
from gateway.request import Part, StageTimes, is_own
from gateway.served import ServedModel, Terms
from gateway.work import unloaded
from gateway.worker_client import Worker, WorkerClient, WorkerEvents
from shared.clock import now_s
from shared.errors import Code, HeadraceError, InternalFault, LostTwice, NotReady, ProcessLost
from shared.generation_messages import CancelJobs, Generated, Piece
from shared.messages import ModelLoaded, ModelNote
from shared.pipeline import Options
from shared.results import Text, Token
from shared.settings import WorkerSettings
from shared.transport import FrameTooBig

_LEFT = (Code.CANCELLED, Code.DEADLINE_EXCEEDED)


class Generation(WorkerEvents):
    """Texts in front of the workers; lives on the event loop."""

    def __init__(self, workers: WorkerClient, settings: WorkerSettings, drops: Drops) -> None:
        """`drops` counts what is dropped here.

        With several gateways each sends as much as a worker has room for, and the worker lets all of them have their
        turn: equal parts would leave room empty whenever their callers are not equally many.
        """
        self._workers = workers
        self._return_limit_s = settings.return_limit_ms / 1000
        self.lobby = Lobby()
        self.held: InFlight[Job] = InFlight()
        """Texts that workers have."""
        self.hangs = Hangs(workers, self.held, self.lobby, settings.hang_limit_ms / 1000)
        self._next = 1
        self._drops = drops
        self.told: Callable[[Job, StageTimes, float], None] = lambda _job, _times, _seconds: None
        """Told of each caller's text that came to its own end: its times, and seconds from first to last token."""

    # ------------------------------------------------------------ a text's life

    def check(self, model: ServedModel, options: Options, texts: int, terms: Terms) -> None:
        """May texts of a request come in? Raises Overloaded, DeadlineExceeded, InvalidOption."""
        version, given = self.lobby.of(model), generation_options(options)
        places = version.places
        places.check(Ticket(0, given.beams, 1, terms.priority, terms.deadline_s))
        version.pace.check(places, Ask(terms.priority, terms.deadline_s, texts), now_s())

    def enter(self, model: ServedModel, options: Options, terms: Terms) -> Job:
        """A text is past the door; in `with`, which takes it out of everything again."""
        given = generation_options(options)
        ticket = Ticket(self._next, given.beams, given.max_tokens, terms.priority, terms.deadline_s)
        self._next += 1
        self.lobby.of(model).places.come(ticket)
        return Job(ticket, model, given, terms, self._left)

    async def run(self, job: Job, times: StageTimes, asked_s: float) -> Text:
        """Generate it; whoever reads along gets every part before it is returned whole.

        Raises InvalidInput or InvalidOption for what has no room, and whatever else ends it.
        """
        queued_s = now_s()
        self._queue(job, queued_s)
        texts: list[str] = []
        tokens: list[Token] = []
        first_s = 0.0
        while True:
            piece = await job.more()
            if not first_s:
                first_s = now_s()
                times.first_s, times.batch_s = first_s - asked_s, job.ticket.began_s - queued_s
                times.batch_rows = job.ticket.rows
            texts.append(piece.text)
            times.tokens = piece.count
            tokens += piece.tokens
            if job.terms.write is not None:
                await job.terms.write(Part(job.model.name, job.model.version, piece.text, piece.tokens, piece.end))
            if piece.end is not None:
                times.tokens, times.run_s = piece.end.completion_tokens, job.ended_s - job.ticket.began_s
                if not is_own(job.terms.priority):
                    self.told(job, times, job.ended_s - first_s)
                return Text("".join(texts), piece.end, tokens)

    def _queue(self, job: Job, now: float) -> None:
        if job.model.state.phase == "unloaded":  # what still comes out of the pool has nobody to run it
            raise unloaded(job.model)
        job.ticket.fit_into(context_of(job.model), token_count(job.prompt))
        self.lobby.add(job, now)
        self.pump(job.model.number)

    def _left(self, job: Job) -> None:
        """Its request wants no more of it: because it has ended, or for another reason."""
        number = job.ticket.number
        if self.lobby.leave(job):
            job.drop(self._drops, Point.BATCH)
        entry = self.held.get(number)
        if entry is not None:
            job.left = job.terms.why_left(now_s())
            for worker in self._workers.workers():
                if worker.holder == entry.holder:
                    self._workers.send(worker, CancelJobs([number]))
        self.pump(job.model.number)  # it may have stood in somebody's way
        self.lobby.tidy(job.model.number)

    # ------------------------------------------------------------ to the workers

    def pump(self, number: int) -> None:
        """Send what has room now."""
        version = self.lobby.versions.get(number)
        while version is not None and (found := version.places.next()) is not None:
            ticket, identity = found
            job = self.lobby.begin(ticket)
            if not self._send(identity, job):
                version.places.ended(identity, ticket.number)
                if not job.ended:
                    self.lobby.again(job, now_s())
                    return  # tried again by `tick`: the worker's loss is reported next, or its queue is full

    def _send(self, identity: bytes, job: Job) -> bool:
        worker = next((each for each in self._workers.workers() if each.identity == identity), None)
        try:
            sent = worker is not None and self._workers.send(worker, job.message())
        except FrameTooBig:  # no context is as long
            job.fail(InternalFault())
            return False
        if worker is not None and sent:
            job.ticket.began_s = now_s()
            self.held.add(job.ticket.number, job, worker.holder, (), job.ticket.began_s)
        return sent

    # ------------------------------------------------------------ events

    def generated(self, worker: Worker, message: Generated) -> None:
        """Pieces back to those who wait for them."""
        now, ended = now_s(), set()
        self.hangs.heard(worker, now)
        for piece in message.pieces:
            last = piece.end is not None or piece.failure is not None
            entry = self.held.answered(piece.job) if last else self.held.get(piece.job)
            if entry is None:
                continue
            job = entry.job
            job.model.proven_s = now
            if last:
                places = self.lobby.of(job.model).places
                if piece.failure is not None and piece.failure.code == Code.DRAINING:
                    places.close(worker.identity)  # it stops: what it has not begun is for others
                places.ended(worker.identity, piece.job)
                self._last(job, piece, now)
                ended.add(job.model.number)
            else:
                if job.ticket.alone:  # its prompt has gone through, so that was not what ended a worker
                    job.ticket.alone = False
                    ended.add(job.model.number)
                job.grow(piece)
        for number in ended:
            self.pump(number)
            self.lobby.tidy(number)

    def _last(self, job: Job, piece: Piece, now: float) -> None:
        """The worker is done with a text."""
        code = piece.failure.code if piece.failure is not None else None
        if job.left is None and not job.has_grown and was_not_begun(job, code):
            self.lobby.again(job, now)
            return
        if piece.end is not None:
            self.lobby.of(job.model).pace.ended(job.ticket, piece.end.completion_tokens, now)
        if code in _LEFT and not job.has_grown:
            job.drop(self._drops, Point.COPY, job.left or Code(str(code)))
        elif job.left is not None:
            self._for_nobody(job)
        elif code is None:
            job.terms.computed_rows += 1
        job.ended_s = now
        job.grow(piece)

    def _for_nobody(self, job: Job) -> None:
        """Some of it was computed, and its caller had left."""
        if not is_own(job.terms.priority):
            self._drops.computed(job.model.name, 1)

    def model_loaded(self, worker: Worker, message: ModelLoaded) -> None:
        """There is a worker for what waits for this version, or one more."""
        limits, number = message.generation, message.model
        if limits is None:
            return
        version = self.lobby.known(number)
        version.places.open(worker.identity, Limits(limits.sequences, limits.tokens))
        version.places.cap(worker.identity, message.row_cap)
        version.pace.seed(limits.step_s, limits.prefill_s_per_token)
        self.lobby.settle_in(number)
        self.pump(number)

    def model_noted(self, worker: Worker, message: ModelNote) -> None:
        """It has learned how many sequences its memory is enough for."""
        version = self.lobby.versions.get(message.model)
        if version is not None:
            version.places.cap(worker.identity, message.row_cap)

    def model_failed(self, _worker: Worker, model: int, error: HeadraceError) -> None:
        """Where no other worker has it or may still load it, nobody can run what waits for this version."""
        if not (self._workers.with_model(model) or self._workers.may_get(model)):
            self.lobby.fail(model, lambda: NotReady(error.text))

    def model_evicted(self, worker: Worker, model: int) -> None:
        """It takes no more texts of this version."""
        version = self.lobby.versions.get(model)
        if version is not None:
            version.places.close(worker.identity)
            self.lobby.check_homes(now_s())

    def worker_lost(self, worker: Worker) -> None:
        """What has grown can't go on elsewhere; what has not begins once more."""
        now = now_s()
        self.hangs.forget(worker)
        for version in self.lobby.versions.values():
            version.places.lost(worker.identity)
        suspects = not worker.aside and may_have_been(worker.doing())  # else what ran aside is the likelier one
        for entry in self.held.lost(worker.holder):
            self._after_death(entry.job, now, suspect=suspects)
        self.lobby.check_homes(now)
        for number in list(self.lobby.versions):
            self.pump(number)
            self.lobby.tidy(number)

    def _after_death(self, job: Job, now: float, *, suspect: bool) -> None:
        if job.left is not None and job.has_grown:
            self._for_nobody(job)
        elif job.left is not None:
            job.drop(self._drops, Point.COPY)
        elif job.has_grown:
            job.fail(ProcessLost("the worker was lost while it generated this text, which can't go on elsewhere"))
        elif suspect and job.deaths:
            job.fail(LostTwice("the worker was lost twice while it ran this input"))
        else:
            job.deaths += suspect
            job.ticket.alone = job.deaths > 0  # a suspect takes nobody with it
            self.lobby.again(job, now)

    def withdraw(self, model: ServedModel) -> None:
        """It was unloaded by request: what waits for it is answered now; workers end what they have of it."""
        self.lobby.fail(model.number, lambda: unloaded(model))
        version = self.lobby.versions.get(model.number)
        if version is not None:
            version.places.close_all()

    def forget(self, number: int) -> None:
        """The version is gone for good."""
        self.lobby.forget(number)

    def models(self) -> set[ServedModel]:
        """The versions that texts wait for without a worker that has them."""
        return {job.model for job in self.lobby.homeless()}

    def tick(self, pauses: Pauses) -> None:
        """Called a few times a second: end workers that hang, and give up what has waited too long for one."""
        now = now_s()
        self.hangs.kill(now, pauses)
        self.lobby.give_up(now, self._return_limit_s)
        for number in list(self.lobby.versions):
            self.pump(number)
