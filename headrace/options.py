"""Options that several commands share, and where their settings come from."""

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Settings file; else ./headrace.yaml if there is one.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of a table.")]
AddressOption = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        help="host:port of a running server; else gateway.grpc_address of the settings.",
        show_default=False,
    ),
]
NameArgument = Annotated[str, typer.Argument(help="Which model of the repository.", show_default=False)]
HASH_HELP = "A version: its hash, or the first digits of it, 4 or more."
