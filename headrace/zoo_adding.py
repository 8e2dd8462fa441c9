"""`headrace models fetch`, `add zoo:NAME` and `zoo`: known models, fetched and converted, and the list of them."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from headrace import builtin_models, live, zoo
from headrace.listing import WIDE, metrics_text, plain_table, print_done, size_text
from headrace.options import Given, Target
from headrace.output import literal, print_json
from headrace.storing import BY, Added, print_added, working
from shared.errors import ExitCode, StartupError
from shared.repository import ModelVersion, Repository, RepositoryError


class Known(msgspec.Struct, frozen=True):
    """One model of the zoo, as `--json` tells it."""

    name: str
    task: str
    about: str
    packages: dict[str, str]
    """`name==version` → SHA-256 of the file that is fetched, the weights' own first."""
    download_bytes: int
    licence: str
    data_version: str
    metrics: dict[str, float]
    stored: bool
    """Whether the repository has it, by its name and source."""


def fetch_with_progress(names: Sequence[str], root: Path, *, photos: bool, as_json: bool) -> None:
    """`headrace models fetch`, with what happens shown on a terminal's stderr.

    Raises StartupError for an unknown name before anything is fetched, and for what can't be fetched or stored.
    """
    wanted = list(dict.fromkeys(names or (zoo.DEFAULT_MODEL,)))
    for name in wanted:
        if name != builtin_models.NAME:
            zoo.known(name)
    with _reporting(root, "models fetch") as report:
        found: list[ModelVersion] = []
        for name in wanted:
            found += builtin_models.fetch(root) if name == builtin_models.NAME else [zoo.fetch(name, root, report)]
        pictures = zoo.fetch_photos(root, report) if photos else []
    if as_json:
        models = [{"name": version.name, "version": version.version} for version in found]
        print_json({"models": models, "photos": [str(photo.path) for photo in pictures]})
        return
    for version in found:
        print_done(f"{version.name} {version.version} is current in {root}")
    if pictures:
        print_done(f"{len(pictures)} photos in {pictures[0].path.parent}")


def is_of_zoo(name: str) -> bool:
    """Whether `headrace models add NAME` means a model of the zoo."""
    return name.startswith(zoo.PREFIX)


def add(target: Target, name: str, paths: Sequence[Path], given: Given, *, make_current: bool, as_json: bool) -> None:
    """`headrace models add zoo:NAME`. Raises StartupError, RepositoryError, HeadraceError."""
    short = name.removeprefix(zoo.PREFIX)
    zoo.known(short, "models add")
    if target.address:
        text = f"{name} is fetched and converted on this machine: run it where the server's repository is"
        raise StartupError(ExitCode.BAD_SETTINGS, f"models add: {text}, without --address")
    if paths or given != Given():
        text = (
            f"{name} brings its own files and says itself where they come from: leave out paths and their description"
        )
        raise StartupError(ExitCode.BAD_SETTINGS, f"models add: {text}")
    settings = target.settings()
    root = settings.repository
    before = _versions(root, short)
    with _reporting(root, "models add") as report:
        version = zoo.fetch(short, root, report, make_current=False).version
    if make_current:
        live.make_current(settings, short, version, BY)
    current = Repository(root).current(short) == version
    print_added(Added(short, version, current=current, present=version in before), root, as_json=as_json)


def print_zoo(root: Path, *, as_json: bool) -> None:
    """`headrace models zoo`."""
    known = [_known(name, root) for name in zoo.MODELS]
    if as_json:
        print_json(known)
        return
    console = Console()
    more = ("measured", "licence") if console.width >= 2 * WIDE else ()
    table = plain_table("model", "size", "task", "what it is", *more)
    for each in known:
        name = literal(f"{each.name} ✓" if each.stored else each.name)
        row: list[Text | str] = [name, size_text(each.download_bytes), literal(each.task), literal(each.about)]
        table.add_row(*row, *([literal(metrics_text(each.metrics)), literal(each.licence)] if more else []))
    console.print(table)
    console.print("headrace models add zoo:MODEL fetches one; ✓: the repository has it", style="dim", highlight=False)


def _known(name: str, root: Path) -> Known:
    model = zoo.MODELS[name]
    return Known(
        name=name,
        task=model.task,
        about=model.about,
        packages={package.requirement: package.sha256 for package in model.packages},
        download_bytes=sum(package.nbytes for package in model.packages),
        licence=model.licence,
        data_version=model.data_version,
        metrics=model.metrics,
        stored=any(_source(root, name, version) == model.package.requirement for version in _versions(root, name)),
    )


def _versions(root: Path, name: str) -> list[str]:
    """Empty where there is no such model, or no repository yet."""
    if not root.is_dir():
        return []
    repository = Repository(root, only=name)
    return repository.versions(name) if name in repository.names() else []


def _source(root: Path, name: str, version: str) -> str:
    return Repository(root, only=name).meta(name, version).source


@contextlib.contextmanager
def _reporting(root: Path, command: str) -> Iterator[zoo.Report]:
    """Shows what happens; what the system refuses is told with the place instead of a trace."""
    try:
        with working("looking") as progress:
            yield lambda text: progress.update(progress.task_ids[0], description=text)
    except OSError as error:
        place = error.filename or root
        raise RepositoryError(f"{command}: {place}: {error.strerror or error}") from error
