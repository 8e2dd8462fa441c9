"""What every process does about being a process: parent's death, signals, the word "ready", limits, the exit code.

Used inside gateway, pool processes, workers and the supervisor. The other side, which starts and watches children, is
`shared.supervision`; it passes `--parent-pid` and `--ready-fd`, which `add_child_arguments` reads.
"""

import argparse
import atexit
import contextlib
import ctypes
import gc
import logging
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, Self

import msgspec

from shared.errors import ExitCode, StartupError
from shared.messages import ProcessFailed, ProcessReady, ToSupervisor

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LENGTH = 4
"""Bytes before each message on the ready pipe: its length, little endian."""

_log = logging.getLogger(__name__)


def add_child_arguments(parser: argparse.ArgumentParser) -> None:
    """The two options that a supervising process passes to every child; both absent when started by hand."""
    parser.add_argument("--ready-fd", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--parent-pid", type=int, default=None, help=argparse.SUPPRESS)


def bind_to_parent(parent_pid: int | None) -> None:
    """Let the kernel kill this process (SIGKILL) when its parent dies, however that happens; None does nothing.

    Called first thing. The kernel watches the parent's *thread* that started this process, so parents start children
    from their main thread. Ends the process (PEER_LOST) without a word when the parent is dead already: who killed it
    has said why, and a pool process that was just being started would only add a line to that.
    """
    if parent_pid is None:
        return
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a log line must not stop it, whatever the terminal's settings
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise StartupError(ExitCode.INTERNAL, f"prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # it died before the call above
        raise SystemExit(int(ExitCode.PEER_LOST))


class StopSignal:
    """Records SIGTERM, SIGINT and (unless `nohup` forbids it) SIGHUP; the process's own loop acts. Main thread only.

    `fileno()` becomes readable at the first signal and stays so until `acknowledge`; it fits select, `Dealer.receive`
    and `loop.add_reader`.
    """

    def __init__(self, *, blocking: bool = False) -> None:
        """`blocking`: the process waits in polls of its own and has no event loop.

        Python runs `_record` only between two of its instructions. A signal that comes just before a poll begins, or to
        another thread, would end it only at the next message, so the interpreter itself writes to the descriptor.
        """
        self.count = 0
        """Signals so far: a second one means "at once"."""
        self._socket, self._writer = socket.socketpair()
        self._socket.settimeout(0)
        self._writer.settimeout(0)
        self._fd = self._socket.fileno()
        self._wakes = blocking
        if blocking:
            signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._record) for number in numbers}

    @property
    def requested(self) -> bool:
        """Whether someone asked for a stop."""
        return self.count > 0

    def fileno(self) -> int:
        """The wake-up descriptor."""
        return self._fd

    def acknowledge(self) -> None:
        """Make the descriptor quiet until the next signal; `requested` stays true."""
        with contextlib.suppress(BlockingIOError):
            while self._socket.recv(4096):
                pass

    def wait(self, timeout_s: float) -> bool:
        """Sleep for `timeout_s` seconds or until a signal; returns `requested`."""
        if not self.requested:
            poller = select.poll()
            poller.register(self._fd, select.POLLIN)
            poller.poll(max(0.0, timeout_s) * 1000)
        return self.requested

    def close(self) -> None:
        """Put the former handlers back. Idempotent."""
        if self._fd >= 0:
            if self._wakes:
                signal.set_wakeup_fd(-1)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._socket.close()
            self._writer.close()
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        with contextlib.suppress(BlockingIOError):  # full of signals: readable it is
            self._writer.send(b"\0")


