import errno
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from shared.errors import ExitCode, StartupError
from shared.runtime_dir import RuntimeDir

HOLD = """
import sys
from pathlib import Path
from shared.runtime_dir import RuntimeDir
RuntimeDir.open(Path(sys.argv[1])).lock("gateway")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def parent() -> Iterator[Path]:
    with TemporaryDirectory(prefix="hr-") as name:  # short: a socket's path has 107 bytes
        yield Path(name)


def refused(path: Path) -> str:
    with pytest.raises(StartupError) as caught:
        RuntimeDir.open(path)
    assert caught.value.exit_code == ExitCode.BAD_SETTINGS
    assert caught.value.text.startswith(f"runtime_dir {path} ")
    return caught.value.text


def test_the_folder_is_private_and_gone_after_a_clean_stop(parent: Path) -> None:
    runtime = RuntimeDir.open(parent / "run")
    assert (parent / "run").stat().st_mode & 0o777 == 0o700
    runtime.lock("gateway")
    private = runtime.private(0xAB)
    assert private.name == "gateway-00000000000000ab"
    assert private.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(private / "pool.sock"))
    runtime.close()
    runtime.close()
    assert list(parent.iterdir()) == []


def test_others_keep_the_folder_alive(parent: Path) -> None:
    gateway, worker = RuntimeDir.open(parent / "run"), RuntimeDir.open(parent / "run")
    gateway.lock("gateway")
    worker.lock("worker-0")
    gateway.close()
    assert [path.name for path in (parent / "run").iterdir()] == ["worker-0.lock"]
    worker.close()
    assert list(parent.iterdir()) == []


def test_a_lock_survives_that_the_last_process_has_just_removed_the_folder(parent: Path) -> None:
    early, late = RuntimeDir.open(parent / "run"), RuntimeDir.open(parent / "run")
    early.close()
    late.lock("gateway")
    assert (parent / "run" / "gateway.lock").exists()
    late.close()


@pytest.mark.parametrize("mode", [0o750, 0o707, 0o777])
def test_a_folder_that_lets_others_in_is_refused(parent: Path, mode: int) -> None:
    (parent / "run").mkdir()
    (parent / "run").chmod(mode)
    assert f"mode {mode:04o}" in refused(parent / "run")


def test_a_link_and_a_file_are_refused(parent: Path) -> None:
    (parent / "real").mkdir(0o700)
    (parent / "link").symlink_to(parent / "real")
    assert "link or file" in refused(parent / "link")
    (parent / "file").touch()
    refused(parent / "file")


def test_a_foreign_folder_is_refused(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (parent / "run").mkdir(0o700)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert f"belongs to user {owner}" in refused(parent / "run")


def test_a_path_too_long_for_a_socket_is_refused(parent: Path) -> None:
    assert "too long for a Unix socket" in refused(parent / ("x" * 80))


def test_the_default_is_the_users_own(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(parent))
    assert RuntimeDir.open(None).path == parent / "headrace"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(parent))
    assert RuntimeDir.open(None).path == parent / f"headrace-{os.getuid()}"


def test_a_second_start_exits_3_naming_the_first_and_a_dead_holder_does_not_count(parent: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(parent / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        runtime = RuntimeDir.open(parent / "run")
        with pytest.raises(StartupError, match=f"gateway already runs in .* \\(pid {holder.pid}\\)") as caught:
            runtime.lock("gateway")
        assert caught.value.exit_code == ExitCode.IN_USE
        runtime.lock("worker-0")  # another role is free
        holder.kill()
    runtime.lock("gateway")
    runtime.close()


def test_a_released_lock_can_be_taken_again(parent: Path) -> None:
    runtime = RuntimeDir.open(parent / "run")
    runtime.lock("gateway").release()
    runtime.lock("gateway")
    runtime.close()


def test_sweep_removes_what_dead_gateways_left_and_nothing_else(parent: Path) -> None:
    runtime = RuntimeDir.open(parent / "run")
    runtime.lock("gateway")
    dead = runtime.path / "gateway-00000000000000ff"
    dead.mkdir()
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(dead / "worker.sock"))
    mine, theirs = runtime.path / "gateway-old", runtime.path / "gateway-0123456789abcdef"
    for folder in (mine, theirs):  # one not named like ours, one with something in it that no gateway makes
        folder.mkdir()
        (folder / "letter.txt").touch()
    runtime.gateway_socket().touch()
    runtime.admin_socket().touch()
    (runtime.path / "worker-7.lock").touch()
    living = RuntimeDir.open(parent / "run")
    living.lock("worker-0")
    own = runtime.private(1)
    (runtime.path / "notes").touch()
    runtime.sweep()
    left = [own.name, theirs.name, mine.name, "gateway.lock", "notes", "worker-0.lock"]
    assert sorted(path.name for path in runtime.path.iterdir()) == sorted(left)
    assert (mine / "letter.txt").exists()
    assert (theirs / "letter.txt").exists()
    living.close()
    runtime.close()


def test_gateways_have_names_of_their_own_and_sweep_only_their_own(parent: Path) -> None:
    first, second = RuntimeDir.open(parent / "run"), RuntimeDir.open(parent / "run")
    first.lock("gateway")
    second.lock("gateway-1")
    living = [first.private(1), second.private(2, 1)]
    for path in (second.gateway_socket(1), second.peer_socket(1), second.admin_socket(1)):
        path.touch()
    assert [path.name for path in living] == ["gateway-0000000000000001", "gateway-1-0000000000000002"]
    assert (second.gateway_socket(1).name, second.peer_socket(1).name) == ("gateway-1.sock", "gateway-1.peer")
    dead = RuntimeDir(first.path).private(3, 1)
    first.sweep()
    assert dead.exists()
    assert second.gateway_socket(1).exists()
    assert second.admin_socket(1).exists()
    second.sweep(1)
    assert not dead.exists()
    assert [path.exists() for path in living] == [True, True]
    second.close()
    first.close()
    assert list(parent.iterdir()) == []


def test_the_supervisor_sweeps_whatever_dead_gateways_left_and_spares_the_living(parent: Path) -> None:
    living, supervisor = RuntimeDir.open(parent / "run"), RuntimeDir.open(parent / "run")
    living.lock("gateway-2")
    RuntimeDir(living.path).private(3, 1)
    for index in (0, 1, 2):
        living.gateway_socket(index).touch()
        living.peer_socket(index).touch()
        living.admin_socket(index).touch()
    supervisor.sweep_all()
    left = ["admin-2.sock", "gateway-2.lock", "gateway-2.peer", "gateway-2.sock"]
    assert sorted(path.name for path in living.path.iterdir()) == left
    assert (living.is_held("gateway-2"), living.is_held("gateway-1")) == (True, False)
    supervisor.close()


def test_a_lock_that_is_being_swept_is_waited_for(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = RuntimeDir.open(parent / "run")
    (runtime.path / "gateway.lock").write_text("999999999\n")  # of a dead process
    sweeper = os.open(runtime.path / "gateway.lock", os.O_RDWR)
    fcntl.flock(sweeper, fcntl.LOCK_EX)
    waits: list[float] = []

    def wait(_read: object, _write: object, _other: object, timeout_s: float) -> None:
        waits.append(timeout_s)
        os.close(sweeper)

    monkeypatch.setattr("select.select", wait)
    runtime.lock("gateway")
    assert len(waits) == 1
    runtime.close()


def test_a_full_disk_is_one_sentence_and_leaves_no_lock(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    runtime = RuntimeDir.open(parent / "run")
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StartupError, match=r"can't be written to \(No space left on device\)") as caught:
        runtime.lock("gateway")
    assert caught.value.exit_code == ExitCode.BAD_SETTINGS
    assert not (parent / "run").exists()


def test_a_shared_role_excludes_the_whole_one_until_the_last_has_left(parent: Path) -> None:
    one, two, other = (RuntimeDir.open(parent / "run") for _ in range(3))
    locks = [one.lock("port", shared=True), two.lock("port", shared=True)]
    for lock in locks:
        with pytest.raises(StartupError) as caught:
            other.lock("port")
        assert caught.value.exit_code == ExitCode.IN_USE
        lock.release()
        lock.release()
    assert list((parent / "run").iterdir()) == []
    other.lock("port")
    with pytest.raises(StartupError):
        one.lock("port", shared=True)
    other.close()
