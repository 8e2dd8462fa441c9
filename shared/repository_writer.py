"""The model repository, write side. Used by `headrace models` and, later, the admin service; never by a worker.

A version appears whole or not at all: it is built in a hidden folder beside the others, flushed to the disk, and
renamed. Whatever a crash leaves behind is a hidden folder that nobody reads and that the next writer removes. Writers
of one model take turns by a lock on the model's folder, which the kernel releases when the process dies.
"""

import contextlib
import datetime as dt
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from shared.errors import UnknownVersion
from shared.model_config import CONFIG_FILE, RepositoryError
from shared.repository import (
    META_FILE,
    TRAFFIC_FILE,
    VERSIONS,
    Meta,
    ModelVersion,
    Repository,
    digest_of,
    file_digest,
    is_name,
)
from shared.traffic import Traffic, Why, switch

_HIDDEN = ".new-"


def add_version(
    root: Path, name: str, files: Mapping[str, Path], meta: Meta, *, make_current: bool = False, by: str = ""
) -> ModelVersion:
    """Store files (relative name → where they lie now) as a version of a model; the same content is stored once.

    The model's folder must hold a model.yaml. `meta` tells where the version comes from; digest, files and created are
    filled in here. Raises RepositoryError for a bad name, no files, or a disk that refuses.
    """
    _check(name, files)
    folder = root / name
    if not (folder / CONFIG_FILE).is_file():
        raise RepositoryError(f"model {name}: its folder holds no {CONFIG_FILE}")
    with _locked(folder):
        digests = {relative: file_digest(path) for relative, path in files.items()}
        digest = digest_of(digests)
        version = digest[:16]
        target = folder / VERSIONS / version
        present = (target / META_FILE).is_file()
        if not present:
            whole = msgspec.structs.replace(meta, digest=digest, files=dict(sorted(digests.items())), created=now_utc())
            _store(target, files, whole)
        found = Repository(root).open(name, version)
        if present:  # the caller relies on this content: a file that rotted must not pass for it
            Repository.verify(found)
        if make_current:
            before = Repository(root).traffic(name)
            _write_traffic(folder, before, switch(before, version, Why(now_utc(), by)))
    return found


def set_current(root: Path, name: str, version: str, *, by: str = "") -> Traffic:
    """Make a version the current one and write the change into the history, atomically.

    Raises UnknownModel, UnknownVersion, RepositoryError.
    """
    if version not in Repository(root).versions(name):
        raise UnknownVersion(f"model {name} has no version {version[:100]!a}")
    return change_traffic(root, name, lambda before: switch(before, version, Why(now_utc(), by)))


def change_traffic(root: Path, name: str, change: Callable[[Traffic], Traffic]) -> Traffic:
    """Replace a model's traffic.json by what `change` makes of it, while no other writer is at it.

    Raises what `change` raises, then nothing has happened; UnknownModel, RepositoryError.
    """
    repository = Repository(root)
    versions = repository.versions(name)
    with _locked(root / name):
        before = repository.traffic(name)
        if not before.current and len(versions) == 1:  # the only one is current without any file
            before = Traffic(current=versions[0])
        return _write_traffic(root / name, before, change(before))


def now_utc() -> str:
    """For the history: UTC, ISO 8601, to the second."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file so that a reader, or a crash, meets the old content or the new one and nothing between."""
    temporary = path.with_name(f"{_HIDDEN}{path.name}")
    _write(temporary, content)
    temporary.replace(path)
    _sync_folder(path.parent)


def _check(name: str, files: Mapping[str, Path]) -> None:
    if not is_name(name):
        raise RepositoryError(f"{name[:100]!a} can't be a model's name: letters, digits and . _ - only")
    if not files:
        raise RepositoryError(f"model {name}: a version needs at least one file")
    for relative in files:
        parts = relative.split("/")
        if relative == META_FILE or not all(is_name(part) for part in parts):
            raise RepositoryError(f"model {name}: {relative[:100]!a} can't be a file of a version")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the model's folder for writing; sweep what dead writers left, since no live one can be at work."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise RepositoryError(f"model {folder.name}: its folder can't be opened: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        _sweep(folder)
        yield
    except RepositoryError:
        _sweep(folder)
        raise
    except OSError as error:
        _sweep(folder)
        raise RepositoryError(f"model {folder.name}: can't be written: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    for place in (folder, folder / VERSIONS):
        for path in place.glob(f"{_HIDDEN}*"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _store(target: Path, files: Mapping[str, Path], meta: Meta) -> None:
    hidden = target.with_name(f"{_HIDDEN}{target.name}")
    hidden.mkdir(parents=True)
    for relative, source in files.items():
        copy = hidden / relative
        copy.parent.mkdir(parents=True, exist_ok=True)
        _copy(source, copy, meta.files[relative])
    _write(hidden / META_FILE, _readable(meta))
    for place in {hidden, *(path for path in hidden.rglob("*") if path.is_dir())}:
        _sync_folder(place)
    if target.exists():  # without a readable meta.json: it is no version, and stands in the way
        shutil.rmtree(target)
    hidden.rename(target)
    _sync_folder(target.parent)


def _write_traffic(folder: Path, before: Traffic, after: Traffic) -> Traffic:
    path = folder / TRAFFIC_FILE
    if after != before or not path.exists():
        write_atomically(path, _readable(after))
    return after


def _copy(source: Path, target: Path, digest: str) -> None:
    found = hashlib.sha256()
    with source.open("rb") as reader, target.open("xb") as writer:
        while piece := reader.read(1024 * 1024):
            found.update(piece)
            writer.write(piece)
        if found.hexdigest() != digest:
            raise RepositoryError(f"{source.name}: changed while it was copied")
        writer.flush()
        os.fsync(writer.fileno())
    target.chmod(0o444)  # never changed once written


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as writer:
        writer.write(content)
        writer.flush()
        os.fsync(writer.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _readable(value: msgspec.Struct) -> bytes:
    """JSON for people: two spaces, one field a line."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
