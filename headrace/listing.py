"""What `headrace models list` and `headrace config explain` print: a table for people, JSON for programs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.output import literal, print_json
from shared.errors import ExitCode, HeadraceError, StartupError
from shared.mistakes import nearest
from shared.repository import Repository, RepositoryError
from shared.repository_writer import role_of
from shared.settings_loader import Loaded, variable_of
from shared.traffic import Traffic
from shared.traffic_repair import missing

WIDE = 100
"""Columns of a terminal from which on a table shows all that it has."""
_SHOWN_METRICS = 3


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
    role: str = ""
    """`current`, `canary`, `shadow`, `standby`, or empty."""
    percent: float | None = None
    """Of a canary or shadow."""
    owner: str = ""
    data_version: str = ""
    metrics: dict[str, float] = {}


def model_rows(root: Path) -> list[ModelRow]:
    """All versions of all models. A bad model is a row with its problem; it does not hide the others."""
    repository = Repository(root)
    rows: list[ModelRow] = []
    for name in repository.names():
        rows += _rows_of(repository, name)
    return rows


def _rows_of(repository: Repository, name: str) -> list[ModelRow]:
    """What can't be used of a model is a row with its problem; it does not hide what can."""
    traffic, problem = Traffic(current=""), ""
    stored = repository.versions(name)
    try:
        traffic = repository.traffic(name)
        if not traffic.current:
            traffic = Traffic(current=repository.current(name))
    except (RepositoryError, HeadraceError) as error:
        problem = error.text
    rows = [_version_row(repository, name, version, traffic) for version in stored]
    for version in traffic.wanted():
        if version not in stored:
            row = _plain_row(name, version, traffic)
            row.problem = missing(name, version, row.role)
            rows.append(row)
    return [*rows, ModelRow(name, problem=problem)] if problem else rows


def _plain_row(name: str, version: str, traffic: Traffic) -> ModelRow:
    role = role_of(traffic, version) if traffic.current else ""  # else nobody knows
    row = ModelRow(name, version, current=role == "current", role=role)
    if traffic.canary is not None and role in {"canary", "shadow"}:
        row.percent = traffic.canary.percent
    return row


def _version_row(repository: Repository, name: str, version: str, traffic: Traffic) -> ModelRow:
    row = _plain_row(name, version, traffic)
    try:
        found = repository.open(name, version)
    except RepositoryError as error:
        row.problem = error.text
        return row
    row.pipeline, row.backend = found.config.pipeline, found.config.backend
    row.nbytes = sum((found.files / file).stat().st_size for file in found.meta.files if (found.files / file).is_file())
    for field in ("created", "source", "licence", "owner", "data_version", "metrics"):
        setattr(row, field, getattr(found.meta, field))
    return row


def print_models(root: Path, *, as_json: bool) -> None:
    """`headrace models list`. Raises RepositoryError when there is no repository."""
    rows = model_rows(root)
    if not rows and not as_json:
        Console().print(literal(f"No models in {root.absolute()}. Get the default one with: headrace models fetch"))
        return
    print_rows(rows, root, as_json=as_json)


def print_rows(rows: Sequence[ModelRow], place: object, *, as_json: bool) -> None:
    """As a table, or as JSON. `place`: where they are."""
    if as_json:
        print_json(rows)
        return
    console = Console()
    # Columns that would be empty leave their place to the others, and in a narrow terminal the less important ones do.
    wide = ("created", "owner", "metrics") if console.width >= WIDE else ()
    more = [heading for heading in wide if any(getattr(row, heading) for row in rows)]
    table = plain_table("model", "version", "role", "pipeline", "size", *more)
    table.title, table.title_justify = literal(f"Models in {place}"), "left"
    for row in rows:
        told = {"created": row.created[:10], "owner": row.owner, "metrics": metrics_text(row.metrics)}
        table.add_row(
            literal(row.name),
            literal(row.version or "none"),
            role_text(row.role, row.percent),
            literal(row.pipeline),
            size_text(row.nbytes) if row.nbytes else "",
            *(literal(told[heading]) for heading in more),
        )
    console.print(table)
    for row in rows:
        if row.problem:  # sentences are too wide for a column
            print_fault(row.problem)


def plain_table(*headings: str) -> Table:
    """Names give way in a narrow terminal; hashes and numbers would be wrong when cut."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for heading in headings:
        whole = heading in {"version", "size", "role", "created", "change", "from", "to", "at"}
        right = heading in {"size", "bytes"}
        table.add_column(heading, justify="right" if right else "left", no_wrap=whole, overflow="fold")
    return table


def role_text(role: str, percent: float | None = None) -> Text:
    """A version's role with a mark for the one that answers."""
    if role == "current":
        return Text("● current", style="green")
    return Text(f"{role} {percent:g} %" if percent is not None else role)


def size_text(nbytes: int) -> str:
    """Bytes for people."""
    if nbytes < 100:
        return f"{nbytes} B"
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} kB"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """The first few of a version's metrics."""
    shown = [f"{name} {value:g}" for name, value in list(metrics.items())[:_SHOWN_METRICS]]
    return ", ".join([*shown, f"{len(metrics) - len(shown)} more"] if len(metrics) > len(shown) else shown)


def print_done(text: str) -> None:
    """A line for what went well."""
    Console().print(Text("✓ ", style="green") + literal(text), soft_wrap=True)


def print_fault(text: str) -> None:
    """A line for what is wrong."""
    Console().print(Text("✗ ", style="red") + literal(text), soft_wrap=True)


def print_settings(loaded: Loaded, prefix: str, *, as_json: bool) -> None:
    """`headrace config explain`. Raises StartupError when no key starts with `prefix`."""
    values = {key: value for key, value in loaded.values().items() if key == prefix or _under(key, prefix)}
    if not values:
        known = [*loaded.origins, *dict.fromkeys(key.split(".", maxsplit=1)[0] for key in loaded.origins)]
        raise StartupError(
            ExitCode.BAD_SETTINGS, f"config explain: no setting is called {prefix!r}{nearest(prefix, known)}"
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
