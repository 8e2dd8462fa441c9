"""Turns of those who write one model, and the hidden folders in which they work. Used by `shared.repository_writer`.

The lock on a model's folder is held for moments only, never while files are copied: a rollback must not wait for an
upload. Who copies holds a lock on its own hidden folder instead, by which the next writer sees that it lives. The
kernel releases both when the process dies.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
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


@contextlib.contextmanager
def locked(folder: Path, *, sweep: bool = True) -> Iterator[None]:
    """Hold the model's folder for writing; sweep what dead writers left."""
    with _lock_on(folder, f"model {folder.name}"):
        try:
            if sweep:
                for path in leftovers(folder):
                    remove(path)
            yield
        except OSError as error:
            raise RepositoryError(f"model {folder.name}: can't be written: {reason_of(error)}") from error


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


def leftovers(folder: Path) -> list[Path]:
    """What dead writers left; asked under the model's lock."""
    places = [(folder, HIDDEN), (folder / VERSIONS, HIDDEN), (folder / VERSIONS, REMOVED)]
    found = [path for place, prefix in places for path in place.glob(f"{prefix}*")]
    return [path for path in found if not _is_being_filled(path)]


def _is_being_filled(path: Path) -> bool:
    """Whether a living process holds this hidden folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # a file, a link: nobody copies into that
        return False
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> int:
    """Delete a file or a folder. Returns its bytes."""
    nbytes = bytes_in(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    return nbytes


@contextlib.contextmanager
def hidden_folder(folder: Path, version: str) -> Iterator[Path]:
    """A new folder to build a version in, held by this process; gone afterwards unless it was renamed."""
    hidden = folder / VERSIONS / f"{HIDDEN}{version}-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as held:
        with locked(folder):  # so that no sweep comes between these two
            hidden.mkdir(parents=True)
            held.enter_context(_lock_on(hidden, f"model {folder.name}"))
        try:
            yield hidden
        except (Exception, KeyboardInterrupt):
            shutil.rmtree(hidden, ignore_errors=True)
            raise


@contextlib.contextmanager
def workplace(root: Path) -> Iterator[Path]:
    """A hidden folder of the repository to build a whole model in; gone afterwards, as are those of dead processes.

    Raises OSError.
    """
    for path in root.glob(f"{HIDDEN}*"):
        if not _is_being_filled(path):
            remove(path)
    with tempfile.TemporaryDirectory(prefix=HIDDEN, dir=root) as place, _lock_on(Path(place), "the repository"):
        yield Path(place)


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
