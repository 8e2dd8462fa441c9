"""The gateways that a worker serves: finding each of them, and letting go of those that are gone."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from shared.arena import AttachedArena
from shared.board import Board
from shared.clock import Clock
from shared.handover import Greeting, Knock, Refusal
from shared.logs import get_logger
from shared.messages import FromWorker, Hello, ToWorker
from shared.transport import Dealer
from workers.backends.base import Device, DeviceLost
from workers.loaded import Key
from workers.model_pool import ModelPool
from workers.session import HIGH_WATER_MARK, Link, Session

GREET_LIMIT_S = 5.0
"""For the whole greeting; a gateway answers within milliseconds."""
RETRY_S = 0.05
"""Between looks for a gateway: one failed connect to a local socket, some 20 µs."""
REFUSED_RETRY_S = 1.0
"""After a refusal, which a person may have to end (another release, a name taken)."""
LEAVE_LIMIT_S = 120.0
"""How long a batch aside of a gateway that is gone may still run: some times what a gateway would allow it."""
GONE_LOOK_S = 10.0
"""Between looks at that limit; that the batch has ended is told at once."""

_log = get_logger()


class _Place:
    """Where one gateway is, or will be."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.knock: Knock | None = None
        self.session: Session | None = None
        self.next_s = float("-inf")
        """When to knock again; while knocking, until when to wait."""
        self.last_refusal = ""
        self.gone_s: float | None = None
        """When the gateway of the session was found to be gone."""


class Links:
    """One session per gateway that is there. Nothing here waits for one of them."""

    def __init__(self, sockets: Sequence[Path], hello: Hello, device: Device, pool: ModelPool, clock: Clock) -> None:
        self._places = [_Place(socket) for socket in sockets]
        self._hello = hello
        self._device = device
        self._pool = pool
        self._clock = clock

    def sessions(self) -> list[Session]:
        """Of the gateways that are there."""
        return [place.session for place in self._places if place.session is not None and place.gone_s is None]

    def gone(self) -> list[Session]:
        """Sessions whose gateway is there no longer; `leave` is to follow, as soon as nothing reads its memory.

        Raises DeviceLost when that takes longer than anything may: nobody else is there to judge it.
        """
        now_s = self._clock()
        found = []
        for place in self._places:
            if place.session is None or (place.gone_s is None and place.session.alive()):
                continue
            if place.gone_s is None:
                place.gone_s = now_s
            elif now_s - place.gone_s > LEAVE_LIMIT_S:
                raise DeviceLost(f"a batch of a gateway that is gone has not ended within {LEAVE_LIMIT_S:g} s")
            found.append(place.session)
        return found

    def find(self) -> None:
        """Look for the gateways that are missing, where it is time to. Raises DeviceLost."""
        now_s = self._clock()
        for place in self._places:
            if place.session is None:
                try:
                    self._approach(place, now_s)
                except Refusal as refusal:
                    self._refused(place, str(refusal), now_s)

    def watched(self) -> list[int]:
        """Descriptors that tell of a gateway's end or answer."""
        knocks = [place.knock.fileno() for place in self._places if place.knock is not None]
        return knocks + [session.link.greeting.fileno() for session in self.sessions()]

    def sleep_s(self) -> float | None:
        """After what time `find` has something to do, or a message should be sent again; None: never."""
        until_s = min((place.next_s for place in self._places if place.session is None), default=None)
        if any(session.is_waiting_to_send for session in self.sessions()):
            return RETRY_S
        if any(place.gone_s is not None for place in self._places):
            until_s = min(until_s or math.inf, self._clock() + GONE_LOOK_S)
        return None if until_s is None else max(0.0, until_s - self._clock())

    def leave(self, session: Session) -> None:
        """Let go of everything of a gateway; none of its batches may be under way. Raises DeviceLost."""
        place = next(place for place in self._places if place.session is session)
        place.session = place.gone_s = None
        place.next_s = float("-inf")
        link = session.link
        try:
            self._detach(link.arena)
        finally:
            link.dealer.close()
            link.board.close()
            link.arena.close()
            link.greeting.close()
            _log.info("gateway left", gateway=place.socket.stem)

    def close(self) -> None:
        """Leave all. Raises DeviceLost."""
        for place in self._places:
            if place.knock is not None:
                place.knock.close()
                place.knock = None
        lost: DeviceLost | None = None
        for session in [place.session for place in self._places if place.session is not None]:
            try:
                self.leave(session)
            except DeviceLost as error:
                lost = lost or error
        if lost is not None:
            raise lost

    # ------------------------------------------------------------ inside

    def _approach(self, place: _Place, now_s: float) -> None:
        """Knock, or look at the answer. Raises Refusal, DeviceLost."""
        if place.knock is None:
            if now_s < place.next_s:
                return
            place.knock = Knock.at(place.socket, self._hello)
            place.next_s = now_s + (RETRY_S if place.knock is None else GREET_LIMIT_S)
            return
        if place.knock.answered():
            knock, place.knock = place.knock, None
            place.next_s = now_s + RETRY_S
            greeting = knock.answer()
            if greeting is not None:
                self._enter(place, greeting)
        elif now_s >= place.next_s:
            place.knock.close()
            place.knock = None

    def _refused(self, place: _Place, reason: str, now_s: float) -> None:
        place.next_s = now_s + REFUSED_RETRY_S
        if reason != place.last_refusal:  # once, not every second
            place.last_refusal = reason
            _log.warning("the gateway refuses this worker", reason=reason, retry_s=REFUSED_RETRY_S)

    def _enter(self, place: _Place, greeting: Greeting) -> None:
        """Begin to serve a gateway. Raises Refusal when its memory can't be used."""
        welcome = greeting.welcome
        try:
            arena = AttachedArena.attach(greeting.arena_fd, welcome.arena_bytes)
            board = Board(greeting.arena_fd, welcome.arena_bytes)
        except (ValueError, OSError) as error:
            greeting.close()
            raise Refusal(f"its arena can't be used: {error}") from error
        dealer: Dealer[ToWorker, FromWorker] = Dealer(
            welcome.endpoint,
            ToWorker,
            identity=welcome.identity,
            generation=welcome.generation,
            high_water_mark=HIGH_WATER_MARK,
        )
        session = Session(Link(self._hello.worker, greeting, dealer, arena, board), self._pool, self._clock)
        session.wanted_by_others = lambda: self._wanted_by_others(session)
        place.session, place.last_refusal = session, ""
        _log.info("gateway found", gateway=place.socket.stem, device=self._device.name)
        self._device.attach(arena.memory)

    def _wanted_by_others(self, session: Session) -> set[Key]:
        others: Iterable[Session] = (other for other in self.sessions() if other is not session)
        return {key for other in others for key in other.wanted()}

    def _detach(self, arena: AttachedArena) -> None:
        """Let go of the arena. A device that can't even do that is lost."""
        try:
            self._device.detach(arena.memory)
        except Exception as error:
            sentence = f"{self._device.name}: {str(error).splitlines()[0][:300]}"
            _log.warning("the device does not let go of the arena", error=sentence)
            raise DeviceLost(sentence) from error
