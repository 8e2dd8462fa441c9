"""Starting and watching child processes. Used by the supervisor and by the gateway for its pool.

A child's death is known at once and for certain from its pidfd; no heartbeat, no signal handler. Children are started
by `posix_spawn`/`vfork` through subprocess (never a plain fork: gRPC and CUDA do not survive one), in a process group
of their own, so that Ctrl-C in a terminal reaches only the supervisor, which then stops them in order. Not in a session
of their own: where the kernel shares the cores out by session, no process could give way to another one.
"""

import asyncio
import contextlib
import logging
import os
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import msgspec

from shared.messages import ToSupervisor

_MAX_MESSAGE = 64 * 1024
"""A ready message is a line for people; more is garbage."""
_KILL_LIMIT_MS = 1_000

_log = logging.getLogger(__name__)


class Backoff:
    """When a failed process may start again. Pure policy: every time is passed in (monotonic seconds)."""

    def __init__(self, *, first_s: float, max_s: float, stable_s: float) -> None:
        """Delays double from `first_s` to `max_s`; a process that lived `stable_s` starts again without delay."""
        self.failures_in_a_row = 0
        self._first_s = first_s
        self._max_s = max_s
        self._stable_s = stable_s
        self._started_s: float | None = None
        self._next_s = 0.0

    def started(self, now_s: float) -> None:
        """The process was started."""
        self._started_s = now_s

    def worked(self) -> None:
        """The process did its work in this life: whatever ended others before it is over."""
        self.failures_in_a_row = 0

    def failed(self, now_s: float) -> None:
        """The process has ended without being asked to, or could not be started."""
        was_stable = self._started_s is not None and now_s - self._started_s >= self._stable_s
        self._started_s = None
        if was_stable:
            self.failures_in_a_row = 1
            self._next_s = now_s
            return
        self.failures_in_a_row += 1
        # The exponent is capped: 2.0 ** 2000 would raise.
        delay_s = self._first_s * 2.0 ** min(self.failures_in_a_row - 1, 60)
        self._next_s = now_s + min(delay_s, self._max_s)

    def next_delay_s(self, now_s: float) -> float:
        """Seconds from now until the next start is allowed; 0 when it is."""
        return max(0.0, self._next_s - now_s)

    def __repr__(self) -> str:
        return f"<Backoff failures={self.failures_in_a_row}>"


class Child:
    """One running child process. The owner must see it end (`on_exit`) or `close` it."""

    def __init__(self, name: str, popen: "subprocess.Popen[bytes]", ready_fd: int) -> None:
        """Use `spawn`."""
        self.name = name
        self.pid = popen.pid
        self.exit_code: int | None = None
        """None while it lives; negative: the number of the signal that killed it."""
        self._popen = popen
        self._pidfd = os.pidfd_open(popen.pid)
        self._ready_fd = ready_fd
        self._received = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._message_callback: Callable[[Child, ToSupervisor], None] | None = None

    @classmethod
    def spawn(
        cls, name: str, argv: Sequence[str], pass_fds: Sequence[int] = (), env: Mapping[str, str] | None = None
    ) -> Self:
        """Start `argv` with `--parent-pid` and `--ready-fd` added (see `shared.child`). Main thread only.

        Raises OSError when the system can't start a process.
        """
        ready, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.set_blocking(theirs, True)
            popen = subprocess.Popen(  # noqa: S603 - argv is ours, never a caller's
                [*argv, "--parent-pid", str(os.getpid()), "--ready-fd", str(theirs)],
                stdin=subprocess.DEVNULL,
                pass_fds=(*pass_fds, theirs),
                env=env,
                process_group=0,
            )
        except OSError:
            os.close(ready)
            raise
        finally:
            os.close(theirs)
        return cls(name, popen, ready)

    def terminate(self) -> None:
        """Ask it to stop (SIGTERM)."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it now (SIGKILL)."""
        self._signal(signal.SIGKILL)

    def on_exit(self, loop: asyncio.AbstractEventLoop, callback: "Callable[[Child, int], None]") -> None:
        """Call `callback(child, exit_code)` on the loop once it is dead and reaped, after its last message."""
        self._loop = loop
        loop.add_reader(self._pidfd, self._exited, callback)

    def on_message(self, loop: asyncio.AbstractEventLoop, callback: "Callable[[Child, ToSupervisor], None]") -> None:
        """Call `callback(child, message)` on the loop for what its Announcer says."""
        self._loop = loop
        self._message_callback = callback
        loop.add_reader(self._ready_fd, self._read_messages)

    def close(self) -> None:
        """Kill it if it lives, reap it and forget the callbacks. Idempotent.

        Waits for the kernel to end it, 1 s at most: a process stuck in a driver can't be ended by anyone.
        """
        if self._pidfd >= 0:
            self.kill()
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            poller.poll(_KILL_LIMIT_MS)
            self._release()

    def _signal(self, number: signal.Signals) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):  # dead, and not reaped yet
                signal.pidfd_send_signal(self._pidfd, number)

    def _exited(self, callback: "Callable[[Child, int], None]") -> None:
        if self._message_callback is not None:
            self._read_messages()
        self._release()
        if self.exit_code is not None:
            callback(self, self.exit_code)

    def _release(self) -> None:
        if self._pidfd < 0:
            return
        self._close_ready()
        if self._loop is not None:
            self._loop.remove_reader(self._pidfd)
        self.exit_code = self._popen.poll()
        os.close(self._pidfd)
        self._pidfd = -1

    def _close_ready(self) -> None:
        if self._ready_fd >= 0:
            if self._loop is not None:
                self._loop.remove_reader(self._ready_fd)
            os.close(self._ready_fd)
            self._ready_fd = -1

    def _read_messages(self) -> None:
        while self._ready_fd >= 0:
            try:
                data = os.read(self._ready_fd, _MAX_MESSAGE)
            except BlockingIOError:
                return
            if not data:
                self._close_ready()
                return
            self._received += data
            self._take_messages()

    def _take_messages(self) -> None:
        received = self._received
        while len(received) >= 4:
            end = 4 + int.from_bytes(received[:4], "little")
            if len(received) < end <= _MAX_MESSAGE:
                return
            message = _decode(received[4:end]) if end <= _MAX_MESSAGE else None
            if message is None:
                _log.warning("%s sent garbage instead of a ready message", self.name)
                self._close_ready()
                return
            del received[:end]
            if self._message_callback is not None:
                self._message_callback(self, message)

    def __repr__(self) -> str:
        return f"<Child {self.name} pid={self.pid} exit_code={self.exit_code}>"


def _decode(body: bytes | bytearray) -> ToSupervisor | None:
    try:
        return msgspec.msgpack.decode(body, type=ToSupervisor)
    except (msgspec.MsgspecError, ValueError):
        return None
