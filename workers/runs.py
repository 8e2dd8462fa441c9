"""Which batch runs next, and who gets its answer: the gateways take turns, and what began first is answered first."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from shared.board import ELSEWHERE, IDLE, Doing
from shared.clock import Clock
from shared.messages import RunBatch
from workers.aside import Aside, Ran
from workers.engine import BatchRun
from workers.flight import Flight
from workers.loaded import Key, LoadedVersion
from workers.session import Manner, Session, manner
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
        self.took: Callable[[LoadedVersion, float], None] = lambda _loaded, _seconds: None
        """Called after each batch in the row, with the seconds that it took of the device."""

    def step(self) -> bool:
        """Begin what can begin; finish the first batch if that needs no waiting. False: nothing to do for now.

        Raises DeviceLost.
        """
        did = self._beside()
        while self._begin():
            did = True
        return self._finish_done() or did

    def settle(self) -> bool:
        """What takes nothing of anybody's turn: finish what is done, start what runs aside. Raises DeviceLost."""
        did = self._beside()
        return self._finish_done() or did

    def waiting(self) -> set[Key]:
        """The versions of the batches that wait for their turn in the row."""
        queued = {key for session in self._sessions() for key in session.queued()}
        return queued.difference(loaded.key for loaded in self._aside.running())

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

    def forget(self, session: Session) -> bool:
        """Its gateway is gone: the device does nothing for it any more, but for a batch aside.

        False: there is one, which reads the gateway's memory and can't be stopped; to be asked again later. Raises
        DeviceLost.
        """
        while any(owner is session for owner, _ in self._owners):
            self._finish()
        self._turns.forget(session)
        return not self._aside.has(session)

    def _beside(self) -> bool:
        """Take in what has run aside, and start what may run there. False: there was neither."""
        outcomes = self._aside.outcomes()
        for ran in outcomes:
            self._ran_aside(ran)
        started = self._aside.allowed and any(map(self._start_aside, self._sessions()))
        return bool(outcomes) or started

    def _start_aside(self, session: Session) -> bool:
        """Start what a gateway has first, if it is to run aside; no version runs twice at the same time."""
        started = False
        while (found := session.next(self.running())) is not None and found[1].aside:
            loaded, batch = found
            session.begin(batch)
            self._aside.start(session, self._run(session, loaded, batch))
            started = True
        return started

    def _begin(self) -> bool:
        """Start the next batch of the row, if there is one and the device can take it."""
        apart = self._aside.running()
        waiting = {session: found for session in self._sessions() if (found := session.next(apart)) is not None}
        if self._aside.allowed:  # those begin in no row, but once no other batch of their version is under way
            waiting = {session: found for session, found in waiting.items() if not found[1].aside}
        if not waiting:
            return False
        session = self._turns.next(list(waiting))
        loaded, batch = waiting[session]
        if not self._flight.admits(loaded):
            return False
        self._turns.took(session)
        session.begin(batch)
        first = not len(self._flight)
        self._show(session, batch.batch)  # what ends the process from here on, is this one
        self._owners.append((session, loaded))
        self._flight.start(self._run(session, loaded, batch))
        if not first:
            self._show_first()
        return True

    def _run(self, session: Session, loaded: LoadedVersion, batch: RunBatch) -> BatchRun:
        return BatchRun(batch, loaded, session.link.arena, self._clock, session.cancelled)

    def _finish_done(self) -> bool:
        """Finish the first batch, if that needs no waiting."""
        done = self._flight.first_done()
        if done:
            self._finish()
        return done

    def _finish(self) -> None:
        session, loaded = self._owners.popleft()
        before = manner(loaded)
        batch, done = self._flight.finish()
        self._turns.charge(session, done.copy_s + done.run_s)
        self.took(loaded, done.copy_s + done.run_s)
        self._note(loaded, before)
        session.answer(batch, done)
        self.ran(loaded, done.rows_run)
        self._show_first()
        if done.rows_run:
            self.worked()

    def _ran_aside(self, ran: Ran) -> None:
        self._note(ran.run.loaded, ran.before)
        ran.session.answer(ran.run.message, ran.done)
        self.ran(ran.run.loaded, ran.done.rows_run)
        if ran.done.rows_run:
            self.worked()

    def _note(self, loaded: LoadedVersion, before: Manner) -> None:
        if manner(loaded) != before:
            for session in self._sessions():
                session.note(loaded)

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
