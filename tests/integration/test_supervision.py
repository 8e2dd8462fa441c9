"""Real children: start, ready messages, death, signals, and what happens when the parent dies."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from shared.messages import ProcessFailed, ProcessReady, ToSupervisor
from shared.supervision import Child

LIMIT_S = 20
FAKE = (sys.executable, "-m", "tests.support.fake_child")

PARENT = """
import select, sys
from shared.supervision import Child
child = Child.spawn("child", [sys.executable, "-m", "tests.support.fake_child", "child"])
print(child.pid, flush=True)
select.select([child._ready_fd], [], [])
print("ready", flush=True)
sys.stdin.read()
"""


class Watched:
    """A child with its messages and its end as things to await."""

    def __init__(self, argv: tuple[str, ...], **spawn: object) -> None:
        self.child = Child.spawn("child", argv, **spawn)  # type: ignore[arg-type]  # passed through
        self.messages: asyncio.Queue[ToSupervisor] = asyncio.Queue()
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        self.child.on_message(loop, lambda _, message: self.messages.put_nowait(message))
        self.child.on_exit(loop, lambda _, code: self.ended.set_result(code))

    async def message(self) -> ToSupervisor:
        async with asyncio.timeout(LIMIT_S):
            return await self.messages.get()

    async def exit_code(self) -> int:
        async with asyncio.timeout(LIMIT_S):
            return await self.ended


async def test_ready_then_an_orderly_stop() -> None:
    watched = Watched((*FAKE, "child"))
    assert await watched.message() == ProcessReady("child", str(watched.child.pid))
    assert os.getpgid(watched.child.pid) == watched.child.pid, "Ctrl-C must not reach children"
    assert os.getsid(watched.child.pid) == os.getsid(0), "else none of them could give way to another"
    watched.child.terminate()
    assert await watched.exit_code() == 0
    assert repr(watched.child) == f"<Child child pid={watched.child.pid} exit_code=0>"
    watched.child.terminate()  # harmless now
    watched.child.kill()
    watched.child.close()


async def test_sigkill_is_known_at_once() -> None:
    watched = Watched((*FAKE, "child"))
    await watched.message()
    started_s = asyncio.get_running_loop().time()
    os.kill(watched.child.pid, signal.SIGKILL)
    assert await watched.exit_code() == -signal.SIGKILL
    assert asyncio.get_running_loop().time() - started_s < 0.5


async def test_a_start_error_is_one_line_a_message_and_an_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    watched = Watched((*FAKE, "child", "--fail", "3"))
    assert await watched.exit_code() == 3
    assert watched.messages.get_nowait() == ProcessFailed("child", 3, "child can't start"), "after the exit"
    assert capfd.readouterr().err == "headrace child: child can't start\n"


async def test_a_bug_is_a_trace_in_the_log_and_70(capfd: pytest.CaptureFixture[str]) -> None:
    watched = Watched((*FAKE, "child", "--raises"))
    assert await watched.exit_code() == 70
    message = watched.messages.get_nowait()
    assert isinstance(message, ProcessFailed)
    assert "unexpected failure (RuntimeError)" in message.text
    assert "Traceback" in capfd.readouterr().err


async def test_close_kills_and_reaps() -> None:
    watched = Watched((*FAKE, "child", "--stubborn"))
    await watched.message()
    watched.child.terminate()
    watched.child.close()
    watched.child.close()
    assert watched.child.exit_code == -signal.SIGKILL
    assert not psutil.pid_exists(watched.child.pid)
    assert not watched.ended.done(), "no callback after close"


async def test_garbage_on_the_ready_pipe_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    write = "import os,sys; os.write(int(sys.argv[sys.argv.index('--ready-fd') + 1]), b'\\xff' * 100)"
    watched = Watched((sys.executable, "-c", write))
    assert await watched.exit_code() == 0
    assert watched.messages.empty()
    assert "garbage" in caplog.text


async def test_a_program_that_is_not_there_is_an_error_and_leaks_nothing() -> None:
    before = descriptors()
    with pytest.raises(FileNotFoundError):
        Child.spawn("child", ["/does/not/exist"])
    assert descriptors() == before


async def test_only_the_named_descriptors_are_inherited(tmp_path: Path) -> None:
    readable, writable = os.pipe()
    listing = tmp_path / "fds"
    code = f"import os; open({str(listing)!r}, 'w').write(' '.join(os.listdir('/proc/self/fd')))"
    watched = Watched((sys.executable, "-c", code), pass_fds=(readable,))
    assert await watched.exit_code() == 0
    inherited = {int(fd) for fd in listing.read_text().split()}
    assert readable in inherited
    assert writable not in inherited
    os.close(readable)
    os.close(writable)


async def test_twenty_children_leak_no_descriptor() -> None:
    before = descriptors()
    for _ in range(20):
        assert await Watched((sys.executable, "-c", "")).exit_code() == 0
    assert descriptors() == before


async def test_a_child_dies_with_its_parent_however_that_ends() -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT), stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        pid = int(await parent.stdout.readline())
        assert await parent.stdout.readline() == b"ready\n"
    pidfd = os.pidfd_open(pid)
    died = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, died.set)
    parent.kill()
    async with asyncio.timeout(2.0):
        await died.wait()
    asyncio.get_running_loop().remove_reader(pidfd)
    os.close(pidfd)
    await parent.wait()


async def test_a_child_whose_parent_was_dead_before_it_looked_ends_itself_without_a_word() -> None:
    process = await asyncio.create_subprocess_exec(*FAKE, "child", "--parent-pid", "1", stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(LIMIT_S):
        _, errors = await process.communicate()
    assert process.returncode == 71
    assert errors == b""


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
