"""The command line: `headrace serve | classify | models | config | demo`.

Only what a command needs is imported, inside it, so that `--help` and `config explain` answer at once. A foreseen
failure is one line on stderr and the exit code of `shared.errors.ExitCode`; results go to stdout, all else to stderr.
"""

import io
import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from shared.errors import ExitCode, HeadraceError, StartupError

app = typer.Typer(
    name="headrace",
    help="Headrace keeps one GPU fed: an inference server in one command.",
    epilog="Start here:  headrace models fetch  →  headrace serve  →  headrace classify photo.jpg",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
models_app = typer.Typer(
    help="The model repository: what is there, and how to get the default model.", no_args_is_help=True
)
config_app = typer.Typer(help="The settings: what is in force, and why.", no_args_is_help=True)
app.add_typer(models_app, name="models")
app.add_typer(config_app, name="config")

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


@app.command()
def serve(config: ConfigOption = None) -> None:
    """Start the server: gateway, preprocess pool and worker; Ctrl-C stops it in order.

    Examples:
        headrace serve

        headrace serve --config production.yaml

        HEADRACE_GATEWAY__GRPC_ADDRESS=0.0.0.0:8001 headrace serve
    """
    from headrace import supervisor  # noqa: PLC0415 - starts nothing, but is not light

    raise typer.Exit(supervisor.run(config))


@app.command()
def classify(
    files: Annotated[list[Path], typer.Argument(help="Image files.", metavar="FILE...", show_default=False)],
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", "-k", min=1, help="Classes per image, best first; else as many as the server gives."),
    ] = None,
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="Model name; not needed when only one takes images."),
    ] = "",
    address: AddressOption = "",
    timeout: Annotated[float, typer.Option("--timeout", "-t", min=0.001, help="Seconds per image.")] = 10.0,
    *,
    as_json: JsonOption = False,
) -> None:
    """Classify image files with a running server. Exit code 1 when any of them failed.

    Examples:
        headrace classify photo.jpg

        headrace classify *.jpg --top-k 3 --model efficientnet-lite0

        headrace classify photos/*.jpg --json | jq -r '.labels[0].name'
    """
    from headrace.classify import Wanted, run  # noqa: PLC0415 - imports gRPC
    from shared.settings_loader import load  # noqa: PLC0415 - imports pydantic

    address = address or load(None).settings.gateway.grpc_address
    wanted = Wanted(address=address, model=model, top_k=top_k, timeout_s=timeout)
    raise typer.Exit(run(files, wanted, as_json=as_json))


@app.command()
def demo(
    address: Annotated[
        str, typer.Option("--address", "-a", help="Use this running server instead of starting one.")
    ] = "",
    config: ConfigOption = None,
) -> None:
    """Classify 20 real photos from start to finish; exit code 0 when at least 17 are right.

    Examples:
        headrace demo

        headrace demo --address 127.0.0.1:8001
    """
    from headrace import demo as demo_module  # noqa: PLC0415 - imports gRPC

    raise typer.Exit(demo_module.run(address or None, config))


@models_app.command("list")
def models_list(*, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the models of the repository, their versions and which one is current.

    Examples:
        headrace models list

        headrace models list --json | jq -r '.[].name'
    """
    from headrace.listing import print_models  # noqa: PLC0415 - imports rich
    from shared.settings_loader import load  # noqa: PLC0415 - imports pydantic

    print_models(load(config).settings.repository, as_json=as_json)


@models_app.command("fetch")
def models_fetch(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME...]", help="Which models; default efficientnet-lite0.")
    ] = None,
    *,
    photos: Annotated[bool, typer.Option("--photos", help="Also fetch the 20 sample photos.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch known models by name, version and SHA-256, and make them current. Quick when they are there already.

    Examples:
        headrace models fetch

        headrace models fetch efficientnet-lite0 --photos

        headrace models fetch builtin     (identity, identity_bytes, add_sub, simulated_slow)
    """
    from headrace.listing import fetch_with_progress  # noqa: PLC0415 - imports rich
    from shared.settings_loader import load  # noqa: PLC0415 - imports pydantic

    fetch_with_progress(names or [], load(config).settings.repository, photos=photos, as_json=as_json)


@models_app.command("add")
def models_add(
    name: Annotated[str, typer.Argument(help="Which model: a folder of the repository with a model.yaml.")],
    files: Annotated[list[Path], typer.Argument(help="What belongs to the version.", metavar="FILE...")],
    *,
    data_version: Annotated[str, typer.Option(help="What it was trained on, in your own words.")] = "",
    owner: Annotated[str, typer.Option(help="Whom to ask about it.")] = "",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Store files as a version under their content hash and make it current; the same content is stored once.

    Examples:
        headrace models add my-classifier weights.safetensors

        headrace models add my-classifier weights.safetensors labels.txt --data-version 2026-11 --owner vision-team
    """
    from headrace.listing import add_model  # noqa: PLC0415 - imports rich
    from shared.repository import Meta  # noqa: PLC0415 - imports pydantic
    from shared.settings_loader import load  # noqa: PLC0415 - imports pydantic

    meta = Meta(source="headrace models add", data_version=data_version, owner=owner)
    add_model(load(config).settings.repository, name, files, meta, as_json=as_json)


@config_app.command("explain")
def config_explain(
    key: Annotated[str, typer.Argument(help="Only keys that start with this, e.g. gateway.", show_default=False)] = "",
    *,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print every effective setting and where it came from: the default, the file's line, or a variable.

    Examples:
        headrace config explain

        headrace config explain gateway

        headrace config explain --json | jq '."pool.processes"'
    """
    from headrace.listing import print_settings  # noqa: PLC0415 - imports rich
    from shared.settings_loader import load  # noqa: PLC0415 - imports pydantic

    print_settings(load(config), key, as_json=as_json)


def main() -> NoReturn:
    """Run the command line; the console script `headrace`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or pipe that can't show a character loses only that one
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except StartupError as error:
        _leave(error.told, error.exit_code)
    except HeadraceError as error:
        _leave(error.text, ExitCode.MODEL_LOAD)
    except Exception:  # noqa: BLE001 - a bug of ours: the whole trace for the report, and the exit code for it
        traceback.print_exc()
        sys.exit(ExitCode.INTERNAL)
    sys.exit(ExitCode.OK)


def _leave(text: str, exit_code: int) -> NoReturn:
    from headrace.output import printable  # noqa: PLC0415 - imports rich

    lines = "\n".join(printable(line) for line in text.split("\n"))
    sys.stderr.write(f"headrace: {lines}\n")
    sys.exit(exit_code)
