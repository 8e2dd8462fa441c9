"""The worker's outer loop: find a gateway, serve it until it is gone, find the next one. Loaded models stay."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from shared.arena import AttachedArena
from shared.child import StopSignal
from shared.clock import now_s
from shared.handover import Greeting, Refusal, greet
from shared.logs import get_logger
from shared.messages import PROTOCOL_VERSION, FromWorker, Hello, ToWorker
from shared.transport import Dealer
from workers.backends.base import Device, DeviceLost
from workers.model_pool import ModelPool
from workers.session import HIGH_WATER_MARK, Session

GREET_LIMIT_S = 5.0
"""For the whole greeting; a gateway answers within milliseconds."""
RETRY_S = 0.05
"""Between looks for a gateway: one failed connect to a local socket, some 20 µs."""
REFUSED_RETRY_S = 1.0
"""After a refusal, which a person may have to end (another release, a name taken)."""

_log = get_logger()


class Worker:
    """Ties a name, a device and a model pool to whichever gateway there is."""

    def __init__(self, name: str, socket: Path, device: Device, pool: ModelPool, stop: StopSignal) -> None:
        self._socket = socket
        self._device = device
        self._pool = pool
        self._stop = stop
        self._hello = Hello(PROTOCOL_VERSION, os.getpid(), name, device.name)
        self._last_refusal = ""
        self.worked: Callable[[], None] = lambda: None
        """Called after each batch that computed something."""

    def run(self) -> None:
        """Serve gateways until a stop is asked for. Raises DeviceLost."""
        while not self._stop.requested:
            greeting = self._find_gateway()
            if greeting is not None:
                with greeting:
                    self._serve(greeting)

    def _find_gateway(self) -> Greeting | None:
        """The next gateway; None after a pause, so that the caller looks at the stop signal."""
        try:
            greeting = greet(self._socket, self._hello, GREET_LIMIT_S)
        except Refusal as refusal:
            if refusal.reason != self._last_refusal:  # once, not every second
                self._last_refusal = refusal.reason
                _log.warning("the gateway refuses this worker", reason=refusal.reason, retry_s=REFUSED_RETRY_S)
            self._stop.wait(REFUSED_RETRY_S)
            return None
        if greeting is None:
            self._stop.wait(RETRY_S)
            return None
        self._last_refusal = ""
        return greeting

    def _serve(self, greeting: Greeting) -> None:
        """Serve one gateway for its life."""
        welcome = greeting.welcome
        try:
            arena = AttachedArena.attach(greeting.arena_fd, welcome.arena_bytes)
        except (ValueError, OSError) as error:
            _log.error("the gateway's arena can't be used", reason=str(error))
            self._stop.wait(REFUSED_RETRY_S)
            return
        _log.info("gateway found", device=self._device.name)
        with contextlib.ExitStack() as stack:
            stack.callback(_log.info, "gateway left")
            stack.callback(arena.close)
            dealer = self._dealer(greeting)
            stack.callback(dealer.close)
            stack.push(self._detach)
            self._device.attach(arena.memory)
            session = Session(greeting, dealer, arena, self._pool, now_s)
            session.worked = self.worked
            session.serve(self._stop)

    @staticmethod
    def _dealer(greeting: Greeting) -> Dealer[ToWorker, FromWorker]:
        welcome = greeting.welcome
        return Dealer(
            welcome.endpoint,
            ToWorker,
            identity=welcome.identity,
            generation=welcome.generation,
            high_water_mark=HIGH_WATER_MARK,
        )

    def _detach(self, _kind: object, reason: BaseException | None, _trace: object) -> None:
        """Let go of the arena. A device that can't even do that is lost; why it was lost first counts more."""
        try:
            self._device.detach()
        except Exception as error:
            sentence = f"{self._device.name}: {str(error).splitlines()[0][:300]}"
            _log.warning("the device does not let go of the arena", error=sentence)
            if not isinstance(reason, DeviceLost):
                raise DeviceLost(sentence) from error