class Announcer:
    """Tells whoever started this process how the start went, over an inherited pipe; silent when there is none."""

    def __init__(self, fd: int | None) -> None:
        """`fd` is taken over: not inherited further, closed by `close`."""
        self._fd = fd
        if fd is not None:
            try:
                os.set_inheritable(fd, False)  # noqa: FBT003 - the function's own signature
            except OSError as error:
                raise StartupError(ExitCode.BAD_SETTINGS, f"--ready-fd {fd} is not an open descriptor") from error

    def ready(self, process: str, detail: str) -> None:
        """The process does its work now; `detail` is one line for people."""
        self._send(ProcessReady(process, detail))

    def failed(self, process: str, exit_code: int, text: str) -> None:
        """The process can't go on; it exits with `exit_code` next."""
        self._send(ProcessFailed(process, exit_code, text))

    def close(self) -> None:
        """Close the pipe. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _send(self, message: ToSupervisor) -> None:
        if self._fd is None:
            return
        body = msgspec.msgpack.encode(message)
        with contextlib.suppress(OSError):  # nobody listens any more: PDEATHSIG is on its way
            os.write(self._fd, len(body).to_bytes(_LENGTH, "little") + body)


def run_main(process: str, body: Callable[[], int], announcer: Announcer | None = None) -> NoReturn:
    """Run a process's main function and end the process with its exit code.

    The one place where a StartupError becomes one line on stderr (and a ProcessFailed message), an unexpected exception
    a trace in the log and exit code 70. Exit hooks run, then the process ends without tearing the interpreter down:
    that would take torch most of a second and waits for threads that may never end.
    """
    try:
        code = int(body())
    except StartupError as error:
        code = int(error.exit_code)
        _report(process, code, error.told, announcer)
    except KeyboardInterrupt:  # before StopSignal was in place: an asked-for stop
        code = int(ExitCode.OK)
    except Exception as error:  # noqa: BLE001 - the last line of defence of the process
        code = int(ExitCode.INTERNAL)
        _log.exception("%s: unexpected failure", process)
        _report(process, code, f"unexpected failure ({type(error).__name__}), see the log above", announcer)
    atexit._run_exitfuncs()  # noqa: SLF001 - what sys.exit would do next, without what it does after
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def limit_address_space(extra_bytes: int) -> None:
    """Allow `extra_bytes` of address space beyond what the process has now; more is a MemoryError."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - a kernel file, one word of it
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + extra_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def raise_file_limit() -> int:
    """Raise the limit of open files as far as allowed, and return it: each client connection is one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def keep_freed_memory(block_bytes: int, heap_bytes: int, *, one_arena: bool = False) -> None:
    """Let malloc reuse freed memory for the next request instead of returning it to the kernel in between.

    By default glibc maps large blocks anew each time and trims the heap's top, and every request pays for it in page
    faults. Blocks up to `block_bytes` come from the heap (glibc takes up to 32 MB for granted, more where it is
    patient), which keeps `heap_bytes` that nothing is in. `one_arena`: all threads share one heap. Does nothing with a
    C library that has no mallopt.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, block_bytes)
        mallopt(_M_TRIM_THRESHOLD, heap_bytes)
        if one_arena:
            mallopt(_M_ARENA_MAX, 1)


def give_way(nice: int) -> None:
    """Let the other processes of the server go first when all want the CPU: 0 (as everybody) to 19 (what is left).

    Holds among the processes of one control group and, where the kernel shares the cores out by session (autogroups),
    of one session: whoever starts processes here starts them in its own (`shared.supervision`).
    """
    if nice > 0:
        os.nice(nice)


def collect_garbage_rarely() -> None:
    """Take what exists now for permanent, and look for cycles every 20,000 new objects instead of every 700.

    Called once everything is built. Requests make few cycles, and the collector took a fifth of a busy gateway's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


def limit_library_threads(threads: int) -> None:
    """Tell OpenMP, MKL and OpenBLAS how many threads to make. Only works before they are imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)


def _report(process: str, code: int, text: str, announcer: Announcer | None) -> None:
    with contextlib.suppress(OSError):  # nobody reads it; the exit code still tells
        sys.stderr.write(f"headrace {process}: {text}\n")
        sys.stderr.flush()
    if announcer is not None:
        announcer.failed(process, code, text)
