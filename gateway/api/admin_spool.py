"""Files of a new version on their way in: a private folder beside the models, which is gone afterwards in any case.

A crash leaves it behind; whoever makes the next one removes it (`shared.repository_lock.workplace`).
"""

import contextlib
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from shared.errors import Conflict, InvalidInput, StartupError
from shared.repository import Meta, Repository
from shared.repository_lock import workplace
from shared.repository_sources import collect
from shared.repository_writer import add_version


class NewFile(NamedTuple):
    """One that was announced; the name is a plain one (`repository_sources.is_file_name`)."""

    name: str
    nbytes: int


class Added(NamedTuple):
    """What has become of it."""

    version: str
    present: bool
    """The same content was stored already."""


class Spool:
    """Blocking, each call in whatever thread: one waits for the other, and after `remove` nothing is written."""

    def __init__(self, root: Path, files: Sequence[NewFile]) -> None:
        """Touches no disk yet."""
        self._root = root
        self._files = files
        self._index = 0
        self._left = files[0].nbytes
        self._folder: Path | None = None
        self._place = contextlib.ExitStack()
        self._writer: BinaryIO | None = None
        self._removed = False
        self._turn = threading.Lock()

    def prepare(self) -> None:
        """Make the folder. Raises OSError, RepositoryError, and Conflict when the disk has too little room."""
        with self._turn:
            self._check_open()
            total, free = sum(file.nbytes for file in self._files), shutil.disk_usage(self._root).free
            if 2 * total > free:
                raise Conflict(
                    f"the version has {total} bytes; twice as many are needed while it is stored, and {free} are free"
                )
            self._folder = self._place.enter_context(workplace(self._root))

    def write(self, chunk: bytes) -> None:
        """The next bytes. Raises InvalidInput for more than were announced, Conflict when the disk refuses."""
        rest = memoryview(chunk)
        with self._turn:
            while rest:
                self._check_open()
                if self._index == len(self._files):
                    raise InvalidInput("more bytes came than the header announced")
                piece = rest[: self._left]
                try:
                    self._append(piece)
                except OSError as error:
                    name = self._files[self._index].name
                    raise Conflict(f"{name} can't be stored: {error.strerror} (nothing was changed)") from None
                rest, self._left = rest[len(piece) :], self._left - len(piece)
                if not self._left:
                    self._next()

    def store(self, name: str, meta: Meta, by: str) -> Added:
        """Make a version of what came. Raises InvalidInput, Conflict, UnknownModel."""
        with self._turn:
            self._check_open()
            if self._index < len(self._files):
                file = self._files[self._index]
                raise InvalidInput(f"{file.name} ended {self._left} bytes before the size that the header announced")
            before = Repository(self._root).versions(name)
            try:
                version = add_version(self._root, name, collect([self._path()]), meta, by=by).version
            except StartupError as error:  # which names files as they were given: here by a path of ours
                raise Conflict(error.text.replace(f"{self._path()}/", "")) from error
            return Added(version, version in before)

    def remove(self) -> None:
        """Idempotent."""
        with self._turn:
            self._removed = True
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            self._place.close()

    def _check_open(self) -> None:
        if self._removed:
            raise Conflict("the stream has ended, and the version is not stored")

    def _append(self, piece: memoryview) -> None:
        if self._writer is None:
            path = self._path() / self._files[self._index].name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = path.open("xb", buffering=0)
        while piece:
            piece = piece[self._writer.write(piece) :]

    def _next(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._index += 1
        if self._index < len(self._files):
            self._left = self._files[self._index].nbytes

    def _path(self) -> Path:
        if self._folder is None:
            raise Conflict("the stream has ended, and the version is not stored")
        return self._folder
