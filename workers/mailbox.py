"""What a thread of the worker has to tell its loop, with a descriptor that wakes it."""

import os
import queue
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """`put` is for the thread, everything else for the loop."""

    def __init__(self) -> None:
        self._mail: queue.SimpleQueue[T] = queue.SimpleQueue()  # as many as the loop has asked for
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Becomes readable when `taken` has something."""
        return self._wake

    def put(self, mail: T) -> None:
        """Tell the loop."""
        self._mail.put(mail)
        self.ring()

    def ring(self) -> None:
        """Wake the loop, whether or not there is something."""
        os.eventfd_write(self._wake, 1)

    def next(self) -> T:
        """Wait for one."""
        return self._mail.get()

    def taken(self) -> list[T]:
        """What has come since the last call. Never blocks."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        found = []
        while not self._mail.empty():
            found.append(self._mail.get())
        return found

    def __repr__(self) -> str:
        return f"<Mailbox {self._mail.qsize()}>"
