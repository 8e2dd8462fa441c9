"""What the device does next: a batch, or a step of a version that generates. They take turns, charged by time.

Each version with a batch that waits is a party of its own, beside each that generates, and all of them get equal parts
of the time (`workers.turns`): three models beside one that generates have three quarters of it together. Whichever of
them has its turn, the first batch of the row runs, and its own version is charged: the row's order is the gateways'.
"""

from shared.clock import Clock
from workers.loaded import Key, LoadedVersion
from workers.runs import Runs
from workers.session import Session
from workers.texts import Texts
from workers.turns import Turns


class Work:
    """Of one worker, used by its loop only."""

    def __init__(self, runs: Runs, texts: Texts, clock: Clock) -> None:
        self._runs = runs
        self._texts = texts
        self._clock = clock
        self._turns: Turns[Key] = Turns()
        """By key: a version must be held by nobody but the pool once it has nothing to do."""
        runs.took = self._batch_took

    def step(self) -> bool:
        """Do one thing, if there is one. False: nothing to do for now. Raises DeviceLost."""
        texts = {loaded.key: loaded for loaded in self._texts.versions()}
        if not texts:
            return self._runs.step()
        if self._runs.settle():
            return True
        parties = [*self._runs.waiting(), *texts]
        self._turns.tidy(parties)
        turn = self._turns.next(parties)
        if turn not in texts:
            self._turns.took(turn)
            if self._runs.step():
                return True  # else all batches are under way beside the host
            turn = self._turns.next(list(texts))
        self._turns.took(turn)
        self._generate(texts[turn])
        return True

    def running(self) -> list[LoadedVersion]:
        """Versions with a batch under way, or a text that is not at its end."""
        return [*self._runs.running(), *self._texts.versions()]

    def forget(self, session: Session) -> bool:
        """Its gateway is gone: the device does nothing for it any more, but for a batch aside.

        False: there is one, to be asked again when it is out. Raises DeviceLost.
        """
        self._texts.forget(session)
        return self._runs.forget(session)

    def finish_all(self) -> None:
        """Answer what is under way, end all texts, and begin nothing. Raises DeviceLost."""
        self._runs.finish_all()
        self._texts.end_all()

    def _generate(self, loaded: LoadedVersion) -> None:
        started_s = self._clock()
        with self._runs.elsewhere():
            self._texts.step(loaded)
        self._turns.charge(loaded.key, self._clock() - started_s)

    def _batch_took(self, loaded: LoadedVersion, seconds: float) -> None:
        if self._texts.versions():
            self._turns.charge(loaded.key, seconds)
        else:  # nobody was kept waiting by it
            self._turns.passed(seconds)
