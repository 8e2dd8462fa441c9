"""The private folder (0700) where the processes of one server meet. Used by gateway, workers and supervisor.

It holds each gateway's greeting socket, its admin socket (and, of several gateways, the one for the others' questions),
one lock file per role that may exist once, and one folder per gateway life for its ZeroMQ sockets. Nothing in it
outlives a clean stop, and what a killed gateway left is swept by the next one of its number.
"""

import atexit
import contextlib
import fcntl
import os
import re
import select
import stat
import tempfile
from pathlib import Path
from typing import Self

from shared.errors import ExitCode, StartupError
from shared.settings import MAX_GATEWAYS

_LONGEST_INSIDE = 40
"""Bytes of the longest socket path below the folder: `/gateway-15-<16 hex digits>/` and a name of up to 11."""
_STEP_S, _STEPS = 0.005, 20
"""How long a lock is tried again whose last holder is dead: a sweep holds each for a few microseconds."""
_LONGEST_SOCKET_PATH = 107
"""The kernel's limit for a Unix socket's path."""


def gateway_role(index: int) -> str:
    """What the gateway of this number is called, by its lock, its sockets and its log."""
    return f"gateway-{index}" if index else "gateway"


class Lock:
    """A role taken for this process's life; made by `RuntimeDir.lock`."""

    def __init__(self, path: Path, fd: int, *, shared: bool = False) -> None:
        self.path = path
        self._fd = fd
        self._shared = shared

    def release(self) -> None:
        """Give the role up and remove the file. Idempotent; the kernel does the first half when the process dies."""
        if self._fd >= 0:
            # Removed while still held: whoever waits for this file finds that it is no longer the one at the path.
            if not self._shared or _try(self._fd, fcntl.LOCK_EX):  # the last one that shares it removes it
                self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


