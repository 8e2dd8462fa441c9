"""`headrace models add` and `import`: what brings a version into the repository, and what to type next."""

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from headrace import live
from headrace.listing import print_done
from headrace.options import Given
from headrace.output import literal, print_json
from shared.errors import ExitCode, StartupError
from shared.model_config import CONFIG_FILE
from shared.repository import Meta, Repository, RepositoryError, is_name, no_name
from shared.repository_sources import collect
from shared.repository_writer import add_version
from shared.settings import Settings

BY = "headrace models add"


class Added(msgspec.Struct, frozen=True):
    """What `--json` tells."""

    name: str
    version: str
    current: bool
    """Whether it answers now."""
    present: bool
    """Whether the same content was there already."""


def add_model(
    settings: Settings, name: str, paths: Sequence[Path], given: Given, *, make_current: bool, as_json: bool
) -> None:
    """`headrace models add`. Raises RepositoryError, naming the file, StartupError, HeadraceError."""
    root = settings.repository
    check_has_config(root, name)
    files = collect(paths)
    before = Repository(root).versions(name)
    with working("hashing and copying"):
        version = add_version(root, name, files, meta_of(given, parent_of(given, root, name)), by=BY).version
    if make_current:
        live.make_current(settings, name, version, BY)
    current = Repository(root).current(name) == version
    print_added(Added(name, version, current=current, present=version in before), root, as_json=as_json)


def print_added(added: Added, root: object, *, as_json: bool = False) -> None:
    """What has happened, and for people also what to type next. `root`: where it is stored."""
    if as_json:
        print_json(added)
        return
    name, version = added.name, added.version
    if added.present:
        print_done(f"{name} {version} was already stored in {root}; its facts (owner, metrics …) stay as they were")
    if added.current:
        print_done(f"{name} {version} is current in {root}")
        return
    if not added.present:
        print_done(f"{name} {version} is stored in {root}, and answers nobody yet")
    console = Console()
    console.print(literal(f"  a share first:  headrace traffic {name} --canary {version} --percent 5"), soft_wrap=True)
    console.print(literal(f"  all at once:    headrace traffic {name} --to {version}"), soft_wrap=True)


def check_has_config(root: Path, name: str) -> None:
    """Raises RepositoryError with the next steps when there is no such model yet."""
    if not is_name(name):
        raise RepositoryError(no_name(name))
    if not (root / name / CONFIG_FILE).is_file():
        raise RepositoryError(
            f"there is no {root / name / CONFIG_FILE}, which says what {name} takes and gives: write a whole model "
            f"with `headrace new {name}`, or make it from an ONNX file with `headrace models import {name} FILE`"
        )


def parent_of(given: Given, root: Path, name: str) -> str:
    """The version that a new one was made from, whole. Raises UnknownVersion."""
    return Repository(root).find(name, given.parent) if given.parent else ""


def meta_of(given: Given, parent: str, source: str = BY) -> Meta:
    """What goes into meta.json. Raises StartupError for a pair that can't be read."""
    return Meta(
        source=source,
        licence=given.licence,
        owner=given.owner,
        parent=parent,
        data_version=given.data_version,
        hyperparameters={key: _value(text) for key, text in _pairs(given.param or (), "--param", "lr=0.001")},
        metrics={key: _number(key, text) for key, text in _pairs(given.metric or (), "--metric", "accuracy=0.962")},
    )


def _pairs(given: Sequence[str], option: str, example: str) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for text in given:
        key, equals, value = text.partition("=")
        if not (key.strip() and equals and value):
            raise StartupError(ExitCode.BAD_SETTINGS, f"{option} is {text[:100]!r}: must be like {example}")
        if key in seen:
            raise StartupError(ExitCode.BAD_SETTINGS, f"{option} {key[:100]!r} is given twice")
        seen.add(key)
        yield key, value


def _value(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """JSON where it is; else text, as which people write most things."""
    try:
        return json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text


def _number(key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise StartupError(ExitCode.BAD_SETTINGS, f"--metric {key[:100]!r} is {text[:100]!r}: must be a finite number")
    return number


@contextlib.contextmanager
def working(text: str) -> Iterator[Progress]:
    """Show on a terminal's stderr that something goes on."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(text, total=None)
        yield progress
