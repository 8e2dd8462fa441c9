"""What nobody needs any more: versions without traffic that are not among the newest, and what crashes left."""

from collections.abc import Callable, Collection
from pathlib import Path

from shared.errors import Conflict, UnknownVersion
from shared.repository import META_FILE, VERSIONS, Meta, Repository, RepositoryError, read_json
from shared.repository_lock import bytes_in
from shared.repository_writer import Removed, remove_version, sweep

KEEP = 3
"""Newest versions that are kept of each model, besides those in use."""


def collect_garbage(
    root: Path,
    name: str,
    *,
    keep: int = KEEP,
    dry_run: bool = False,
    unless: Callable[[], Collection[str]] = tuple,
) -> list[Removed]:
    """Remove a model's versions that are neither in its traffic nor among the newest `keep`, and crashed writers' rest.

    `unless`: asked for versions that are in use elsewhere, as by `remove_version`; `dry_run`: only tell. What a crash
    left has no version. A version whose meta.json can't be read has no age, and stays: `remove_version` takes it.
    Raises UnknownModel, RepositoryError when it is not known what is in use.
    """
    repository = Repository(root)
    used = {*repository.traffic(name).wanted(), repository.current(name)} if repository.versions(name) else set()
    used.update(unless())
    removed = [
        Removed(name, version, bytes_in(root / name / VERSIONS / version))
        for version in _by_age(repository, name)[keep:]
        if version not in used
    ]
    if not dry_run:
        removed = [found for found in removed if _remove(root, found, unless)]
    left = sweep(root, name, dry_run=dry_run)
    return [*removed, Removed(name, "", left)] if left else removed


def _by_age(repository: Repository, name: str) -> list[str]:
    """Newest first."""
    ages = []
    for version in repository.versions(name):
        path = repository.root / name / VERSIONS / version / META_FILE
        try:
            # `created` has whole seconds; the file's own time parts those of one second.
            ages.append((read_json(path, Meta).created, path.stat().st_mtime_ns, version))
        except (RepositoryError, OSError):
            continue
    return [version for *_, version in sorted(ages, reverse=True)]


def _remove(root: Path, found: Removed, unless: Callable[[], Collection[str]]) -> bool:
    try:
        remove_version(root, found.name, found.version, unless=unless)
    except (Conflict, UnknownVersion):  # somebody has just given it traffic, or removed it
        return False
    return True