class RuntimeDir:
    """The folder, as one process uses it. `close` (also at interpreter exit) removes what this process put there."""

    def __init__(self, path: Path) -> None:
        """Use `open`."""
        self.path = path
        self._locks: list[Lock] = []
        self._private: set[Path] = set()

    @staticmethod
    def place(configured: Path | None) -> Path:
        """Where the folder is, or would be; neither created nor checked. For a command line that only looks."""
        return _default() if configured is None else configured.absolute()

    @classmethod
    def open(cls, configured: Path | None) -> Self:
        """Create the folder, or check the one that is there.

        Raises StartupError (BAD_SETTINGS) when it is not a folder, belongs to someone else, lets others in, or has a
        path too long for a Unix socket.
        """
        path = cls.place(configured)
        if len(os.fsencode(path)) + _LONGEST_INSIDE > _LONGEST_SOCKET_PATH:
            limit = _LONGEST_SOCKET_PATH - _LONGEST_INSIDE
            raise _refused(path, f"has a path of over {limit} bytes, too long for a Unix socket")
        _make(path)
        found = cls(path)
        atexit.register(found.close)
        return found

    def lock(self, name: str, *, shared: bool = False) -> Lock:
        """Take the role `name` until this process ends. Raises StartupError (IN_USE) that names the holder's pid.

        `shared`: together with all others that say so, too.
        """
        path = self.path / f"{name}.lock"
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except FileNotFoundError:  # the last process that left has just removed the folder
                _make(self.path)
                continue
            holder = _holder_after_trying(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            if holder:
                os.close(fd)
                raise StartupError(
                    ExitCode.IN_USE, f"{name} already runs in {self.path} (pid {holder}); stop it, or set runtime_dir"
                )
            if _is_at(path, fd):
                break
            os.close(fd)  # its holder removed it between our open and our lock
        lock = Lock(path, fd, shared=shared)
        self._locks.append(lock)
        try:
            os.ftruncate(fd, 0)
            os.write(fd, f"{os.getpid()}\n".encode("ascii"))
        except OSError as error:
            self.close()
            raise _refused(self.path, f"can't be written to ({error.strerror})") from error
        return lock

    def is_held(self, name: str) -> bool:
        """Whether a living process has the role `name`; this one counts, too."""
        try:
            fd = os.open(self.path / f"{name}.lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def gateway_socket(self, index: int = 0) -> Path:
        """Where workers find gateway number `index`, whichever life of it."""
        return self.path / f"{gateway_role(index)}.sock"

    def peer_socket(self, index: int) -> Path:
        """Where the other gateways find gateway number `index`."""
        return self.path / f"{gateway_role(index)}.peer"

    def admin_socket(self, index: int = 0) -> Path:
        """Where the admin service of gateway number `index` listens."""
        return self.path / (f"admin-{index}.sock" if index else "admin.sock")

    def private(self, generation: int, index: int = 0) -> Path:
        """A new folder (0700) for the ZeroMQ sockets of one gateway life."""
        path = self.path / f"{gateway_role(index)}-{generation:016x}"
        try:
            path.mkdir(0o700)
        except OSError as error:
            raise _refused(self.path, f"can't be written to ({error.strerror})") from error
        self._private.add(path)
        return path

    def sweep(self, index: int = 0) -> None:
        """Remove what dead processes left. Only for the holder of this gateway's lock: its other lives are over."""
        private = re.compile(rf"{gateway_role(index)}-[0-9a-f]{{16}}")
        for path in self.path.glob("gateway-*"):
            if path not in self._private and private.fullmatch(path.name):
                _remove(path)
        self.gateway_socket(index).unlink(missing_ok=True)
        self.peer_socket(index).unlink(missing_ok=True)
        self.admin_socket(index).unlink(missing_ok=True)
        for path in self.path.glob("*.lock"):
            _remove_unheld(path)

    def sweep_all(self) -> None:
        """The same for every gateway that is not alive, by the supervisor while none of them is starting."""
        for index in range(MAX_GATEWAYS):
            with contextlib.suppress(StartupError):
                lock = self.lock(gateway_role(index))
                self.sweep(index)
                self._locks.remove(lock)
                lock.release()

    def close(self) -> None:
        """Remove this process's folders and locks, and the folder itself when it was the last. Idempotent."""
        for path in self._private:
            _remove(path)
        self._private.clear()
        for lock in self._locks:
            lock.release()
        self._locks.clear()
        with contextlib.suppress(OSError):  # others still live in it
            self.path.rmdir()


def _default() -> Path:
    user = os.environ.get("XDG_RUNTIME_DIR")
    if user and Path(user).is_dir():
        return Path(user).absolute() / "headrace"
    return Path(tempfile.gettempdir()).absolute() / f"headrace-{os.getuid()}"


def _make(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise _refused(path, f"can't be created ({error.strerror})") from error
    if not stat.S_ISDIR(found.st_mode):
        raise _refused(path, "is a link or file, not a folder")
    if found.st_uid != os.getuid():
        raise _refused(path, f"belongs to user {found.st_uid}, not to {os.getuid()}")
    if found.st_mode & 0o077:
        raise _refused(path, f"has mode {stat.S_IMODE(found.st_mode):04o}, so others can enter; chmod 0700 it")


def _refused(path: Path, why: str) -> StartupError:
    return StartupError(ExitCode.BAD_SETTINGS, f"runtime_dir {path} {why}")


def _try(fd: int, how: int) -> bool:
    """Whether the lock was free; not the one that it had, if any, when it was not."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder_after_trying(fd: int, how: int) -> str:
    """Take the lock; "" when it is ours now, else its holder's pid."""
    for _ in range(_STEPS):
        if _try(fd, how):
            return ""
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        if holder.isdecimal() and Path(f"/proc/{holder}").exists():
            return holder
        select.select([], [], [], _STEP_S)  # being swept, or taken by one that has not written its pid yet
    return "unknown"


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _remove_unheld(path: Path) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a living holder, ourselves too, makes this fail
            if _is_at(path, fd):
                path.unlink()
        finally:
            os.close(fd)


def _remove(path: Path) -> None:
    # Sockets only, one level: whatever else lies there is not ours, and then the folder stays, too.
    with contextlib.suppress(OSError):  # what ZeroMQ removes at the same moment is as good as removed
        for entry in path.iterdir():
            if stat.S_ISSOCK(entry.lstat().st_mode):
                entry.unlink(missing_ok=True)
        path.rmdir()
