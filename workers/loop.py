"""The worker's loop: find gateways, take what they send, run one batch after another, answer. Loaded models stay.

One thread, one place to wait: for messages of all gateways, their ends and answers, loaded models, the device, signals.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from shared.child import StopSignal
from shared.clock import now_s
from shared.logs import get_logger
from shared.messages import PROTOCOL_VERSION, Hello
from shared.transport import wait
from workers.aside import Aside
from workers.backends.base import Device, DeviceLost
from workers.flight import Flight
from workers.links import Links
from workers.loaded import Key, LoadedVersion
from workers.model_pool import ModelPool
from workers.runs import Runs
from workers.texts import Texts
from workers.work import Work

_log = get_logger()


class _Users:
    """What all sessions together do with the versions: see `workers.model_pool.Users`."""

    def __init__(self, links: Links, work: Work) -> None:
        self._links = links
        self._work = work

    def busy(self) -> set[Key]:
        """With a batch or a text that waits or is under way."""
        waiting = {key for session in self._links.sessions() for key in session.waiting()}
        return waiting.union(loaded.key for loaded in self._work.running())

    def running(self) -> list[LoadedVersion]:
        """With a batch or a text under way."""
        return self._work.running()

    def pinned(self) -> set[Key]:
        """Never to be given up."""
        return {key for session in self._links.sessions() for key in session.pinned()}

    def wanted(self) -> set[Key]:
        """Asked for."""
        return {key for session in self._links.sessions() for key in session.wanted()}


class Worker:
    """Ties a name, a device and a model pool to whichever gateways there are."""

    def __init__(self, name: str, sockets: Sequence[Path], device: Device, pool: ModelPool, stop: StopSignal) -> None:
        """`sockets`: where each gateway is found, while it lives."""
        self._pool = pool
        self._stop = stop
        hello = Hello(PROTOCOL_VERSION, os.getpid(), name, device.name)
        self._links = Links(sockets, hello, device, pool, now_s)
        self._flight = Flight(device)
        self._runs = Runs(self._links.sessions, self._flight, Aside(device), now_s)
        self._texts = Texts(self._links.sessions, pool.get, now_s)
        self._runs.ran = self._texts.ran = pool.ran
        self._work = Work(self._runs, self._texts, now_s)
        pool.users = _Users(self._links, self._work)

    @property
    def worked(self) -> Callable[[], None]:
        """Called after each batch or step that computed something."""
        return self._runs.worked

    @worked.setter
    def worked(self, call: Callable[[], None]) -> None:
        self._runs.worked = self._texts.worked = call

    def run(self) -> None:
        """Serve gateways until a stop is asked for. Raises DeviceLost."""
        try:
            while not self._stop.requested:
                self._look()
                if not self._work.step():
                    self._wait()
            self._drain()  # a text that has come meanwhile gets its last piece, too
            self._work.finish_all()
        except DeviceLost:
            self._give_up()
            raise
        self._links.close()

    def _look(self) -> None:
        """What has happened since the last look."""
        self._links.find()
        self._drain()
        self._texts.collect()
        news = self._pool.turn()
        if news:
            for session in self._links.sessions():
                session.tell(news)
        for session in self._links.gone():  # last: what has just been read may be its last words
            if self._work.forget(session):  # else at a later look, when its batch aside is out
                self._links.leave(session)

    def _drain(self) -> None:
        for session in self._links.sessions():
            session.drain()

    def _wait(self) -> None:
        watch = [*self._links.watched(), *self._runs.watch(), self._stop.fileno(), self._pool.fileno()]
        sleeps = [sleep_s for sleep_s in (self._links.sleep_s(), self._pool.sleep_s()) if sleep_s is not None]
        wait([session.link.dealer for session in self._links.sessions()], watch, min(sleeps, default=None))

    def _give_up(self) -> None:
        """The device is lost; that it does not let go of the arenas either is no news."""
        try:
            self._links.close()
        except DeviceLost as error:
            _log.info("the device holds on to an arena", error=str(error))
