"""Turns of those who write one model, and the hidden folders in which they work. Used by `shared.repository_writer`.

The lock on a model's folder is held for moments only, never while files are copied or deleted: a rollback must not
wait for gigabytes. Who copies holds a lock on its own hidden folder instead, by which the next writer sees that it
lives. The kernel releases both when the process dies.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from shared.model_config import RepositoryError
from shared.repository_files import VERSIONS, reason_of

HIDDEN = ".new-"
"""How the names of what is not there yet begin."""
REMOVED = ".old-"
"""How the names of what is no longer there begin."""
LOCK_LIMIT_S = 30.0
"""How long a writer waits for its turn: the others need moments, unless the disk hangs."""
_LOCK_STEP_S = 0.01


class Waste:
    """What loses its name under a folder's lock and is deleted when others can write again: it may be gigabytes.

    Until then this process holds it, so that nobody else deletes it as well.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: list[Path] = []
        self._held = contextlib.ExitStack()

    def put(self, path: Path) -> None:
        """A folder that is no longer there from now on. Raises OSError."""
        gone = path.with_name(f"{REMOVED}{path.name}-{secrets.token_hex(4)}")
        if not _taken(path, self._held):
            raise OSError(errno.EBUSY, "another process has it open for writing", os.fspath(path))
        path.rename(gone)
        sync_folder(gone.parent)
        self._paths.append(gone)

    def sweep(self, places: Sequence[tuple[Path, str]] = ()) -> int:
        """Everything that dead writers left there (by default in a model's folder). Returns the bytes."""
        found = leftovers(places or _places(self._folder))
        nbytes = sum(map(bytes_in, found))
        for path in found:
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)  # now: only under the lock it is known that nobody writes it
            elif _taken(path, self._held):
                self._paths.append(path)
        return nbytes

    def empty(self) -> None:
        """Delete it. What can't be deleted stays hidden, for the next sweep."""
        with self._held:
            for path in self._paths:
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[Waste]:
    """Hold the model's folder for writing; what is put into the waste meanwhile is deleted after it is free again."""
    waste = Waste(folder)
    try:
        with _lock_on(folder, f"model {folder.name}"):
            try:
                yield waste
            except OSError as error:
                raise RepositoryError(f"model {folder.name}: can't be written: {reason_of(error)}") from error
    finally:
        waste.empty()


@contextlib.contextmanager
def _lock_on(folder: Path, what: str) -> Iterator[None]:
    """Hold a folder's lock. Raises RepositoryError when that takes longer than LOCK_LIMIT_S."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise RepositoryError(f"{what}: its folder can't be opened: {reason_of(error)}") from None
    try:
        until_s = time.monotonic() + LOCK_LIMIT_S
        while not _try_lock(descriptor):
            if time.monotonic() > until_s:
                raise RepositoryError(f"{what}: another process has been writing for {LOCK_LIMIT_S:g} s; try again")
            time.sleep(_LOCK_STEP_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _places(folder: Path) -> list[tuple[Path, str]]:
    return [(folder, HIDDEN), (folder / VERSIONS, HIDDEN), (folder / VERSIONS, REMOVED)]


def leftovers(places: Sequence[tuple[Path, str]]) -> list[Path]:
    """What dead writers left in these folders under names that begin so; asked under the lock."""
    found = [path for place, prefix in places for path in place.glob(f"{prefix}*")]
    return [path for path in found if not _is_being_filled(path)]


def left_in(folder: Path) -> int:
    """Bytes of what dead writers left in a model's folder."""
    with locked(folder):
        return sum(map(bytes_in, leftovers(_places(folder))))


def _is_being_filled(path: Path) -> bool:
    """Whether a living process holds this hidden folder."""
    if path.is_symlink() or not path.is_dir():  # nobody copies into that
        return False
    with contextlib.ExitStack() as held:
        return not _taken(path, held)


def _taken(path: Path, held: contextlib.ExitStack) -> bool:
    """Hold a hidden folder until `held` ends; False when another process does, or it is no folder any more."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    held.callback(os.close, descriptor)
    return _try_lock(descriptor)


@contextlib.contextmanager
def hidden_folder(folder: Path, version: str) -> Iterator[Path]:
    """A new folder to build a version in, held by this process; gone afterwards unless it was renamed."""
    hidden = folder / VERSIONS / f"{HIDDEN}{version}-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as held:
        with locked(folder) as waste:  # so that no sweep comes between making it and holding it
            waste.sweep()
            hidden.mkdir(parents=True)
            _taken(hidden, held)
        try:
            yield hidden
        except (Exception, KeyboardInterrupt):
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        shutil.rmtree(hidden, ignore_errors=True)  # still there when another process has stored the same just now


@contextlib.contextmanager
def workplace(root: Path) -> Iterator[Path]:
    """A hidden folder of the repository to build a whole model in; gone afterwards, as are those of dead processes.

    It lies on the repository's own file system, so that what fits there fits the repository. Raises OSError,
    RepositoryError.
    """
    with contextlib.ExitStack() as held:
        waste = Waste(root)
        try:
            with _lock_on(root, "the repository"):  # so that no sweep comes between making it and holding it
                waste.sweep([(root, HIDDEN)])
                place = Path(tempfile.mkdtemp(prefix=HIDDEN, dir=root))
                held.callback(shutil.rmtree, place, ignore_errors=True)
                _taken(place, held)
        finally:
            waste.empty()
        yield place


def bytes_in(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
    return sum(file.lstat().st_size for file in files if not file.is_dir())


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
