"""The first batch of a version, run beside everybody else's: it proves the version, and nobody waits for it.

On a CPU one pass of a new network may take as long as many batches of a small one, which would all wait behind it.
"""

import queue
import threading
from typing import NamedTuple

from shared.messages import BatchDone
from workers.backends.base import Device
from workers.engine import BatchRun
from workers.loaded import LoadedVersion
from workers.mailbox import Mailbox
from workers.pace import step_back
from workers.session import Manner, Session, manner


class Ran(NamedTuple):
    """A batch that has been run, and whose it is."""

    session: Session
    run: BatchRun
    done: BatchDone
    before: Manner
    """How its version ran until then."""


class _Job(NamedTuple):
    session: Session
    run: BatchRun
    before: Manner


class Aside:
    """One at a time, on a thread of its own with a loader's priority. Its methods are for the loop."""

    def __init__(self, device: Device) -> None:
        self.allowed = device.runs_aside
        """Otherwise all batches run in their row."""
        self._device = device
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()  # at most one a version
        self._under_way: dict[BatchRun, Session] = {}
        self._mail: Mailbox[Ran | BaseException] = Mailbox()
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        """Becomes readable when `outcomes` has something."""
        return self._mail.fileno()

    def start(self, session: Session, run: BatchRun) -> None:
        """Run a batch of a version that runs no other one meanwhile; it is among the outcomes later."""
        self._under_way[run] = session
        self._jobs.put(_Job(session, run, manner(run.loaded)))
        if self._thread is None:  # a daemon: a pass that hangs must not keep the process from ending
            self._thread = threading.Thread(target=self._work, name="aside", daemon=True)
            self._thread.start()

    def running(self) -> list[LoadedVersion]:
        """The versions with a batch here."""
        return [run.loaded for run in self._under_way]

    def outcomes(self) -> list[Ran]:
        """What has come about since the last call. Never blocks. Raises DeviceLost."""
        return [self._taken(outcome) for outcome in self._mail.taken()]

    def has(self, session: Session) -> bool:
        """Whether a batch of a gateway is under way here."""
        return session in self._under_way.values()

    def finish(self) -> list[Ran]:
        """Wait until nothing is under way, and give all outcomes. Raises DeviceLost."""
        found = []
        while self._under_way:
            found.append(self._taken(self._mail.next()))
        return found

    def _taken(self, outcome: Ran | BaseException) -> Ran:
        if isinstance(outcome, BaseException):
            raise outcome
        del self._under_way[outcome.run]
        return outcome

    def _work(self) -> None:
        step_back()
        self._device.enter_thread()
        while True:
            self._run(self._jobs.get())

    def _run(self, job: _Job) -> None:
        """A frame of its own: while the thread waits for the next one, it must hold no version."""
        try:
            job.run.start()
            self._mail.put(Ran(job.session, job.run, job.run.finish(), job.before))
        except BaseException as error:  # noqa: BLE001 - as on the loop, where it ends the process
            self._mail.put(error)

    def __repr__(self) -> str:
        return f"<Aside {[run.message.batch for run in self._under_way]}>"
