"""Run a command as the terminal's foreground process group, as a shell with job control does.

Used by the Makefile only. Ctrl-C goes to the whole foreground process group; were that make's own, make would die of
the signal and report 130 although the server stopped cleanly. In a group of its own the server alone gets it, and its
exit code is passed on. Ctrl-Z and `fg` work. Without a terminal, SIGINT and SIGTERM are handed on to the command.
The command gets SIGTERM when make itself is killed.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from types import FrameType

_PR_SET_PDEATHSIG = 1
_SAME_SIGNAL_S = 0.5
"""make hands SIGTERM to us although the whole group has it already: the second one must not count as impatience."""


def main() -> int:
    """Start the command in `sys.argv[1:]`, wait for it, and return its exit code (128 + signal when it was killed)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # taking the terminal back from the background must not stop us
    terminal = _terminal()
    child: subprocess.Popen[bytes] | None = None
    last_s = -_SAME_SIGNAL_S

    def hand_on(number: int, _frame: FrameType | None) -> None:
        nonlocal last_s
        if child is not None and time.monotonic() - last_s >= _SAME_SIGNAL_S:
            last_s = time.monotonic()
            os.kill(child.pid, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, hand_on)
    child = subprocess.Popen(sys.argv[1:], process_group=0)
    _give(terminal, child.pid)
    try:
        return _wait(child.pid, terminal)
    finally:
        _give(terminal, os.getpgrp())


def _terminal() -> int | None:
    """The controlling terminal, when we are in its foreground; None when there is nothing to hand over."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    return terminal if os.tcgetpgrp(terminal) == os.getpgrp() else None


def _give(terminal: int | None, group: int) -> None:
    if terminal is not None:
        os.tcsetpgrp(terminal, group)


def _wait(pid: int, terminal: int | None) -> int:
    while True:
        _, status = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        _give(terminal, os.getpgrp())
        os.killpg(0, signal.SIGSTOP)  # Ctrl-Z: stop make and ourselves too, until the shell's `fg`
        _give(terminal, pid)
        os.killpg(pid, signal.SIGCONT)


if __name__ == "__main__":
    sys.exit(main())
