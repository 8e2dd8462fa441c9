"""The model repository, write side. Used by `headrace models`, the gateway (traffic) and the admin service.

A version appears whole or not at all: it is built in a hidden folder beside the others, flushed to the disk, and
renamed; it goes the same way back. Whatever a crash leaves behind is a hidden folder that nobody reads and that the
next writer removes.

The same version is stored once. The same file of two versions is stored twice: a version must be readable with `ls`,
removable by itself and free of links (a hard link's bytes could be changed from elsewhere, and `verify` refuses it).
"""

import contextlib
import datetime as dt
import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from shared import onnx_check
from shared.errors import Conflict, UnknownVersion
from shared.model_config import CONFIG_FILE, RepositoryError
from shared.repository import (
    META_FILE,
    TRAFFIC_FILE,
    VERSIONS,
    Meta,
    ModelVersion,
    Repository,
    digest_of,
    is_name,
    no_name,
)
from shared.repository_files import PIECE_BYTES, reason_of
from shared.repository_lock import HIDDEN, Waste, bytes_in, hidden_folder, left_in, locked, sync_folder
from shared.repository_sources import is_file_name, open_plain
from shared.traffic import Traffic, Why, switch

_WAY_OUT = {
    "current": "give its traffic to another one first (`headrace traffic {} --to HASH`)",
    "canary": "end it first (`headrace traffic {} --rollback`)",
    "shadow": "end it first (`headrace traffic {} --rollback`)",
    "standby": "it is there to go back to: give that up first (`headrace traffic {} --drop-standby`)",
}


class Removed(msgspec.Struct, frozen=True):
    """What is no longer there."""

    name: str
    version: str
    nbytes: int


def add_version(
    root: Path, name: str, files: Mapping[str, Path], meta: Meta, *, make_current: bool = False, by: str = ""
) -> ModelVersion:
    """Store files (relative name → where they lie now) as a version of a model; the same content is stored once.

    The model's folder must hold a model.yaml. A model's first version becomes current; a later one only when asked to.
    `meta` tells where the version comes from; digest, files and created are filled in here. Raises RepositoryError for
    a bad name, no files, links, or a disk that refuses.
    """
    _check(name, files)
    folder = root / name
    if not (folder / CONFIG_FILE).is_file():
        raise RepositoryError(f"model {name}: its folder holds no {CONFIG_FILE}")
    digests = {relative: _plain_digest(path) for relative, path in files.items()}
    digest = digest_of(digests)
    target = folder / VERSIONS / digest[:16]
    if not (target / META_FILE).is_file():
        whole = msgspec.structs.replace(meta, digest=digest, files=dict(sorted(digests.items())), created=now_utc())
        with hidden_folder(folder, target.name) as hidden:
            _store(hidden, files, whole)
            with locked(folder) as waste:
                _appear(root, hidden, target, by, waste)
    else:  # the caller relies on this content: a file that rotted must not pass for it
        Repository.verify(Repository(root).open(name, target.name))
    if make_current:
        set_current(root, name, target.name, by=by)
    return Repository(root).open(name, target.name)


def remove_version(root: Path, name: str, version: str, *, unless: Callable[[], Collection[str]] = tuple) -> Removed:
    """Take a version away: first its name, then its bytes.

    `unless`: versions that are in use elsewhere, asked while nobody else can write. Raises Conflict when traffic.json
    or `unless` has it in use, UnknownModel, UnknownVersion, RepositoryError.
    """
    if version not in Repository(root).versions(name):
        raise UnknownVersion(f"model {name} has no version {version[:100]!r}")
    folder = root / name
    with locked(folder) as waste:
        waste.sweep()
        repository = Repository(root)
        traffic = repository.traffic(name)
        if version in traffic.wanted() or repository.versions(name) == [version]:
            role = role_of(traffic, version)
            raise Conflict(f"version {version} of {name} is in use ({role}): {_WAY_OUT[role].format(name)}")
        if version in unless():
            raise Conflict(f"version {version} of {name} is in use by the running server")
        if version not in repository.versions(name):
            raise UnknownVersion(f"version {version} of {name} has been removed just now")
        nbytes = bytes_in(folder / VERSIONS / version)
        waste.put(folder / VERSIONS / version)
    return Removed(name, version, nbytes)


def sweep(root: Path, name: str, *, dry_run: bool = False) -> int:
    """Remove what dead writers left in a model's folder; `dry_run`: only count. Returns the bytes."""
    if dry_run:
        return left_in(root / name)
    with locked(root / name) as waste:
        return waste.sweep()


