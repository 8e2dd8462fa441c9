"""Turns "the device has come so far" into a readable descriptor, so that one poll waits for it and for messages."""

import contextlib
import os
import queue
import threading

from workers.backends.streams import Mark


class Bell:
    """A thread that waits for marks in the order given, and an eventfd that it rings. Rung by the loader, too."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # At most one entry per pass under way: two.
        self._marks: queue.SimpleQueue[Mark] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ring_at(self, mark: Mark) -> None:
        """Ring once the mark has been reached, or can't be any more: who waits for the pass finds out why."""
        if self._thread is None:
            # A daemon: a device that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._work, name="bell", daemon=True)
            self._thread.start()
        self._marks.put(mark)

    def fileno(self) -> int:
        """Readable after a ring, until `quiet`."""
        return self._fd

    def quiet(self) -> None:
        """Forget the rings so far."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def _work(self) -> None:
        while True:
            mark = self._marks.get()
            with contextlib.suppress(RuntimeError):  # a sticky error: `Pass.wait` raises it where it can be handled
                mark.wait()
            os.eventfd_write(self._fd, 1)
