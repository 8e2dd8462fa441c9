"""`headrace models show`, `diff` and `history`: where a version comes from, and what became of it."""

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from headrace.listing import WIDE, plain_table, role_text, size_text
from headrace.output import json_line, literal, print_json
from shared.repository import Meta, ModelVersion, Repository
from shared.repository_diff import Difference, VersionDiff, diff
from shared.repository_writer import role_of
from shared.traffic import Traffic


class StoredFile(msgspec.Struct, frozen=True):
    """One file of a version."""

    name: str
    nbytes: int | None
    """None: not known here."""
    sha256: str


class Shown(msgspec.Struct, frozen=True):
    """Everything about one version."""

    name: str
    version: str
    role: str
    pipeline: str
    backend: str
    meta: Meta
    files: list[StoredFile]
    traffic: Traffic
    """The model's, with its history."""


def shown(root: Path, name: str, prefix: str = "") -> Shown:
    """One version, by default the current one. Raises UnknownModel, UnknownVersion, RepositoryError."""
    repository = Repository(root)
    traffic = repository.traffic(name)
    if not prefix or not traffic.current:
        traffic = msgspec.structs.replace(traffic, current=repository.current(name))
    found = repository.open(name, repository.find(name, prefix) if prefix else traffic.current)
    return Shown(
        name,
        found.version,
        role_of(traffic, found.version),
        found.config.pipeline,
        found.config.backend,
        found.meta,
        _files_of(found),
        traffic,
    )


def _files_of(version: ModelVersion) -> list[StoredFile]:
    paths = {name: version.files / name for name in version.meta.files}
    return [
        StoredFile(name, path.stat().st_size if path.is_file() else 0, version.meta.files[name])
        for name, path in paths.items()
    ]


def print_shown(root: Path, name: str, prefix: str, *, as_json: bool) -> None:
    """`headrace models show`."""
    print_version(shown(root, name, prefix), as_json=as_json)


def print_version(found: Shown, *, as_json: bool) -> None:
    """One version."""
    if as_json:
        print_json(found)
        return
    console = Console()
    console.print(Text(f"{found.name} {found.version} ", style="bold") + role_text(found.role))
    facts = plain_table("", " ")
    facts.show_header = False
    for key, value in _facts(found):
        facts.add_row(literal(key), literal(value))
    console.print(facts)
    files = plain_table("file", "size", "sha256")
    for file in found.files:
        files.add_row(literal(file.name), "" if file.nbytes is None else size_text(file.nbytes), file.sha256[:16])
    console.print(files)
    _print_traffic(console, found.traffic)
    _print_history(console, found.traffic)


def _facts(found: Shown) -> list[tuple[str, str]]:
    meta = found.meta
    told = {
        "pipeline": found.pipeline,
        "backend": found.backend,
        "created": meta.created,
        "source": meta.source,
        "licence": meta.licence,
        "owner": meta.owner,
        "made from": meta.parent,
        "data version": meta.data_version,
        **{f"metric {key}": f"{value:g}" for key, value in meta.metrics.items()},
        **{f"parameter {key}": _text(value) for key, value in meta.hyperparameters.items()},
    }
    return [(key, value) for key, value in told.items() if value]


def print_history(root: Path, name: str, *, as_json: bool) -> None:
    """`headrace models history`."""
    traffic = Repository(root).traffic(name) if Repository(root).versions(name) else Traffic(current="")
    print_changes(name, traffic, as_json=as_json)


def print_changes(name: str, traffic: Traffic, *, as_json: bool) -> None:
    """A model's history."""
    if as_json:
        print_json(traffic.history)
        return
    console = Console()
    if not traffic.history:
        console.print(literal(f"The traffic of {name} has never changed."))
    _print_history(console, traffic)


def _print_traffic(console: Console, traffic: Traffic) -> None:
    table = plain_table("role", "version", "share")
    canary = traffic.canary
    rest = 100 - canary.percent if canary is not None and not canary.shadow else 100
    table.add_row(role_text("current"), traffic.current, f"{rest:g} %")
    if canary is not None:
        told = f"copies of {canary.percent:g} %" if canary.shadow else f"{canary.percent:g} %"
        table.add_row(role_text(role_of(traffic, canary.version)), literal(canary.version), f"{told} by {canary.by}")
    if role_of(traffic, traffic.standby) == "standby":
        table.add_row(role_text("standby"), literal(traffic.standby), "")
    console.print(table)


def _print_history(console: Console, traffic: Traffic) -> None:
    if not traffic.history:
        return
    wide = console.width >= WIDE  # "from" is the "to" of an earlier line
    table = plain_table("at", "change", *(["from"] if wide else []), "to", "by", "why")
    for change in traffic.history:
        percent = f" {change['percent']:g} %" if "percent" in change else ""
        told = [change.get("at", ""), f"{change.get('action', '')}{percent}"]
        told += [change.get("from", "")] if wide else []
        told += [change.get("to", ""), change.get("by", ""), _why(change)]
        table.add_row(*map(literal, told))
    console.print(table)


def _why(change: dict[str, Any]) -> str:
    figures = [f"{key} {_text(value)}" for key, value in dict(change.get("figures") or {}).items()]
    return ": ".join(part for part in (str(change.get("reason", "")), ", ".join(figures)) if part)


def print_diff(root: Path, name: str, before: str, after: str, *, as_json: bool) -> None:
    """`headrace models diff`. Raises UnknownModel, UnknownVersion, RepositoryError."""
    repository = Repository(root)
    one, two = (repository.open(name, repository.find(name, prefix)) for prefix in (before, after))
    print_difference(diff(one, two), as_json=as_json)


def print_difference(found: VersionDiff, *, as_json: bool) -> None:
    """What two versions differ in."""
    if as_json:
        print_json(found)
        return
    console = Console()
    if not found.differences:
        console.print(literal(f"{found.name}: {found.before} and {found.after} do not differ."))
        return
    table = plain_table("what", found.before, found.after, "change")
    for difference in found.differences:
        _add(table, difference)
    console.print(table)
    for weights in found.weights:
        if weights.differences:
            tensors = plain_table(f"tensors of {weights.file}", found.before, found.after)
            for difference in weights.differences:
                tensors.add_row(*map(literal, (difference.what, _text(difference.before), _text(difference.after))))
            console.print(tensors)
        console.print(
            literal(
                f"{weights.file}: {weights.same_layout} tensors have the same shape and datatype; which of their "
                f"{weights.unread_values:,} numbers differ is not looked at."
            ),
            soft_wrap=True,
        )


def _add(table: Any, difference: Difference) -> None:  # noqa: ANN401 - a rich table, which is not imported for its name
    before, after = difference.before, difference.after
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (before, after))
    change = f"{after - before:+g}" if numbers else "new" if before is None else "gone" if after is None else ""
    table.add_row(*map(literal, (difference.what, _text(before), _text(after), change)))


def _text(value: Any) -> str:  # noqa: ANN401 - any JSON value
    if value is None:
        return ""
    if isinstance(value, dict) and value.keys() == {"bytes", "sha256"}:  # a file
        return f"{size_text(value['bytes'] or 0)} {value['sha256']}"
    return value if isinstance(value, str) else json_line(value)
