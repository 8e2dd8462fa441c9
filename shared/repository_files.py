"""Files of the model repository: how they are hashed, checked, read and named in messages. Used by `shared.repository`.

Bytes are read through plain files only: no link, inside a version or on its way into one, leads anywhere else.
"""

import hashlib
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from shared.model_config import RepositoryError

META_FILE = "meta.json"
VERSIONS = "versions"
MAX_JSON_BYTES = 8 * 1024 * 1024
"""meta.json and traffic.json; a history of that size is some 40,000 changes."""
PIECE_BYTES = 1024 * 1024
"""Read and hashed at a time: the GIL is given up within, and progress can be shown."""

T = TypeVar("T")


def digest_of(files: dict[str, str]) -> str:
    """The content hash of a version from its files' hashes: no order, time or place goes in."""
    lines = "".join(f"{name}\0{digest}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def file_digest(path: Path, read: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file, read in pieces; `read` is told of each one's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            if read is not None:
                read(len(piece))
    return digest.hexdigest()


def faults(folder: Path, digests: Mapping[str, str], read: Callable[[int], None] | None = None) -> Iterator[str]:
    """Every fault of a version's files, one sentence each: changed, missing, foreign or linked.

    `folder` is the version's; `digests`: relative name → SHA-256; `read` is told of each piece of bytes hashed.
    """
    found = {path.relative_to(folder).as_posix(): path for path in _walk(folder)}
    found.pop(META_FILE, None)
    for name in sorted(found.keys() - digests.keys()):
        yield f"{told(found[name])}: does not belong to version {folder.name} (not in {META_FILE})"
    for name, digest in sorted(digests.items()):
        if name not in found:
            yield f"{told(folder / name)}: is missing from version {folder.name}"
            continue
        status = found[name].lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            yield f"{told(found[name])}: is a link or no plain file; a version holds plain files only"
            continue
        try:
            same = file_digest(found[name], read) == digest
        except OSError as error:
            yield f"{told(found[name])}: can't be read: {reason_of(error)}"
            continue
        if not same:
            yield f"{told(found[name])}: has changed since version {folder.name} was written"


def read_json(path: Path, kind: type[T]) -> T:
    """Read one of our JSON files. Raises RepositoryError naming the file."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise RepositoryError(f"{told(path)}: can't be read: {reason_of(error)}") from None
    if len(raw) > MAX_JSON_BYTES:
        raise RepositoryError(f"{told(path)}: is larger than {MAX_JSON_BYTES} bytes")
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise RepositoryError(f"{told(path)}: {error}") from None


def told(path: Path) -> str:
    """A file of the repository as messages name it: from the model's name on, so that no path of ours leaves."""
    parts = path.parts
    if VERSIONS in parts:
        return "/".join(parts[len(parts) - 2 - parts[::-1].index(VERSIONS) :])
    return "/".join(parts[-2:])


def reason_of(error: OSError | UnicodeDecodeError) -> str:
    """What went wrong, without any path."""
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else "not UTF-8 text"


def _walk(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
