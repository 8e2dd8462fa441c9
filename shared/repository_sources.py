"""What people give to be stored as a version: plain files with plain names that are data. Used by `headrace models`.

Whatever could run code when it is read, or lead somewhere else, is refused here already, long before a worker could
meet it; a worker refuses it again, since it reads data formats only. Sentences name the file as it was given.
"""

import io
import os
import pickletools
import re
import stat
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from shared import weights_header
from shared.errors import ExitCode
from shared.repository import META_FILE, RepositoryError, is_name
from shared.repository_files import reason_of

MAX_FILES = 10_000
"""Of one version: every one of them is hashed at each load."""
_PICKLE_NAMES = {".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".bin"}
_HEAD_BYTES = 64 * 1024
"""Looked at for a pickle's operations."""
_MAX_OPERATIONS = 10_000
_GLOBAL = re.compile(r"[A-Za-z_][\w.]* [A-Za-z_][\w.]*")
_IMPORTS = {"GLOBAL", "INST"}
"""The operations of the oldest protocols that import something; a pickle without any is harmless, and may be text."""


def collect(paths: Sequence[Path]) -> dict[str, Path]:
    """Relative name → file, of files and of all that lies in folders, hidden files left out.

    Raises RepositoryError for what is missing, a link, no plain file, empty, cut off, a pickle, or of a bad name.
    """
    found: dict[str, Path] = {}
    for name, path in _listed(paths):
        if name in found:
            raise RepositoryError(f"two of the files are called {name[:100]!r}", ExitCode.BAD_SETTINGS)
        if not is_file_name(name):
            raise RepositoryError(
                f"{path}: its name can't be kept: letters, digits and . _ - only, and not {META_FILE}",
                ExitCode.BAD_SETTINGS,
            )
        found[name] = path
        if len(found) > MAX_FILES:
            raise RepositoryError(f"these are more than {MAX_FILES} files, the most that a version may have")
    if not found:
        raise RepositoryError(f"{', '.join(map(str, paths))}: holds no files")
    with_onnx = any(name.endswith(".onnx") for name in found)  # whose external data is called .bin by some tools
    for path in found.values():
        if path.suffix.lower() in _PICKLE_NAMES and not (with_onnx and path.suffix == ".bin"):
            raise _is_pickle(path, "is a pickle by its name")
        with open_plain(path) as file:
            _check_content(path, file)
    return found


def is_file_name(name: str) -> bool:
    """Whether a relative name may be a file of a version."""
    return name != META_FILE and all(is_name(part) for part in name.split("/"))


def open_plain(path: Path) -> io.BufferedReader:
    """Open a file to read. Raises RepositoryError when it is missing, a link (also a hard one), or no plain file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise RepositoryError(f"there is no file {path}") from None
    except OSError as error:
        if path.is_symlink():
            raise RepositoryError(f"{path}: is a link; give the file that it leads to") from None
        raise RepositoryError(f"{path}: can't be read: {reason_of(error)}") from None
    file = os.fdopen(descriptor, "rb")
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        return file
    file.close()
    what = "has several names (hard links); give a copy" if stat.S_ISREG(status.st_mode) else "is no plain file"
    raise RepositoryError(f"{path}: {what}")


def is_pickle(head: bytes) -> bool:
    """Whether this beginning of a file is a pickle's."""
    marked = head[:1] == b"\x80" and head[1:2] in {b"\x02", b"\x03", b"\x04", b"\x05"}
    imports = False
    count = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # weights may look like text with odd escapes
            for operation, argument, _ in pickletools.genops(io.BytesIO(head)):
                imports |= operation.name in _IMPORTS and _GLOBAL.fullmatch(str(argument)) is not None
                count += 1
                if count >= _MAX_OPERATIONS:
                    break
    except (ValueError, UnicodeDecodeError, OverflowError):
        # Cut off, or no pickle at all. Three operations in a row are no accident after the mark; a safetensors file
        # whose header has 640 bytes begins like the mark, and goes on with a zero, which is no operation.
        return marked and count >= 3
    return marked or imports


def _listed(paths: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    for path in paths:
        if path.is_symlink() or not path.is_dir():
            yield path.name, path
            continue
        for folder, folders, files in os.walk(path, onerror=_raise):
            links = [name for name in folders if (Path(folder) / name).is_symlink()]
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in links)
            for name in sorted([*files, *links]):
                if not name.startswith("."):
                    one = Path(folder) / name
                    yield one.relative_to(path).as_posix(), one


def _raise(error: OSError) -> None:
    raise RepositoryError(f"{error.filename}: can't be read: {reason_of(error)}")


def _check_content(path: Path, file: BinaryIO) -> None:
    head = file.read(_HEAD_BYTES)
    if not head:
        raise RepositoryError(f"{path}: is empty; was it saved to the end?")
    if is_pickle(head):
        raise _is_pickle(path, "is a pickle by its content")
    if head[:4] == b"PK\x03\x04" and _holds_pickle(path, file):
        raise _is_pickle(path, "holds a pickle, as what torch.save writes does")
    if path.suffix == weights_header.SUFFIX:
        try:
            weights_header.check(file)
        except weights_header.BadHeader as bad:
            raise RepositoryError(f"{path}: {bad}") from None


def _holds_pickle(path: Path, file: BinaryIO) -> bool:
    """Whether a zip archive has a pickle among its members.

    The archives of torch.export keep example inputs by torch.save, which a worker opens as plain tensors only, and only
    under `trust: code`: of `.pt2` only what would make it a file of torch.save itself counts.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist()[:MAX_FILES]:
                if Path(member.filename).suffix in {".pkl", ".pickle"}:
                    return True
                if path.suffix != ".pt2" and not member.is_dir():
                    with archive.open(member) as inside:
                        if is_pickle(inside.read(_HEAD_BYTES)):
                            return True
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, EOFError, zlib.error):
        raise RepositoryError(f"{path}: begins like a zip archive, and can't be read as one") from None
    return False


def _is_pickle(path: Path, what: str) -> RepositoryError:
    return RepositoryError(
        f"{path} {what}, and weights must be data; save them with "
        "safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')",
        ExitCode.BAD_SETTINGS,
    )
