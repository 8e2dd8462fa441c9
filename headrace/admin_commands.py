"""`headrace traffic`, `headrace models load | unload | watch | status`: what a running server does, and is to do."""

from typing import Annotated

import typer

from headrace.options import HASH_HELP, JsonOption, NameArgument, Target, at_server


def register(app: typer.Typer, models_app: typer.Typer) -> None:
    """Put the commands where they belong."""
    app.command("traffic")(traffic)
    models_app.command("load")(models_load)
    models_app.command("unload")(models_unload)
    models_app.command("status")(models_status)
    models_app.command("watch")(models_watch)


@at_server
def traffic(  # noqa: PLR0913 - one parameter per option
    name: NameArgument,
    *,
    canary: Annotated[str, typer.Option(metavar="HASH", help=f"Give a share to it. {HASH_HELP}")] = "",
    shadow: Annotated[str, typer.Option(metavar="HASH", help="Send it copies of a share; it answers nobody.")] = "",
    percent: Annotated[str, typer.Option(metavar="P[,P...]", help="Of the callers; several: a ramp.")] = "",
    every: Annotated[str, typer.Option(metavar="TIME", help="Between two steps of a ramp, e.g. 90s, 10m, 1h.")] = "",
    by: Annotated[
        str, typer.Option(metavar="routing_key|request_id", help="What a caller is known by; default routing_key.")
    ] = "",
    promote: Annotated[bool, typer.Option("--promote", help="The canary becomes current.")] = False,
    rollback: Annotated[bool, typer.Option("--rollback", help="End the canary; without one, go one back.")] = False,
    ends: Annotated[
        str,
        typer.Option(
            metavar="HASH",
            help="With --rollback: end this one or nothing; needed after another rollback.",
        ),
    ] = "",
    reason: Annotated[str, typer.Option(help="For the history, with --rollback.")] = "",
    drop_standby: Annotated[
        bool, typer.Option("--drop-standby", help="Give up the version to go back to, which frees its memory.")
    ] = False,
    to: Annotated[str, typer.Option(metavar="HASH", help="All callers to this version at once.")] = "",
    watch: Annotated[bool, typer.Option("--watch", help="Show it again each second, until Ctrl-C.")] = False,
    target: Target,
    as_json: JsonOption = False,
) -> None:
    """Show or change which version of a model answers whom.

    A version is loaded and proven before it answers anybody. Without a running server the change is written to
    traffic.json.

    Examples:
        headrace traffic my-classifier

        headrace traffic my-classifier --canary 3f2a --percent 5,25,50,100 --every 10m

        headrace traffic my-classifier --shadow 3f2a --percent 10

        headrace traffic my-classifier --rollback --ends 3f2a --reason "too many dogs"
    """
    from headrace import admin_run  # noqa: PLC0415 - imports gRPC and rich
    from headrace.admin_orders import Wanted  # noqa: PLC0415 - imports gRPC

    wanted = Wanted(
        canary=canary,
        shadow=shadow,
        percent=percent,
        every=every,
        by=by,
        promote=promote,
        rollback=rollback,
        ends=ends,
        drop_standby=drop_standby,
        reason=reason,
        to=to,
    )
    admin_run.traffic(target, name, wanted, watch=watch, as_json=as_json)


@at_server
def models_load(
    name: NameArgument,
    *,
    target: Target,
    as_json: JsonOption = False,
) -> None:
    """Have the running server serve a model as traffic.json and model.yaml say now; waits for the proof.

    Examples:
        headrace models load my-classifier

        headrace models load my-classifier --address models.example:8002 --token-file token --ca ca.pem
    """
    from headrace import admin_run  # noqa: PLC0415 - imports gRPC and rich

    admin_run.load(target, name, as_json=as_json)


@at_server
def models_unload(
    name: NameArgument,
    *,
    target: Target,
    as_json: JsonOption = False,
) -> None:
    """Have the running server stop serving a model, with all of its versions, and give their memory back.

    Examples:
        headrace models unload my-classifier

        headrace models unload my-classifier --json
    """
    from headrace import admin_run  # noqa: PLC0415 - imports gRPC and rich

    admin_run.unload(target, name, as_json=as_json)


@at_server
def models_status(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print it once, also on a terminal.")] = False,
    target: Target,
    as_json: JsonOption = False,
) -> None:
    """Show what the running server has loaded: phases, roles, memory and its budget, load times, uses.

    On a terminal it goes on until Ctrl-C.

    Examples:
        headrace models status

        headrace models status --json | jq '.memory[0].models_bytes'
    """
    from headrace import admin_run  # noqa: PLC0415 - imports gRPC and rich

    admin_run.status(target, once=once, as_json=as_json)


@at_server
def models_watch(
    name: Annotated[str, typer.Argument(help="Only this model.", show_default=False)] = "",
    *,
    target: Target,
    as_json: JsonOption = False,
) -> None:
    """Print a line for everything that changes in the running server, until Ctrl-C or until it stops.

    Examples:
        headrace models watch

        headrace models watch my-classifier --json | jq -c '.versions[]'
    """
    from headrace import admin_run  # noqa: PLC0415 - imports gRPC and rich

    admin_run.watch(target, name, as_json=as_json)
