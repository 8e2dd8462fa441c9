"""A package registry of files made here, and the real models of the zoo by way of the shared cache."""

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from headrace import zoo
from headrace.zoo_packages import Package
from shared.errors import StartupError
from shared.repository import ModelVersion
from tests.support.skipping import cannot_run
from tests.support.stack import ROOT

CACHE = ROOT / ".cache"
"""Where the real downloads are kept, as `headrace models fetch` keeps them: once for all test runs."""


class FakePip:
    """Stands for the process that downloads: hands out files of a folder, and counts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands: list[list[str]] = []
        self.fails: tuple[int | None, str] | None = None
        """Exit code and stderr, instead of a file."""
        self.halfway = 0
        """Bytes that lie there when somebody looks how far it is."""

    def __call__(self, command: list[str], stderr: int, env: dict[str, str], look: Callable[[], None]) -> int | None:
        self.commands.append(command)
        if self.halfway:
            (Path(env["TMPDIR"]) / "part").write_bytes(bytes(self.halfway))
            look()
        if self.fails is not None:
            code, text = self.fails
            with open(stderr, "w", closefd=False) as file:
                file.write(text)
            return code
        name = next(part.split("==")[0] for part in command if "==" in part)
        for source in self.folder.glob(f"{name}[-.]*"):
            (Path(env["TMPDIR"]) / source.name).write_bytes(source.read_bytes())
        return 0


def wheel(folder: Path, name: str, members: dict[str, bytes], *, nbytes: int = 0) -> Package:
    """A file like a wheel with these members."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return Package(name, "1.0", digest(path), path.name, nbytes)


def source_package(folder: Path, name: str, members: dict[str, bytes]) -> Package:
    """A source package with these members."""
    path = folder / f"{name}-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for member, content in members.items():
            info = tarfile.TarInfo(f"{name}-1.0/{member}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return Package(name, "1.0", digest(path), path.name)


def digest(path: Path) -> str:
    """A file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fetched(name: str, repository: Path) -> ModelVersion:
    """A real model of the zoo, its packages from the shared cache. Skips the test where they can't be downloaded."""
    try:
        return zoo.fetch(name, repository, cache=CACHE)
    except StartupError as error:
        if "can't fetch" in error.text:
            cannot_run(error.text)
        raise
