"""What `headrace models …` and `headrace config explain` print: a table for people, JSON for programs."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from headrace import builtin_models, zoo
from headrace.output import literal, print_json
from shared.errors import ExitCode, HeadraceError, StartupError
from shared.mistakes import nearest
from shared.repository import Meta, ModelVersion, Repository, RepositoryError
from shared.repository_writer import add_version
from shared.settings_loader import Loaded, variable_of


class ModelRow(msgspec.Struct):
    """One version of one model, or a model that can't be used and why."""

    name: str
    version: str = ""
    current: bool = False
    pipeline: str = ""
    backend: str = ""
    nbytes: int = 0
    created: str = ""
    source: str = ""
    licence: str = ""
    problem: str = ""


def model_rows(root: Path) -> list[ModelRow]:
    """All versions of all models. A bad model is a row with its problem; it does not hide the others."""
    repository = Repository(root)
    rows: list[ModelRow] = []
    for name in repository.names():
        try:
            current = repository.current(name)
            rows.extend(_version_row(repository, name, version, current) for version in repository.versions(name))
        except (RepositoryError, HeadraceError) as error:
            rows.append(ModelRow(name, problem=error.text))
    return rows


def _version_row(repository: Repository, name: str, version: str, current: str) -> ModelRow:
    try:
        found = repository.open(name, version)
    except RepositoryError as error:
        return ModelRow(name, version, current=version == current, problem=error.text)
    return ModelRow(
        name=name,
        version=version,
        current=version == current,
        pipeline=found.config.pipeline,
        backend=found.config.backend,
        nbytes=sum((found.files / file).stat().st_size for file in found.meta.files if (found.files / file).is_file()),
        created=found.meta.created,
        source=found.meta.source,
        licence=found.meta.licence,
    )


def print_models(root: Path, *, as_json: bool) -> None:
    """`headrace models list`. Raises RepositoryError when there is no repository."""
    rows = model_rows(root)
    if as_json:
        print_json(rows)
        return
    console = Console()
    if not rows:
        console.print(literal(f"No models in {root.absolute()}. Get the default one with: headrace models fetch"))
        return
    title = literal(f"Models in {root}")
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for heading in ("model", "version", "current", "pipeline", "size"):
        # names give way in a narrow terminal; hashes and numbers would be wrong when cut
        whole = heading in {"version", "size", "current"}
        table.add_column(heading, justify="right" if heading == "size" else "left", no_wrap=whole, overflow="fold")
    for row in rows:
        mark = Text("●", style="green") if row.current else Text("")
        size = f"{row.nbytes / 1e6:.1f} MB" if row.nbytes >= 1e5 else f"{row.nbytes / 1e3:.1f} kB"
        shown = size if row.nbytes else ""
        table.add_row(literal(row.name), literal(row.version or "none"), mark, literal(row.pipeline), shown)
    console.print(table)
    for row in rows:
        if row.problem:  # sentences are too wide for a column
            console.print(Text("✗ ", style="red") + literal(row.problem))


def fetch_with_progress(names: Sequence[str], root: Path, *, photos: bool, as_json: bool) -> None:
    """`headrace models fetch`, with what happens shown on a terminal's stderr.

    Raises StartupError for an unknown name before anything is fetched, and for what can't be fetched or stored.
    """
    wanted = list(dict.fromkeys(names or (zoo.DEFAULT_MODEL,)))
    for name in wanted:
        if name != builtin_models.NAME:
            zoo.known(name)
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with (
        _storing(root),
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("looking", total=None)

        def report(text: str) -> None:
            progress.update(task, description=text)

        found: list[ModelVersion] = []
        for name in wanted:
            found += builtin_models.fetch(root) if name == builtin_models.NAME else [zoo.fetch(name, root, report)]
        pictures = zoo.fetch_photos(root, report) if photos else []
    if as_json:
        models = [{"name": version.name, "version": version.version} for version in found]
        print_json({"models": models, "photos": [str(photo.path) for photo in pictures]})
        return
    for version in found:
        _print_done(f"{version.name} {version.version} is current in {root}")
    if pictures:
        _print_done(f"{len(pictures)} photos in {pictures[0].path.parent}")


@contextlib.contextmanager
def _storing(root: Path) -> Iterator[None]:
    """What the system refuses is told with the place instead of a trace."""
    try:
        yield
    except OSError as error:
        place = error.filename or root
        raise RepositoryError(f"models fetch: {place}: {error.strerror or error}") from error


def add_model(root: Path, name: str, files: Sequence[Path], meta: Meta, *, as_json: bool) -> None:
    """`headrace models add`. Raises RepositoryError, naming the file, and StartupError for files that clash."""
    chosen = {file.name: file for file in files}
    if len(chosen) < len(files):
        raise StartupError(ExitCode.BAD_SETTINGS, "models add: two of the files have the same name")
    for file in files:
        if not file.is_file():
            raise RepositoryError(f"models add: there is no file {file}")
        if file.suffix in {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"}:
            raise StartupError(
                ExitCode.BAD_SETTINGS,
                f"models add: {file} is a pickle by its name, and weights must be data; save them with "
                "safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')",
            )
    version = add_version(root, name, chosen, meta, make_current=True, by="headrace models add")
    if as_json:
        print_json({"name": version.name, "version": version.version})
        return
    _print_done(f"{version.name} {version.version} is current in {root}")


def _print_done(text: str) -> None:
    Console().print(Text("✓ ", style="green") + literal(text), soft_wrap=True)


def print_settings(loaded: Loaded, prefix: str, *, as_json: bool) -> None:
    """`headrace config explain`. Raises StartupError when no key starts with `prefix`."""
    values = {key: value for key, value in loaded.values().items() if key == prefix or _under(key, prefix)}
    if not values:
        known = [*loaded.origins, *dict.fromkeys(key.split(".", maxsplit=1)[0] for key in loaded.origins)]
        raise StartupError(
            ExitCode.BAD_SETTINGS, f"config explain: no setting is called {prefix!a}{nearest(prefix, known)}"
        )
    if as_json:
        print_json({key: {"value": value, "origin": loaded.origins[key]} for key, value in values.items()})
        return
    table = Table(box=SIMPLE_HEAD)
    for heading in ("setting", "value", "from"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "setting")
    group = ""
    for key, value in values.items():
        first = key.split(".", maxsplit=1)[0] if "." in key else ""
        if first != group:
            table.add_section()
            group = first
        origin = loaded.origins[key]
        changed = origin != "default"
        table.add_row(key, literal(_shown(value)), literal(origin), style="bold green" if changed else None)
    console = Console()
    console.print(table)
    example = next(iter(values))
    console.print(f"Override any of them, e.g. {example}, with {variable_of(example)}=…", style="dim", highlight=False)


def _under(key: str, prefix: str) -> bool:
    return not prefix or key.startswith(prefix if prefix.endswith(".") else prefix + ".")


def _shown(value: Any) -> str:  # noqa: ANN401 - values of any setting
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(str(item) for item in value)}]"
    return str(value)
