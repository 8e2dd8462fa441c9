"""The command `headrace embed`, as the command line takes it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.options import AddressOption, JsonOption


def register(app: typer.Typer) -> None:
    """Put the command where it belongs."""
    app.command("embed")(embed)


def embed(  # noqa: PLR0913 - one parameter per option
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts; - for standard input, one a line.", metavar="TEXT...", show_default=False),
    ] = None,
    *,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="A file with one text a line. May be repeated.", show_default=False),
    ] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Model name; not needed when only one embeds.")] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Write the vectors here, [texts, numbers] for numpy.load.", show_default=False
        ),
    ] = None,
    truncate: Annotated[bool, typer.Option(help="Leave out the end of a text that is too long, or refuse it.")] = True,
    address: AddressOption = "",
    timeout: Annotated[float, typer.Option("--timeout", "-t", min=0.001, help="Seconds per text.")] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Turn texts into vectors with a running server. Exit code 1 when any of them failed.

    Examples:
        headrace embed "How do I reset my password?" "I forgot my login"

        headrace embed --file sentences.txt --out vectors.npy

        cat sentences.txt | headrace embed - --json | jq .tokens
    """
    from headrace.embed import Wanted, lines_of, run  # noqa: PLC0415 - imports gRPC
    from shared.settings_loader import load  # noqa: PLC0415 - imports pydantic

    given = texts or []
    named = [text for text in given if text != "-"]
    piped = len(named) < len(given) or not (given or file or sys.stdin.isatty())
    lines = lines_of(named, file or [], sys.stdin.buffer if piped else None)
    address = address or load(None).settings.gateway.grpc_address
    # Unset says the same as true: servers cut unless they are told not to.
    wanted = Wanted(address, model, {} if truncate else {"truncate": False}, out, timeout)
    raise typer.Exit(run(lines, wanted, as_json=as_json))
