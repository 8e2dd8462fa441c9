"""The command line: `headrace serve | classify | detect | embed | generate | new | models | traffic | config | demo`.

Only what a command needs is imported, inside it, so that `--help` and `config explain` answer at once. A foreseen
failure is one line on stderr and the exit code of `shared.errors.ExitCode`; results go to stdout, all else to stderr.
"""

import io
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from headrace import admin_commands, embed_command, generate_command
from headrace.options import AddressOption, Boxes, ConfigOption, JsonOption, of_boxes
from headrace.upkeep_commands import models_app
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
config_app = typer.Typer(help="The settings: what is in force, and why.", no_args_is_help=True)
app.add_typer(models_app, name="models")
app.add_typer(config_app, name="config")
admin_commands.register(app, models_app)
embed_command.register(app)
generate_command.register(app)


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
def classify(  # noqa: PLR0913 - one parameter per option
    files: Annotated[
        list[Path] | None, typer.Argument(help="Image files, or others.", metavar="FILE...", show_default=False)
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="A text, for a model that classifies texts. May be repeated.", show_default=False),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", "-k", min=1, help="Classes per input, best first; else as many as the server gives."),
    ] = None,
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="Model name; not needed when only one classifies such inputs."),
    ] = "",
    address: AddressOption = "",
    timeout: Annotated[float, typer.Option("--timeout", "-t", min=0.001, help="Seconds per input.")] = 10.0,
    *,
    as_file: Annotated[bool, typer.Option("--as-file", help="The files are no images: for a model of files.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Classify image files, other files or texts with a running server. Exit code 1 when any of them failed.

    Examples:
        headrace classify photo.jpg

        headrace classify *.jpg --top-k 3 --model efficientnet-lite0

        headrace classify photos/*.jpg --json | jq -r '.labels[0].name'

        headrace classify --text "You are kind." --model toxic-comment

        headrace classify --as-file downloads/* --model magika
    """
    from headrace.classify import Wanted, inputs_of, run  # noqa: PLC0415 - imports gRPC
    from shared.settings_loader import load  # noqa: PLC0415 - imports pydantic

    address = address or load(None).settings.gateway.grpc_address
    wanted = Wanted(address=address, model=model, top_k=top_k, timeout_s=timeout)
    raise typer.Exit(run(inputs_of(files, text, as_file=as_file), wanted, as_json=as_json))


@app.command()
@of_boxes
def detect(
    files: Annotated[list[Path], typer.Argument(help="Image files.", metavar="FILE...", show_default=False)],
    boxes: Boxes,
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="Model name; not needed when only one detects."),
    ] = "",
    address: AddressOption = "",
    timeout: Annotated[float, typer.Option("--timeout", "-t", min=0.001, help="Seconds per image.")] = 10.0,
    *,
    as_json: JsonOption = False,
) -> None:
    """Find objects in image files with a running server. Exit code 1 when any of them failed.

    Examples:
        headrace detect street.jpg --draw found.png

        headrace detect *.jpg --model yolov3-tiny --class person --class bus --score-threshold 0.5

        headrace detect photos/*.jpg --draw found --json | jq '.detections | length'
    """
    from headrace.detect import Wanted, run  # noqa: PLC0415 - imports gRPC
    from shared.settings_loader import load  # noqa: PLC0415 - imports pydantic

    address = address or load(None).settings.gateway.grpc_address
    wanted = Wanted(address=address, model=model, options=boxes.options(), draw=boxes.draw, timeout_s=timeout)
    raise typer.Exit(run(files, wanted, as_json=as_json))


@app.command()
def demo(
    address: Annotated[
        str, typer.Option("--address", "-a", help="Use this running server instead of starting one.")
    ] = "",
    task: Annotated[
        list[str] | None, typer.Option(help="Only this one: classify, detect, embed, texts, generate. May be repeated.")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Show every task on real input, beside what is true; exit code 0 when all were right.

    The first time it fetches about 270 MB of models into .cache.

    Examples:
        headrace demo

        headrace demo --task classify --task detect

        headrace demo --address 127.0.0.1:8001
    """
    from headrace import demo as demo_module  # noqa: PLC0415 - imports gRPC

    raise typer.Exit(demo_module.run(address or None, config, task or ()))


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="What the model is to be called.", show_default=False)],
    kind: Annotated[str, typer.Option("--from", metavar="image|text|tensor", help="What a request brings.")] = "image",
    *,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a whole small model to start from: model.yaml, pipeline, network, a test, and a first version.

    It serves at once, with random weights; nothing that exists is overwritten.

    Examples:
        headrace new my-classifier

        headrace new my-language --from text
    """
    from headrace.new_model import create  # noqa: PLC0415 - imports torch
    from shared.settings_loader import load  # noqa: PLC0415 - imports pydantic

    create(load(config).settings, name, kind, as_json=as_json)


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
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a handshake that fails is told in a sentence of ours, once
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
