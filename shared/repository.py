"""The model repository, read side. Used by the gateway, pool processes, workers and the command line.

    models/<name>/model.yaml              what the model is (ModelConfig), written by people
    models/<name>/versions/<sha256-16>/   weights and labels under their content hash, with meta.json; never changed
    models/<name>/traffic.json            which version is the current one, and how that came about

A caller's model name is looked up in a table that was read at start (or at `refresh`), never on the disk.
"""

import re
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from shared.errors import ExitCode, UnknownModel, UnknownVersion
from shared.mistakes import first_of, sentences
from shared.model_config import CONFIG_FILE, ModelConfig, RepositoryError, config_bytes, parse_config, revision_of
from shared.repository_files import META_FILE, VERSIONS, digest_of, faults, read_json, reason_of, told
from shared.settings import BatchingSettings, derive_sizes
from shared.traffic import Traffic

__all__ = [
    "META_FILE",
    "VERSIONS",
    "Meta",
    "ModelConfig",
    "ModelVersion",
    "Repository",
    "RepositoryError",
    "Traffic",
    "digest_of",
    "is_name",
    "no_name",
    "read_json",
    "told",
    "way_out",
]

TRAFFIC_FILE = "traffic.json"
MIN_PREFIX = 4
"""Digits of a hash that name a version: 65,536 of them, while a model has some dozens of versions."""

MAX_NAME = 128
"""Characters of a model's name."""
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}")
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
                raise RepositoryError(f"{self.name}: labels file {name} can't be read: {reason_of(error)}") from None
            # Not splitlines: a label may hold one of the rarer line separators, and every later index would shift.
            return tuple(text.removesuffix("\n").split("\n")) if text else ()
        raise RepositoryError(f"{self.name}: labels file {name} is neither in the version's nor in the model's folder")


class Repository:
    """A folder of models. Reads the list of names and versions once; `refresh` reads it again."""

    def __init__(self, root: Path, only: str | None = None) -> None:
        """`only`: look at no other model, which is quick however many there are.

        Raises RepositoryError(BAD_SETTINGS) when the folder is missing.
        """
        self.root = root
        self._only = only
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
                for folder in self._folders()
                if is_name(folder.name) and _inside(folder, self.root) and (folder / CONFIG_FILE).is_file()
            }
        except OSError as error:
            raise RepositoryError(
                f"repository: can't be read: {reason_of(error)}", detail=str(error.filename)
            ) from None

    def _folders(self) -> list[Path]:
        if self._only is None:
            return sorted(self.root.iterdir())
        return [self.root / self._only] if is_name(self._only) else []

    def names(self) -> list[str]:
        """All models that have a model.yaml, sorted; also those that have no version yet."""
        return list(self._table)

    def versions(self, name: str) -> list[str]:
        """All versions of a model, sorted. Raises UnknownModel."""
        if name not in self._table:
            if self._only is not None:
                raise UnknownModel(f"model {_shown(name)} is unknown")
            served = ", ".join(self._table) or "none"
            raise UnknownModel(f"model {_shown(name)} is unknown (models here: {served[:500]})")
        return list(self._table[name])

    def current(self, name: str) -> str:
        """The version that traffic.json names, or the only one.

        Raises UnknownModel, UnknownVersion when there is none yet, RepositoryError when traffic.json is bad.
        """
        versions = self.versions(name)
        if not versions:
            raise UnknownVersion(f"model {name} has no version yet (`headrace models add {name} FILE…` makes one)")
        path = self.root / name / TRAFFIC_FILE
        if not path.exists():
            if len(versions) == 1:
                return versions[0]
            why = f"is missing, and {name} has {len(versions)} versions: which one is current?"
            raise RepositoryError(f"{told(path)}: {why} {way_out(name)}")
        current = self.traffic(name).current
        if current not in versions:
            why = f"current is {_shown(current)}, which is no version of {name}"
            raise RepositoryError(f"{told(path)}: {why}; {way_out(name)}")
        return current

    def traffic(self, name: str) -> Traffic:
        """What traffic.json says; empty when there is none. Raises RepositoryError when it is bad."""
        path = self.root / name / TRAFFIC_FILE
        try:
            return read_json(path, Traffic) if path.exists() else Traffic(current="")
        except RepositoryError as error:
            raise RepositoryError(f"{error.text}; {way_out(name)}") from None

    def open(self, name: str, version: str = "", config: bytes | None = None) -> ModelVersion:
        """One version (default: the current one), its model.yaml checked; weights are neither read nor verified.

        `config`: a model.yaml's content instead of the one on the disk, which may have changed.
        Raises UnknownModel, UnknownVersion, or RepositoryError when a file of it is bad.
        """
        version = version or self.current(name)
        meta = self.meta(name, version)
        folder = self.root / name
        raw = config_bytes(folder) if config is None else config
        return ModelVersion(name, version, folder, folder / VERSIONS / version, parse_config(raw, name), meta, raw)

    def meta(self, name: str, version: str) -> Meta:
        """A version's meta.json, which must agree with the version. Raises as `open`, whatever model.yaml says."""
        if version not in self.versions(name):
            raise UnknownVersion(f"model {name} has no version {_shown(version)}")
        path = self.root / name / VERSIONS / version / META_FILE
        meta = read_json(path, Meta)
        if digest_of(meta.files) != meta.digest or not meta.digest.startswith(version):
            raise RepositoryError(f"{told(path)}: file hashes, digest and the folder's name do not agree")
        return meta

    def find(self, name: str, prefix: str) -> str:
        """The one version whose hash starts with `prefix`, 4 digits or more. Raises UnknownModel, UnknownVersion."""
        versions = self.versions(name)
        found = [version for version in versions if version.startswith(prefix)] if len(prefix) >= MIN_PREFIX else []
        if len(found) == 1:
            return found[0]
        if len(prefix) < MIN_PREFIX:
            why = f"a version is named by {MIN_PREFIX} digits of its hash or more"
        else:
            why = f"{len(found)} versions start with it" if found else f"model {name} has no such version"
        raise UnknownVersion(f"version {_shown(prefix)}: {why} (`headrace models list` shows them)")

    @staticmethod
    def verify(version: ModelVersion) -> None:
        """Hash every file of a version again.

        Raises RepositoryError naming a changed, missing, foreign or linked file.
        """
        for fault in faults(version.files, version.meta.files):
            raise RepositoryError(fault)


def way_out(name: str) -> str:
    """What to do about a traffic.json that says nothing of use."""
    return f"`headrace traffic {name} --to HASH` writes it anew (`headrace models list` shows the versions)"


def is_name(name: str) -> bool:
    """Whether a text may be a model's name: one path part of plain ASCII, no `..`, at most 128 characters."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def no_name(name: str) -> str:
    """The sentence for a text that `is_name` refuses."""
    long = f" ({len(name)} characters)" if len(name) > MAX_NAME else ""
    return (
        f"{_shown(name)}{long} can't be a model's name: at most {MAX_NAME} letters, digits and . _ - only, "
        "a letter or digit first, and no .. in it"
    )


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


def _shown(name: str) -> str:
    """A caller's text, safe for a message and a log line: short, and nothing in it that is not printable."""
    return repr(name[:100])
