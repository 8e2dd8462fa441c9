import atexit
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from shared.child import Announcer, StopSignal, give_way, limit_library_threads, raise_file_limit, run_main
from shared.errors import ExitCode, StartupError
from shared.messages import ProcessFailed, ProcessReady, ToSupervisor


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    readable, writable = os.pipe()
    yield readable, writable
    os.close(readable)


def received(fd: int) -> list[ToSupervisor]:
    data, messages = os.read(fd, 65536), []
    while data:
        size = int.from_bytes(data[:4], "little")
        messages.append(msgspec.msgpack.decode(data[4 : 4 + size], type=ToSupervisor))
        data = data[4 + size :]
    return messages


def test_a_signal_is_recorded_and_wakes_whoever_waits() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        assert not stop.wait(0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(10.0)
        assert (stop.requested, stop.count) == (True, 1)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.count == 2
        stop.acknowledge()
        stop.acknowledge()
        assert stop.requested
    assert signal.getsignal(signal.SIGTERM) == before
    stop.close()


def test_a_signal_ends_a_poll_that_it_does_not_interrupt() -> None:
    """As one does that comes just before the poll begins: here another thread gets it."""
    go, done = threading.Event(), threading.Event()

    def other() -> None:
        go.wait(10.0)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        done.wait(10.0)

    with StopSignal(blocking=True) as stop:
        thread = threading.Thread(target=other)
        thread.start()
        threading.Timer(0.05, go.set).start()
        started_s = time.monotonic()
        assert stop.wait(10.0)
        assert time.monotonic() - started_s < 5.0
        done.set()
        thread.join()
        stop.acknowledge()
        assert stop.count == 1
    assert signal.set_wakeup_fd(-1) == -1


def test_a_closed_terminal_is_a_stop_unless_nohup_was_asked_for() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have asked for nohup
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.wait(10.0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested
    signal.signal(signal.SIGHUP, before)


def test_announcements_travel_over_the_pipe(pipe: tuple[int, int]) -> None:
    announcer = Announcer(pipe[1])
    announcer.ready("gateway", "gRPC 127.0.0.1:8001")
    announcer.failed("gateway", 3, "port in use")
    announcer.close()
    announcer.close()
    assert received(pipe[0]) == [
        ProcessReady("gateway", "gRPC 127.0.0.1:8001"),
        ProcessFailed("gateway", 3, "port in use"),
    ]


def test_nobody_to_announce_to_is_fine() -> None:
    Announcer(None).ready("gateway", "")
    readable, writable = os.pipe()
    os.close(readable)
    announcer = Announcer(writable)
    announcer.ready("gateway", "")
    announcer.close()


def test_a_wrong_ready_fd_is_a_start_error() -> None:
    with pytest.raises(StartupError, match="--ready-fd 987654"):
        Announcer(987654)


def ended(error: BaseException | int, announcer: Announcer | None = None) -> int:
    def body() -> int:
        if isinstance(error, BaseException):
            raise error
        return error

    with pytest.raises(Exited) as caught:
        run_main("gateway", body, announcer)
    return caught.value.exit_code


class Exited(BaseException):
    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def survivor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the process as an exception, without this process's exit hooks."""

    def leave(exit_code: int) -> None:
        raise Exited(exit_code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)


@pytest.mark.usefixtures("survivor")
def test_exit_codes(capsys: pytest.CaptureFixture[str], pipe: tuple[int, int]) -> None:
    announcer = Announcer(pipe[1])
    assert ended(0) == 0
    assert ended(KeyboardInterrupt()) == 0
    assert capsys.readouterr().err == ""
    assert ended(StartupError(ExitCode.BAD_SETTINGS, "no such key"), announcer) == 2
    assert capsys.readouterr().err == "headrace gateway: no such key\n"
    assert ended(RuntimeError("secret"), announcer) == 70
    announcer.close()
    failed = [message for message in received(pipe[0]) if isinstance(message, ProcessFailed)]
    assert [message.exit_code for message in failed] == [2, 70]
    assert "secret" not in failed[1].text


def test_the_file_limit_is_raised_to_what_is_allowed() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raise_file_limit() == before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_libraries_are_told_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    limit_library_threads(3)
    assert os.environ["OMP_NUM_THREADS"] == os.environ["OPENBLAS_NUM_THREADS"] == "3"


def test_memory_beyond_the_limit_is_a_memory_error() -> None:
    code = (
        "from shared.child import limit_address_space\nlimit_address_space(64 << 20)\nkept = bytearray(32 << 20)\n"
        "try:\n    bytearray(128 << 20)\nexcept MemoryError:\n    raise SystemExit(5)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 5


def test_the_end_runs_exit_hooks_and_waits_for_no_thread() -> None:
    code = (
        "import atexit, threading\nfrom shared.child import run_main\n"
        "atexit.register(print, 'hook')\nthreading.Thread(target=threading.Event().wait).start()\n"
        "run_main('test', lambda: 7)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=30)
    assert (done.returncode, done.stdout) == (7, b"hook\n")


@pytest.mark.parametrize(("nice", "asked"), [(0, []), (10, [10])])
def test_who_is_told_to_gives_way(monkeypatch: pytest.MonkeyPatch, nice: int, asked: list[int]) -> None:
    niceness: list[int] = []
    monkeypatch.setattr(os, "nice", niceness.append)
    give_way(nice)
    assert niceness == asked
