"""The texts of all versions that generate: from the gateways' prompts to the steppers, and back piece by piece.

No torch before there is a version that generates.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shared.clock import Clock
from shared.errors import Code, InternalFault
from shared.generation_messages import Generate, Piece
from shared.logs import get_logger
from shared.messages import Failure
from workers.jobs import Refused, read
from workers.loaded import Key, LoadedVersion
from workers.session import Session, manner

if TYPE_CHECKING:
    from workers.generation.stepper import Stepper

_log = get_logger()


class Texts:
    """Used by the worker's loop only."""

    def __init__(
        self, sessions: Callable[[], Sequence[Session]], get: Callable[[Key], LoadedVersion | None], clock: Clock
    ) -> None:
        """`sessions()`: of the gateways that are there now; `get`: a loaded version."""
        self._sessions = sessions
        self._get = get
        self._clock = clock
        self._steppers: dict[LoadedVersion, Stepper] = {}
        """Only of versions with a text that is not at its end: a version must not be held by anybody else."""
        self.worked: Callable[[], None] = lambda: None
        self.ran: Callable[[LoadedVersion, int], None] = lambda _loaded, _rows: None
        """Called after each step, with the texts that are left."""

    def collect(self) -> None:
        """Take up what the gateways have sent."""
        for session in self._sessions():
            new, cancelled = session.inbox.take()
            for key, message in new:
                self._begin(session, key, message)
            if cancelled:
                for stepper in self._steppers.values():
                    stepper.cancel(session, cancelled)

    def versions(self) -> list[LoadedVersion]:
        """Those with a text that is not at its end."""
        return list(self._steppers)

    def step(self, loaded: LoadedVersion) -> None:
        """One step of one of them; says what came of it. Raises DeviceLost."""
        stepper = self._steppers[loaded]
        before = manner(loaded)
        for owner, pieces in stepper.step().items():
            self._say(owner, pieces)
        if manner(loaded) != before:
            for session in self._sessions():
                session.note(loaded)
        self.ran(loaded, stepper.rows)
        self.worked()
        self._let_go()

    def forget(self, session: Session) -> None:
        """Its gateway is gone. Raises DeviceLost."""
        for stepper in self._steppers.values():
            for owner, pieces in stepper.forget(session).items():
                self._say(owner, pieces)
        self._let_go()

    def end_all(self) -> None:
        """The worker stops: each text gets its last piece."""
        self.collect()
        failure = Failure(Code.DRAINING, "the worker stops")
        for stepper in self._steppers.values():
            for owner, pieces in stepper.end_all(failure).items():
                self._say(owner, pieces)
        self._steppers.clear()

    def _begin(self, session: Session, key: Key, message: Generate) -> None:
        try:
            self._stepper(key).add(read(message, session))
        except Refused as refused:
            session.say([Piece(message.job, failure=refused.failure)])
        except ValueError as error:  # the gateway checked this: a bug of ours, of one job only
            _log.error("a prompt can't be read", job=message.job, model=key.name, reason=str(error)[:300])
            session.say([Piece(message.job, failure=Failure(Code.INTERNAL, InternalFault.TEXT))])
        self._let_go()

    def _stepper(self, key: Key) -> "Stepper":
        """Raises Refused."""
        loaded = self._get(key)
        if loaded is None:  # unloaded by what came after it
            raise Refused(Code.NOT_READY, "the model is not loaded")
        if loaded.generation is None:
            raise Refused(Code.UNSUPPORTED, f"model {key.name} does not generate text")
        if loaded not in self._steppers:
            # Not at the top: a worker with simulated models only must start without torch.
            from workers.generation.stepper import of  # noqa: PLC0415

            self._steppers[loaded] = of(loaded, self._clock)
        return self._steppers[loaded]

    def _let_go(self) -> None:
        for loaded in [loaded for loaded, stepper in self._steppers.items() if not len(stepper)]:
            del self._steppers[loaded]

    def _say(self, owner: object, pieces: list[Piece]) -> None:
        for session in self._sessions():
            if session is owner:
                session.say(pieces)

    def __repr__(self) -> str:
        return f"<Texts {list(self._steppers.values())}>"
