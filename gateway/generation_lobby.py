"""The texts that no worker has, by version: in line, or homeless while no worker has their version. Event loop only."""

from collections.abc import Callable

from gateway.generation import Places, Ticket
from gateway.generation_job import Job
from gateway.generation_pace import Pace
from gateway.served import ServedModel
from gateway.work import unloaded
from shared.errors import HeadraceError, ProcessLost


class Version:
    """What is known of one version that generates."""

    def __init__(self) -> None:
        self.places = Places()
        self.pace = Pace()
        self.model: ServedModel | None = None
        """Once anybody has asked for it."""
        self.is_gone = False
        """It is served no more, and is forgotten when its last text ends."""


class Lobby:
    """By the gateway's number of a version, and of a text."""

    def __init__(self) -> None:
        self.versions: dict[int, Version] = {}
        self._jobs: dict[int, Job] = {}
        self.wanted: Callable[[ServedModel], None] = lambda _model: None
        """Told of a version that a text waits for and no worker has: it may have to be loaded."""

    def of(self, model: ServedModel) -> Version:
        """What is known of a version."""
        version = self.known(model.number)
        if version.model is not model:
            version.model = model
            model.batch_s = lambda _rows: version.pace.step_s  # after each step others may have their turn
        return version

    def known(self, number: int) -> Version:
        """The same, of a version that a worker names."""
        return self.versions.setdefault(number, Version())

    def add(self, job: Job, now_s: float) -> None:
        """Let a text wait whose prompt is known, or which is to begin once more. Raises InvalidInput, InvalidOption."""
        places = self.of(job.model).places
        places.wait(job.ticket)
        self._jobs[job.ticket.number] = job
        job.waits_since_s = None
        if not places.is_open:
            self._lose_home(job, now_s)

    def again(self, job: Job, now_s: float) -> None:
        """Back into the line, in its old place; one that no worker could ever hold any more, or will serve, fails."""
        try:
            if job.model.state.phase == "unloaded":
                raise unloaded(job.model)
            self.add(job, now_s)
        except HeadraceError as error:
            job.fail(error)

    def begin(self, ticket: Ticket) -> Job:
        """It has got a room, and is out of the line."""
        return self._jobs.pop(ticket.number)

    def leave(self, job: Job) -> bool:
        """Its request has gone; False when it did not wait here."""
        version = self.versions.get(job.model.number)
        if version is not None:
            version.places.leave(job.ticket)
        return self._jobs.pop(job.ticket.number, None) is not None

    def fail(self, number: int, error: Callable[[], HeadraceError]) -> None:
        """Nobody will run what waits for this version."""
        version = self.versions.get(number)
        for ticket in version.places.in_line() if version is not None else ():
            self._fail(ticket, error())

    def settle_in(self, number: int) -> None:
        """A worker has the version now: nobody is homeless, and what none could ever hold is told so."""
        places = self.versions[number].places
        for ticket in places.in_line():
            self._jobs[ticket.number].waits_since_s = None
            try:
                places.check(ticket)
            except HeadraceError as error:
                self._fail(ticket, error)

    def check_homes(self, now_s: float) -> None:
        """A worker has gone, or given a version up."""
        for version in self.versions.values():
            for ticket in version.places.in_line() if not version.places.is_open else ():
                job = self._jobs[ticket.number]
                if job.waits_since_s is None:
                    self._lose_home(job, now_s)

    def give_up(self, now_s: float, limit_s: float) -> None:
        """Answer what has waited for a worker for so long; where one is there and loads, the deadline is the limit."""
        for job in self.homeless():
            if now_s - (job.waits_since_s or now_s) >= limit_s and not job.model.waits_for_load:
                self._fail(
                    job.ticket,
                    ProcessLost("the worker was lost and did not come back within worker.return_limit_ms"),
                )

    def homeless(self) -> list[Job]:
        """Those that no worker can begin now."""
        return [job for job in self._jobs.values() if job.waits_since_s is not None]

    def forget(self, number: int) -> None:
        """The version is gone for good."""
        version = self.versions.get(number)
        if version is not None:
            version.is_gone = True
            self.tidy(number)

    def tidy(self, number: int) -> None:
        """Forget a version that is gone and has ended its last text."""
        version = self.versions.get(number)
        if version is not None and version.is_gone and version.places.is_idle:
            del self.versions[number]

    def _lose_home(self, job: Job, now_s: float) -> None:
        job.waits_since_s = now_s
        self.wanted(job.model)

    def _fail(self, ticket: Ticket, error: HeadraceError) -> None:
        job = self._jobs.pop(ticket.number)
        self.of(job.model).places.leave(ticket)
        job.fail(error)