def role_of(traffic: Traffic, version: str) -> Literal["current", "canary", "shadow", "standby", ""]:
    """What a version is to its model: current, canary, shadow, standby, or nothing."""
    canary = traffic.canary
    if canary is not None and canary.version == version:
        return "shadow" if canary.shadow else "canary"
    if version == traffic.current or not traffic.current:
        return "current"
    return "standby" if version and version == traffic.standby else ""


def set_current(root: Path, name: str, version: str, *, by: str = "") -> Traffic:
    """Make a version the current one and write the change into the history, atomically.

    Raises UnknownModel, UnknownVersion, RepositoryError.
    """
    if version not in Repository(root).versions(name):
        raise UnknownVersion(f"model {name} has no version {version[:100]!r}")
    return change_traffic(root, name, lambda before: switch(before, version, Why(now_utc(), by)))


def change_traffic(root: Path, name: str, change: Callable[[Traffic], Traffic]) -> Traffic:
    """Replace a model's traffic.json by what `change` makes of it, while no other writer is at it.

    Raises what `change` raises, then nothing has happened; UnknownVersion for one that has been removed meanwhile,
    UnknownModel, RepositoryError.
    """
    Repository(root, only=name).versions(name)
    with locked(root / name):
        repository = Repository(root, only=name)  # anew: what was added or removed while others had their turn
        versions, before = repository.versions(name), repository.traffic(name)
        if not before.current and len(versions) == 1:  # the only one is current without any file
            before = Traffic(current=versions[0])
        after = change(before)
        # What had its part before may be gone (by hand, perhaps): that must not keep anybody from ending a canary.
        for version in [after.current, *(each for each in after.wanted() if each not in before.wanted())]:
            if version not in versions and version != before.current:
                raise UnknownVersion(f"model {name} has no version {version[:100]!r}: it has been removed")
        return _write_traffic(root / name, before, after)


def now_utc() -> str:
    """For the history: UTC, ISO 8601, to the second."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file so that a reader, or a crash, meets the old content or the new one and nothing between."""
    temporary = path.with_name(f"{HIDDEN}{path.name}")
    try:
        _write(temporary, content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _check(name: str, files: Mapping[str, Path]) -> None:
    if not is_name(name):
        raise RepositoryError(no_name(name))
    if not files:
        raise RepositoryError(f"model {name}: a version needs at least one file")
    for relative in files:
        if not is_file_name(relative):
            raise RepositoryError(f"model {name}: {relative[:100]!r} can't be a file of a version")


def _store(hidden: Path, files: Mapping[str, Path], meta: Meta) -> None:
    for relative, source in files.items():
        copy = hidden / relative
        with _told_with(source.name):
            copy.parent.mkdir(parents=True, exist_ok=True)
            _copy(source, copy, meta.files[relative])
    for relative in files:
        if relative.endswith(onnx_check.SUFFIX):
            beside = [
                other.rpartition("/")[2] for other in files if other.rpartition("/")[0] == relative.rpartition("/")[0]
            ]
            onnx_check.check(hidden / relative, beside, relative)
    with _told_with(META_FILE):
        _write(hidden / META_FILE, _readable(meta))
        for place in {hidden, *(path for path in hidden.rglob("*") if path.is_dir())}:
            sync_folder(place)


@contextlib.contextmanager
def _told_with(file: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RepositoryError(f"{file}: can't be stored: {reason_of(error)} (nothing was changed)") from error


def _appear(root: Path, hidden: Path, target: Path, by: str, waste: Waste) -> None:
    """Give a whole version its name, under the model's lock; a model's first one becomes current."""
    name = target.parents[1].name
    if (target / META_FILE).is_file():  # another process has stored the same just now
        return
    before = Repository(root).traffic(name)
    others = [version for version in Repository(root).versions(name) if version != target.name]
    if target.exists():  # without a readable meta.json: it is no version, and stands in the way
        waste.put(target)
    if not before.current and len(others) == 1:  # without a traffic.json it was current as the only one
        _write_traffic(target.parents[1], before, Traffic(current=others[0]))
    hidden.rename(target)
    sync_folder(target.parent)
    if not before.current and not others:
        _write_traffic(target.parents[1], before, switch(before, target.name, Why(now_utc(), by)))


def _write_traffic(folder: Path, before: Traffic, after: Traffic) -> Traffic:
    path = folder / TRAFFIC_FILE
    if after != before or not path.exists():
        write_atomically(path, _readable(after))
    return after


def _plain_digest(path: Path) -> str:
    with open_plain(path) as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise RepositoryError(f"{path}: can't be read: {reason_of(error)}") from error


def _copy(source: Path, target: Path, digest: str) -> None:
    found = hashlib.sha256()
    with open_plain(source) as reader, target.open("xb") as writer:
        while piece := reader.read(PIECE_BYTES):
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


def _readable(value: msgspec.Struct) -> bytes:
    """JSON for people: two spaces, one field a line."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
