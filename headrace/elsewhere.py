"""The repository commands with --address: the same tables and the same JSON, of a server's repository elsewhere."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from headrace import listing, storing, upkeep, versions
from headrace.admin_client import AdminClient
from headrace.admin_orders import matched, server
from headrace.admin_results import Model, Version
from headrace.options import Given, Target
from headrace.output import literal
from shared.errors import ExitCode, StartupError
from shared.repository import Meta
from shared.repository_diff import VersionDiff
from shared.repository_sources import collect
from shared.repository_writer import Removed, role_of


def print_models(target: Target, *, as_json: bool) -> None:
    """`headrace models list`. Raises HeadraceError, StartupError."""
    with server(target) as admin:
        names = dict.fromkeys(state.model for state in admin.models().versions)
        found = [admin.model(name) for name in names]
    rows = [row for model in found for row in _rows(model)]
    listing.print_rows(rows, target.address, as_json=as_json)


def _rows(model: Model) -> list[listing.ModelRow]:
    rows = [_row(model, version) for version in model.versions]
    return [*rows, listing.ModelRow(model.model, problem=model.fault)] if model.fault else rows


def _row(model: Model, version: Version) -> listing.ModelRow:
    role = role_of(model.traffic, version.state.version) if model.traffic.current else ""
    row = listing.ModelRow(model.model, version.state.version, current=role == "current", role=role)
    row.nbytes, row.problem = version.state.stored_bytes, version.fault
    row.pipeline, row.backend = model.pipeline, model.backend
    if model.traffic.canary is not None and role in {"canary", "shadow"}:
        row.percent = model.traffic.canary.percent
    for field in ("created", "source", "licence", "owner", "data_version", "metrics"):
        setattr(row, field, (version.meta or {}).get(field, getattr(row, field)))
    return row


def print_shown(target: Target, name: str, prefix: str, *, as_json: bool) -> None:
    """`headrace models show`. Raises HeadraceError, StartupError."""
    with server(target) as admin:
        model = admin.model(name)
    known = {each.state.version: each for each in model.versions}
    version = matched(prefix, list(known), name) if prefix else model.traffic.current
    found = known.get(version)
    if found is None or found.meta is None:
        why = found.fault if found is not None else f"model {name} has no version that answers"
        raise StartupError(ExitCode.MODEL_LOAD, why)
    meta = msgspec.convert(found.meta, Meta)
    files = [versions.StoredFile(file, found.file_bytes.get(file), digest) for file, digest in meta.files.items()]
    role, traffic = role_of(model.traffic, version), model.traffic
    shown = versions.Shown(name, version, role, model.pipeline, model.backend, meta, files, traffic)
    versions.print_version(shown, as_json=as_json)


def print_history(target: Target, name: str, *, as_json: bool) -> None:
    """`headrace models history`. Raises HeadraceError, StartupError."""
    with server(target) as admin:
        versions.print_changes(name, admin.model(name).traffic, as_json=as_json)


def print_diff(target: Target, name: str, before: str, after: str, *, as_json: bool) -> None:
    """`headrace models diff`. Raises HeadraceError, StartupError."""
    with server(target) as admin:
        stored = _stored(admin, name)
        one, two = (matched(prefix, stored, name) for prefix in (before, after))
        fields: dict[str, Any] = msgspec.to_builtins(admin.diff(name, one, two))
    versions.print_difference(msgspec.convert({**fields, "name": name}, VersionDiff), as_json=as_json)


def verify(target: Target, names: Sequence[str], *, as_json: bool) -> int:
    """`headrace models verify`. Returns the exit code. Raises HeadraceError, StartupError."""
    console = Console(stderr=True)
    found, nbytes, faults = 0, 0, []
    with server(target) as admin, console.status(literal("the server hashes")):
        for name in names or [""]:
            for each in admin.verify(name):
                found, nbytes = found + 1, nbytes + each.bytes
                if each.fault:
                    faults.append(upkeep.Fault(each.model, each.version, each.fault))
    upkeep.print_verified(upkeep.Verified(found, nbytes, faults), as_json=as_json)
    return 1 if faults else 0


def remove(target: Target, name: str, prefix: str, *, as_json: bool) -> None:
    """`headrace models remove`. Raises HeadraceError, StartupError."""
    with server(target) as admin:
        version = matched(prefix, _stored(admin, name), name)
        removed = Removed(name, version, admin.remove_version(name, version))
    upkeep.print_removed(removed, as_json=as_json)


def collect_garbage(target: Target, names: Sequence[str], *, keep: int, dry_run: bool, as_json: bool) -> None:
    """`headrace models gc`. Raises HeadraceError, StartupError."""
    with server(target) as admin:
        collected = [admin.collect_garbage(name, keep=keep, dry_run=dry_run) for name in names or [""]]
    removed = [Removed(each.model, each.version, each.bytes) for one in collected for each in one.removed]
    upkeep.print_collected(removed, dry_run=dry_run, as_json=as_json)


def add_model(
    target: Target, name: str, paths: Sequence[Path], given: Given, *, make_current: bool, as_json: bool
) -> None:
    """`headrace models add`: the files are sent. Raises HeadraceError, StartupError."""
    files = collect(paths)
    with server(target) as admin:
        parent = matched(given.parent, _stored(admin, name), name) if given.parent else ""
        meta = storing.meta_of(given, parent)
        fields = {field: value for field, value in msgspec.structs.asdict(meta).items() if value and field != "files"}
        with storing.working("sending"):
            try:
                added = admin.add_version(name, files, fields)
            except OSError as error:
                file = Path(error.filename or "a file").name
                raise StartupError(ExitCode.BAD_SETTINGS, f"{file}: can't be read: {error.strerror}") from None
        if make_current:
            admin.switch(name, added.version)
        current = admin.model(name).traffic.current == added.version
    done = storing.Added(name, added.version, current=current, present=added.present)
    storing.print_added(done, target.address, as_json=as_json)


def _stored(admin: AdminClient, name: str) -> list[str]:
    return [each.state.version for each in admin.model(name).versions]
