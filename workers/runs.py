"""Which batch runs next, and who gets its answer: the gateways take turns, and what began first is answered first."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from shared.board import ELSEWHERE, IDLE, Doing
from shared.clock import Clock
from workers.aside import Aside, Ran
from workers.engine import BatchRun
from workers.flight import Flight
from workers.loaded import LoadedVersion
from workers.session import Session, manner
from workers.turns import Turns


class Runs:
    """Between the sessions, where batches wait and can be cancelled, and the device. Used by the worker's loop only."""

    def __init__(self, sessions: Callable[[], Sequence[Session]], flight: Flight, aside: Aside, clock: Clock) -> None:
        """`sessions()`: of the gateways that are there now."""
        self._sessions = sessions
        self._flight = flight
        self._clock = clock
        self._aside = aside
        self._turns: Turns[Session] = Turns()
        self._owners: deque[tuple[Session, LoadedVersion]] = deque()
        """Whose batches are under way, in the same order."""
        self.worked: Callable[[], None] = lambda: None
        self.ran: Callable[[LoadedVersion, int], None] = lambda _loaded, _rows: None
        """Called after each batch, with the rows that it computed."""
        self.took: Callable[[float], None] = lambda _seconds: None
        """Called after each batch, with the seconds that it took of the device."""

    def step(self) -> bool:
        """Begin what can begin; finish the first batch if that needs no waiting. False: nothing to do for now.

        Raises DeviceLost.
        """
        began = False
        for ran in self._aside.outcomes():
            self._ran_aside(ran)
            began = True
        while self._begin():
            began = True
        if self._flight.first_done():
            self._finish()
            return True
        return began

    def has_work(self) -> bool:
        """Whether a batch waits or is under way."""
        return bool(self.running()) or any(session.next_version() is not None for session in self._sessions())

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Inside, the worker is at work for nobody's batch, for the gateways to see.

        With a batch under way beside the host they go on seeing that one, since when it began: else a batch that hangs
        would look new after each step of a text.
        """
        if self._owners:
            yield
            return
        since_s = self._clock()
        for session in self._sessions():
            session.doing(Doing(ELSEWHERE, since_s))
        yield
        self._show_first()

    def running(self) -> list[LoadedVersion]:
        """The versions of the batches under way."""
        return [loaded for _, loaded in self._owners] + self._aside.running()

    def watch(self) -> tuple[int, ...]:
        """Descriptors that become readable when `step` has something to do."""
        return (*self._flight.watch(), self._aside.fileno())

    def finish_all(self) -> None:
        """Answer what is under way and begin nothing. Raises DeviceLost."""
        while len(self._flight):
            self._finish()
        for ran in self._aside.finish():
            self._ran_aside(ran)

    def forget(self, session: Session) -> None:
        """Its gateway is gone: afterwards the device does nothing for it any more. Raises DeviceLost."""
        while any(owner is session for owner, _ in self._owners):
            self._finish()
        for ran in self._aside.finish(session):
            self._ran_aside(ran)
        self._turns.forget(session)

    def _begin(self) -> bool:
        """Start the next batch, if there is one and the device can take it."""
        waiting = {session: loaded for session in self._sessions() if (loaded := session.next_version()) is not None}
        if not waiting:
            return False
        session = self._turns.next(list(waiting))
        loaded = waiting[session]
        # What is still aside has its later batches there, too: no version runs twice at the same time.
        aside = self._aside.allowed and (session.next_is_aside() or loaded in self._aside.running())
        if not aside and not self._flight.admits(loaded):
            return False
        self._turns.took(session)
        batch = session.next_batch()
        first = not len(self._flight)
        run = BatchRun(batch, loaded, session.link.arena, self._clock, session.cancelled)
        if aside:
            self._aside.start(session, run)
            return True
        self._show(session, batch.batch)  # what ends the process from here on, is this one
        self._owners.append((session, loaded))
        self._flight.start(run)
        if not first:
            self._show_first()
        return True

    def _finish(self) -> None:
        session, loaded = self._owners.popleft()
        before = manner(loaded)
        batch, done = self._flight.finish()
        if manner(loaded) != before:
            for each in self._sessions():
                each.note(loaded)
        self._turns.charge(session, done.copy_s + done.run_s)
        self.took(done.copy_s + done.run_s)
        session.answer(batch, done)
        self.ran(loaded, done.rows_run)
        self._show_first()
        if done.rows_run:
            self.worked()

    def _ran_aside(self, ran: Ran) -> None:
        ran.session.answer(ran.run.message, ran.done)
        self.ran(ran.run.loaded, ran.done.rows_run)
        if ran.done.rows_run:
            self.worked()

    def _show_first(self) -> None:
        """The first batch under way is what the device works on now."""
        if self._owners:
            self._show(self._owners[0][0], next(iter(self._flight)).batch)
        else:
            self._show(None, IDLE)

    def _show(self, owner: Session | None, batch: int) -> None:
        since_s = self._clock()
        elsewhere = IDLE if owner is None else ELSEWHERE
        for session in self._sessions():
            session.doing(Doing(batch if session is owner else elsewhere, since_s))
