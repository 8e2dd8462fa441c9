"""`headrace models diff | verify | remove | gc`: what differs, whether it is whole, and what can go."""

from typing import Annotated

import typer

from headrace.models_commands import models_app
from headrace.options import HASH_HELP, JsonOption, NameArgument, Target, at_repository

__all__ = ["models_app"]

_NamesArgument = Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", help="Which models; default all.")]


@models_app.command("diff")
@at_repository
def models_diff(
    name: NameArgument,
    before: Annotated[str, typer.Argument(metavar="HASH", help=HASH_HELP)],
    after: Annotated[str, typer.Argument(metavar="HASH", help="Another one.")],
    *,
    target: Target,
    as_json: JsonOption = False,
) -> None:
    """Show what two versions differ in: files, hyper-parameters, metrics, data, and the tensors' shapes and datatypes.

    No weights are loaded, so it takes moments whatever their size.

    Examples:
        headrace models diff my-classifier 3f2a 91bc

        headrace models diff my-classifier 3f2a 91bc --json | jq -r '.differences[].what'
    """
    from headrace.versions import print_diff  # noqa: PLC0415 - imports rich

    if target.address:
        from headrace import elsewhere  # noqa: PLC0415 - imports gRPC and rich

        elsewhere.print_diff(target, name, before, after, as_json=as_json)
        return
    print_diff(target.settings().repository, name, before, after, as_json=as_json)


@models_app.command("verify")
@at_repository
def models_verify(names: _NamesArgument = None, *, target: Target, as_json: JsonOption = False) -> None:
    """Hash every file of every version again. Exit code 1 and one line per fault when anything has changed.

    Examples:
        headrace models verify

        headrace models verify my-classifier --json | jq -r '.faults[].fault'
    """
    from headrace.upkeep import verify  # noqa: PLC0415 - imports rich

    if target.address:
        from headrace import elsewhere  # noqa: PLC0415 - imports gRPC and rich

        raise typer.Exit(elsewhere.verify(target, names or [], as_json=as_json))
    raise typer.Exit(verify(target.settings(), names or [], as_json=as_json))


@models_app.command("remove")
@at_repository
def models_remove(
    name: NameArgument,
    version: Annotated[str, typer.Argument(metavar="HASH", help=HASH_HELP)],
    *,
    target: Target,
    as_json: JsonOption = False,
) -> None:
    """Remove a version; never one that is current, canary, shadow or standby, or that a running server holds.

    Examples:
        headrace models remove my-classifier 3f2a

        headrace models remove my-classifier 3f2a --json
    """
    from headrace.upkeep import remove  # noqa: PLC0415 - imports rich

    if target.address:
        from headrace import elsewhere  # noqa: PLC0415 - imports gRPC and rich

        elsewhere.remove(target, name, version, as_json=as_json)
        return
    remove(target.settings(), name, version, as_json=as_json)


@models_app.command("gc")
@at_repository
def models_gc(
    names: _NamesArgument = None,
    *,
    keep: Annotated[int, typer.Option(min=0, max=1000, help="Newest versions of each model that stay anyway.")] = 3,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be removed.")] = False,
    target: Target,
    as_json: JsonOption = False,
) -> None:
    """Remove versions that have no traffic and are not among the newest, and what crashed writers left.

    Examples:
        headrace models gc --dry-run

        headrace models gc my-classifier --keep 1 --json
    """
    from headrace.upkeep import collect  # noqa: PLC0415 - imports rich

    if target.address:
        from headrace import elsewhere  # noqa: PLC0415 - imports gRPC and rich

        elsewhere.collect_garbage(target, names or [], keep=keep, dry_run=dry_run, as_json=as_json)
        return
    collect(target.settings(), names or [], keep=keep, dry_run=dry_run, as_json=as_json)
