"""`headrace models verify`, `remove` and `gc`: that what is stored is right, and no more than is needed."""

from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from headrace import live
from headrace.listing import print_done, print_fault, size_text
from headrace.output import print_json
from shared.errors import HeadraceError, StartupError
from shared.repository import VERSIONS, Repository
from shared.repository_files import faults
from shared.repository_lock import bytes_in
from shared.repository_writer import Removed
from shared.settings import Settings


class Fault(msgspec.Struct, frozen=True):
    """Something that is not as it was written."""

    name: str
    version: str
    """Empty: the model's own files."""
    fault: str


class Verified(msgspec.Struct, frozen=True):
    """What `--json` tells."""

    versions: int
    nbytes: int
    """Read and hashed."""
    faults: list[Fault]


def verify(settings: Settings, names: Sequence[str], *, as_json: bool) -> int:
    """`headrace models verify`: hash everything again. Returns the exit code: 1 when anything is wrong.

    Raises UnknownModel, RepositoryError when there is no repository.
    """
    repository = Repository(settings.repository)
    every = [(name, version) for name in names or repository.names() for version in repository.versions(name)]
    total = sum(bytes_in(repository.root / name / VERSIONS / version) for name, version in every)
    read = [0]
    found: list[Fault] = []
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)

        def advance(nbytes: int) -> None:
            read[0] += nbytes
            progress.advance(task, nbytes)

        for name in names or repository.names():
            found += [Fault(name, "", text) for text in _model_faults(repository, name)]
        for name, version in every:
            progress.update(task, description=f"{name} {version}")
            try:
                digests = repository.meta(name, version).files
            except StartupError as error:
                found.append(Fault(name, version, error.text))
                continue
            folder = repository.root / name / VERSIONS / version
            found += [Fault(name, version, text) for text in faults(folder, digests, advance)]
    print_verified(Verified(len(every), read[0], found), as_json=as_json)
    return 1 if found else 0


def _model_faults(repository: Repository, name: str) -> Iterator[str]:
    """What is wrong with who is to answer; a model without a version has no fault."""
    if not repository.versions(name):
        return
    try:
        current = repository.current(name)
        missing = set(repository.traffic(name).wanted()) - {current, *repository.versions(name)}
    except (StartupError, HeadraceError) as error:
        yield error.text
        return
    for version in sorted(missing):
        yield f"{name}/traffic.json: {version[:100]!r} has a part in the traffic, and is no version of {name}"


def print_verified(verified: Verified, *, as_json: bool) -> None:
    """What was hashed, and each fault."""
    if as_json:
        print_json(verified)
        return
    for fault in verified.faults:
        print_fault(fault.fault)
    if not verified.faults:
        print_done(f"{verified.versions} versions, {size_text(verified.nbytes)}: every byte is as it was written")


def remove(settings: Settings, name: str, prefix: str, *, as_json: bool) -> None:
    """`headrace models remove`. Raises Conflict when it is in use, UnknownModel, UnknownVersion, RepositoryError."""
    version = Repository(settings.repository).find(name, prefix)
    print_removed(live.remove(settings, name, version), as_json=as_json)


def print_removed(removed: Removed, *, as_json: bool) -> None:
    """One version that is gone."""
    if as_json:
        print_json(removed)
    else:
        print_done(f"{removed.name} {removed.version} is removed ({size_text(removed.nbytes)})")


def collect(settings: Settings, names: Sequence[str], *, keep: int, dry_run: bool, as_json: bool) -> None:
    """`headrace models gc`. Raises UnknownModel, RepositoryError."""
    removed: list[Removed] = []
    for name in names or Repository(settings.repository).names():
        removed += live.collect(settings, name, keep=keep, dry_run=dry_run)
    print_collected(removed, dry_run=dry_run, as_json=as_json)


def print_collected(removed: Sequence[Removed], *, dry_run: bool, as_json: bool) -> None:
    """What is gone, or would be."""
    nbytes = sum(found.nbytes for found in removed)
    if as_json:
        print_json({"removed": removed, "nbytes": nbytes, "dry_run": dry_run})
        return
    verb = "would be removed" if dry_run else "is removed"
    for found in removed:
        what = found.version or "what a crashed writer left"
        print_done(f"{found.name} {what} {verb} ({size_text(found.nbytes)})")
    print_done(f"{size_text(nbytes)} {'would be' if dry_run else 'are'} free again" if removed else "nothing to remove")
