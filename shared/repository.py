"""The model repository, read side. Used by the gateway, pool processes, workers and the command line.

    models/<name>/model.yaml              what the model is (ModelConfig), written by people
    models/<name>/versions/<sha256-16>/   weights and labels under their content hash, with meta.json; never changed
    models/<name>/traffic.json            which version is the current one, and how that came about

A caller's model name is looked up in a table that was read at start (or at `refresh`), never on the disk.
"""

import hashlib
import re
import stat
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError

from shared.errors import ExitCode, UnknownModel, UnknownVersion
from shared.mistakes import first_of, sentences
from shared.model_config import CONFIG_FILE, ModelConfig, RepositoryError, config_bytes, parse_config, revision_of
from shared.settings import BatchingSettings, derive_sizes
from shared.traffic import Traffic

__all__ = ["Meta", "ModelConfig", "ModelVersion", "Repository", "RepositoryError", "Traffic", "is_name"]

META_FILE = "meta.json"
TRAFFIC_FILE = "traffic.json"
VERSIONS = "versions"
MAX_JSON_BYTES = 8 * 1024 * 1024
"""meta.json and traffic.json; a history of that size is some 40,000 changes."""

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VERSION = re.compile(r"[0-9a-f]{16}")


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """meta.json: where a version comes from. The writer fills in digest, files and created."""

    digest: str = ""
    """SHA-256 over the sorted lines `relative-name NUL file's sha256 newline`."""
    files: dict[str, str] = {}
    """Relative name → SHA-256 of every file of the version, without meta.json."""
    created: str = ""
    """UTC, ISO 8601."""
    source: str = ""
    licence: str = ""
    owner: str = ""
    parent: str = ""
    """The version it was made from."""
    data_version: str = ""
    hyperparameters: dict[str, Any] = {}
    metrics: dict[str, float] = {}


class ModelVersion(msgspec.Struct, frozen=True):
    """One version of one model. Paths are ours alone and never shown to callers."""

    name: str
    version: str
    folder: Path
    """The model's folder: model.yaml, the user's own code."""
    files: Path
    """The version's folder: weights, meta.json."""
    config: ModelConfig
    meta: Meta
    config_bytes: bytes
    """The model.yaml that `config` was read from."""

    @property
    def revision(self) -> str:
        """Which content of model.yaml."""
        return revision_of(self.config_bytes)

    def batching(self, defaults: BatchingSettings) -> BatchingSettings:
        """The server's defaults with model.yaml's overrides. Raises RepositoryError when they contradict each other."""
        given = derive_sizes(self.config.batching.model_dump(exclude_none=True))
        try:
            return BatchingSettings(**{**defaults.model_dump(), **given})
        except ValidationError as error:
            where = f"{self.name}/{CONFIG_FILE}"
            raise RepositoryError(first_of(sentences(error, lambda _: where)), ExitCode.BAD_SETTINGS) from None

    def labels(self) -> tuple[str, ...]:
        """The labels, one a line; empty when model.yaml names no file. Raises RepositoryError when it is missing."""
        name = self.config.labels
        if name is None:
            return ()
        for folder in (self.files, self.folder):
            try:
                text = (folder / name).read_text(encoding="utf-8")
            except FileNotFoundError:
                continue
            except (OSError, UnicodeDecodeError) as error:
                raise RepositoryError(f"{self.name}: labels file {name} can't be read: {_reason(error)}") from None
            # Not splitlines: a label may hold one of the rarer line separators, and every later index would shift.
            return tuple(text.removesuffix("\n").split("\n")) if text else ()
        raise RepositoryError(f"{self.name}: labels file {name} is neither in the version's nor in the model's folder")


