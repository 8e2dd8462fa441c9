"""What the device does next: batches, or a step of a version that generates. They take turns, charged by time.

Between two steps of a text, a batch that waits gets its turn, and between two batches a step: neither starves, whatever
there is of the other, and both together get half of the time each (`workers.turns`).
"""

from collections.abc import Hashable

from shared.clock import Clock
from workers.loaded import LoadedVersion
from workers.runs import Runs
from workers.session import Session
from workers.texts import Texts
from workers.turns import Turns

_BATCHES = "batches"


class Work:
    """Of one worker, used by its loop only."""

    def __init__(self, runs: Runs, texts: Texts, clock: Clock) -> None:
        self._runs = runs
        self._texts = texts
        self._clock = clock
        self._turns: Turns[Hashable] = Turns()
        runs.took = self._charge_batches

    def step(self) -> bool:
        """Do one thing, if there is one. False: nothing to do for now. Raises DeviceLost."""
        versions = self._texts.versions()
        if not versions:
            return self._runs.step()
        if self._runs.has_work():
            turn = self._turns.next([_BATCHES, *versions])
            if turn == _BATCHES:
                self._turns.took(turn)
                if self._runs.step():
                    return True  # else all batches are under way beside the host
        turn = self._turns.next(versions)
        self._turns.took(turn)
        self._generate(next(loaded for loaded in versions if loaded is turn))
        return True

    def running(self) -> list[LoadedVersion]:
        """Versions with a batch under way, or a text that is not at its end."""
        return [*self._runs.running(), *self._texts.versions()]

    def forget(self, session: Session) -> None:
        """Its gateway is gone: afterwards the device does nothing for it any more. Raises DeviceLost."""
        self._runs.forget(session)
        self._texts.forget(session)
        self._forget_idle()

    def finish_all(self) -> None:
        """Answer what is under way, end all texts, and begin nothing. Raises DeviceLost."""
        self._runs.finish_all()
        self._texts.end_all()

    def _generate(self, loaded: LoadedVersion) -> None:
        started_s = self._clock()
        with self._runs.elsewhere():
            self._texts.step(loaded)
        self._turns.charge(loaded, self._clock() - started_s)
        self._forget_idle()

    def _charge_batches(self, seconds: float) -> None:
        self._turns.charge(_BATCHES, seconds)

    def _forget_idle(self) -> None:
        """A version must not be held by anybody but the pool once its last text has ended."""
        self._turns.keep([_BATCHES, *self._texts.versions()])
