"""What two versions of a model differ in: where they come from, their files, and the headers of their weights.

Of safetensors files only the header is read, so that a comparison of gigabytes takes milliseconds. Which values differ
inside tensors of the same shape is not looked at; how many there are is told.
"""

import math
from pathlib import Path
from typing import Any

import msgspec

from shared import weights_header
from shared.repository import Meta, ModelVersion, RepositoryError, told
from shared.repository_files import reason_of
from shared.repository_sources import open_plain
from shared.weights_header import BadHeader, TensorHeader


class Difference(msgspec.Struct, frozen=True):
    """One thing. None: not there."""

    what: str
    """`files.weights.safetensors`, `metrics.accuracy`, `owner`, …"""
    before: Any
    after: Any


class Weights(msgspec.Struct, frozen=True):
    """Two safetensors files of one name with different content, compared by their headers."""

    file: str
    differences: list[Difference]
    """Tensors that only one has, or that differ in shape or dtype: `encoder.weight`, before, after."""
    same_layout: int
    """Tensors of the same name, shape and dtype."""
    unread_values: int
    """Numbers in these; which of them have changed is not known."""


class VersionDiff(msgspec.Struct, frozen=True):
    """Everything, in the order of reading."""

    name: str
    before: str
    after: str
    differences: list[Difference]
    weights: list[Weights]


def diff(before: ModelVersion, after: ModelVersion) -> VersionDiff:
    """What has become different from one version to the other. Raises RepositoryError for a broken weights file."""
    changed = [
        name
        for name, digest in sorted(before.meta.files.items())
        if name.endswith(weights_header.SUFFIX) and after.meta.files.get(name, digest) != digest
    ]
    return VersionDiff(
        before.name,
        before.version,
        after.version,
        _of_meta(before, after),
        [_of_weights(name, before.files / name, after.files / name) for name in changed],
    )


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Name → dtype and shape of every tensor of a safetensors file. Raises RepositoryError naming the file."""
    try:
        with open_plain(path) as file:
            return weights_header.read(file)
    except OSError as error:
        raise RepositoryError(f"{told(path)}: can't be read: {reason_of(error)}") from None
    except BadHeader as bad:
        raise RepositoryError(f"{told(path)}: {bad}") from None


def _of_meta(before: ModelVersion, after: ModelVersion) -> list[Difference]:
    one, two = _flat(before), _flat(after)
    return [
        Difference(key, one.get(key), two.get(key))
        for key in dict.fromkeys([*one, *two])
        if one.get(key) != two.get(key)
    ]


def _flat(version: ModelVersion) -> dict[str, Any]:
    """Dotted name → value. Of files: size and the first digits of the hash."""
    meta: Meta = version.meta
    found: dict[str, Any] = {
        key: getattr(meta, key) for key in ("created", "source", "licence", "owner", "parent", "data_version")
    }
    found.update({f"hyperparameters.{key}": value for key, value in meta.hyperparameters.items()})
    found.update({f"metrics.{key}": value for key, value in meta.metrics.items()})
    for name, digest in meta.files.items():
        path = version.files / name
        found[f"files.{name}"] = {"bytes": path.stat().st_size if path.is_file() else None, "sha256": digest[:16]}
    return {key: value for key, value in found.items() if value != ""}


def _of_weights(name: str, before: Path, after: Path) -> Weights:
    one, two = read_header(before), read_header(after)
    differences = [
        Difference(key, str(one[key]) if key in one else None, str(two[key]) if key in two else None)
        for key in sorted(one.keys() | two.keys())
        if one.get(key) != two.get(key)
    ]
    same = [header for key, header in one.items() if two.get(key) == header]
    return Weights(name, differences, len(same), sum(math.prod(header.shape) for header in same))