class Repository:
    """A folder of models. Reads the list of names and versions once; `refresh` reads it again."""

    def __init__(self, root: Path) -> None:
        """Raises RepositoryError(BAD_SETTINGS) when the folder is missing."""
        self.root = root
        self._table: dict[str, tuple[str, ...]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the names and versions from the disk. Whatever is not a model or leads outside is left out."""
        if not self.root.is_dir():
            raise RepositoryError(
                "repository: there is no such folder (set `repository` in headrace.yaml, "
                "or get the default model with `headrace models fetch`)",
                ExitCode.BAD_SETTINGS,
                str(self.root),
            )
        try:
            self._table = {
                folder.name: _versions_in(folder)
                for folder in sorted(self.root.iterdir())
                if is_name(folder.name) and _inside(folder, self.root) and (folder / CONFIG_FILE).is_file()
            }
        except OSError as error:
            raise RepositoryError(f"repository: can't be read: {_reason(error)}", detail=str(error.filename)) from None

    def names(self) -> list[str]:
        """All models that have a model.yaml, sorted; also those that have no version yet."""
        return list(self._table)

    def versions(self, name: str) -> list[str]:
        """All versions of a model, sorted. Raises UnknownModel."""
        if name not in self._table:
            served = ", ".join(self._table) or "none"
            raise UnknownModel(f"model {_shown(name)} is unknown (models here: {served[:500]})")
        return list(self._table[name])

    def current(self, name: str) -> str:
        """The version that traffic.json names, or the only one.

        Raises UnknownModel, UnknownVersion when there is none yet, RepositoryError when traffic.json is bad.
        """
        versions = self.versions(name)
        if not versions:
            raise UnknownVersion(f"model {name} has no version yet (`headrace models fetch` gets the default model's)")
        path = self.root / name / TRAFFIC_FILE
        if not path.exists():
            if len(versions) == 1:
                return versions[0]
            raise RepositoryError(
                f"{told(path)}: is missing, and {name} has {len(versions)} versions: which one is current?"
            )
        current = self.traffic(name).current
        if current not in versions:
            raise RepositoryError(f"{told(path)}: current is {_shown(current)}, which is no version of {name}")
        return current

    def traffic(self, name: str) -> Traffic:
        """What traffic.json says; empty when there is none. Raises RepositoryError when it is bad."""
        path = self.root / name / TRAFFIC_FILE
        return read_json(path, Traffic) if path.exists() else Traffic(current="")

    def open(self, name: str, version: str = "", config: bytes | None = None) -> ModelVersion:
        """One version (default: the current one), its model.yaml checked; weights are neither read nor verified.

        `config`: a model.yaml's content instead of the one on the disk, which may have changed.
        Raises UnknownModel, UnknownVersion, or RepositoryError when a file of it is bad.
        """
        if version and version not in self.versions(name):
            raise UnknownVersion(f"model {name} has no version {_shown(version)}")
        version = version or self.current(name)
        folder = self.root / name
        files = folder / VERSIONS / version
        meta = read_json(files / META_FILE, Meta)
        if digest_of(meta.files) != meta.digest or not meta.digest.startswith(version):
            raise RepositoryError(f"{told(files / META_FILE)}: file hashes, digest and the folder's name do not agree")
        raw = config_bytes(folder) if config is None else config
        return ModelVersion(name, version, folder, files, parse_config(raw, name), meta, raw)

    @staticmethod
    def verify(version: ModelVersion) -> None:
        """Hash every file of a version again.

        Raises RepositoryError naming a changed, missing, foreign or linked file.
        """
        found = {path.relative_to(version.files).as_posix(): path for path in _walk(version.files)}
        found.pop(META_FILE, None)
        for name in sorted(found.keys() - version.meta.files.keys()):
            raise RepositoryError(
                f"{told(found[name])}: does not belong to version {version.version} (not in {META_FILE})"
            )
        for name, digest in sorted(version.meta.files.items()):
            if name not in found:
                raise RepositoryError(f"{told(version.files / name)}: is missing from version {version.version}")
            status = found[name].lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                raise RepositoryError(
                    f"{told(found[name])}: is a link or no plain file; a version holds plain files only"
                )
            if file_digest(found[name]) != digest:
                raise RepositoryError(f"{told(found[name])}: has changed since version {version.version} was written")


def is_name(name: str) -> bool:
    """Whether a text may be a model's name: one path part of plain ASCII, no `..`, at most 128 characters."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def digest_of(files: dict[str, str]) -> str:
    """The content hash of a version from its files' hashes: no order, time or place goes in."""
    lines = "".join(f"{name}\0{digest}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path, kind: type[T]) -> T:
    """Read one of our JSON files. Raises RepositoryError naming the file."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise RepositoryError(f"{told(path)}: can't be read: {_reason(error)}") from None
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


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else "not UTF-8 text"


def _versions_in(folder: Path) -> tuple[str, ...]:
    home = folder / VERSIONS
    if not home.is_dir():
        return ()
    return tuple(
        sorted(
            path.name
            for path in home.iterdir()
            if _VERSION.fullmatch(path.name) and _inside(path, folder) and (path / META_FILE).is_file()
        )
    )


def _inside(path: Path, root: Path) -> bool:
    """Whether a path, with all links followed, stays under `root`; a link that leads in circles does not."""
    try:
        return path.resolve().is_relative_to(root.resolve())
    except RuntimeError:
        return False


def _walk(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


def _shown(name: str) -> str:
    """A caller's text, safe for a message and a log line: ASCII, short."""
    return ascii(name[:100])
