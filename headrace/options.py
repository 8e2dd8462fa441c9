"""Options that several commands share, and what the commands make of them."""

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import typer

from shared.errors import ExitCode, StartupError

if TYPE_CHECKING:
    from headrace.client_calls import DetectOptions
    from shared.settings import Settings

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

Command: TypeAlias = Callable[..., None]
_Option: TypeAlias = tuple[Any, Any]
"""Its annotation, and what it is when it is left out."""


class Target(NamedTuple):
    """Which server, or whose repository."""

    config: Path | None = None
    address: str = ""
    token_file: Path | None = None
    ca: Path | None = None

    def settings(self) -> "Settings":
        """Of this machine's server and repository. Raises StartupError, also for options that go with --address."""
        from shared.settings_loader import load  # noqa: PLC0415 - imports pydantic

        if self.token_file is not None or self.ca is not None:
            text = "--token-file and --ca go with --address: what runs here needs neither"
            raise StartupError(ExitCode.BAD_SETTINGS, text)
        return load(self.config).settings


class Given(NamedTuple):
    """What the command line says of a new version; empty: nothing."""

    data_version: str = ""
    owner: str = ""
    licence: str = ""
    parent: str = ""
    metric: Sequence[str] | None = None
    """`name=number`"""
    param: Sequence[str] | None = None
    """`name=value`"""


class Boxes(NamedTuple):
    """Which boxes of an image are wanted; None: the model's default."""

    score_threshold: float | None = None
    iou_threshold: float | None = None
    max_detections: int | None = None
    classes: Sequence[str] | None = None
    draw: Path | None = None
    """Where the pictures with the boxes go."""

    def options(self) -> "DetectOptions":
        """For the client."""
        return {
            "score_threshold": self.score_threshold,
            "iou_threshold": self.iou_threshold,
            "max_detections": self.max_detections,
            "classes": self.classes,
        }


def _made_of(parameter: str, kind: Callable[..., Any], options: dict[str, _Option]) -> Callable[[Command], Command]:
    """A decorator: the command has these options, and gets them as the one `parameter`."""

    def decorated(command: Command) -> Command:
        @functools.wraps(command)
        def called(**given: Any) -> None:  # noqa: ANN401 - as Typer read them
            made = kind(**{name: given.pop(name) for name in options})
            command(**given, **{parameter: made})

        own = inspect.signature(command)
        parameters = []
        for each in own.parameters.values():
            if each.name == parameter:
                parameters += [
                    inspect.Parameter(name, each.kind, default=default, annotation=annotation)
                    for name, (annotation, default) in options.items()
                ]
            else:
                parameters.append(each)
        called.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # which Typer reads
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        return called

    return decorated


def _address_help(else_: str) -> Any:  # noqa: ANN401 - an annotation
    told = f"host:port of a server's admin.address; else {else_}."
    return Annotated[str, typer.Option("--address", "-a", help=told, show_default=False)]


def _at(else_: str) -> dict[str, _Option]:
    return {
        "config": (ConfigOption, None),
        "address": (_address_help(else_), ""),
        "token_file": (
            Annotated[
                Path | None,
                typer.Option("--token-file", help="The server's token, with --address.", show_default=False),
            ],
            None,
        ),
        "ca": (
            Annotated[
                Path | None,
                typer.Option(
                    "--ca", help="PEM certificates to trust, with --address; else the system's.", show_default=False
                ),
            ],
            None,
        ),
    }


at_server = _made_of("target", Target, _at("the server that runs here"))
"""For commands about a running server."""
at_repository = _made_of("target", Target, _at("the repository of the settings"))
"""For commands about what is stored."""
described = _made_of(
    "given",
    Given,
    {
        "data_version": (Annotated[str, typer.Option(help="What it was trained on, in your own words.")], ""),
        "owner": (Annotated[str, typer.Option(help="Whom to ask about it.")], ""),
        "licence": (Annotated[str, typer.Option(help="Of the weights.")], ""),
        "parent": (Annotated[str, typer.Option(metavar="HASH", help="The version it was made from.")], ""),
        "metric": (Annotated[list[str] | None, typer.Option(metavar="NAME=NUMBER", help="May be repeated.")], None),
        "param": (
            Annotated[
                list[str] | None,
                typer.Option(metavar="NAME=VALUE", help="A hyper-parameter, JSON or text. May be repeated."),
            ],
            None,
        ),
    },
)
"""For commands that bring a new version."""
_PICTURES = "Draw the boxes: into a file for one image, into a folder for several."
of_boxes = _made_of(
    "boxes",
    Boxes,
    {
        "score_threshold": (
            Annotated[
                float | None,
                typer.Option(min=0, max=1, help="Leave out boxes with a lower score.", show_default=False),
            ],
            None,
        ),
        "iou_threshold": (
            Annotated[
                float | None,
                typer.Option(
                    min=0,
                    max=1,
                    help="Of two boxes of a class that overlap by more, keep the better one.",
                    show_default=False,
                ),
            ],
            None,
        ),
        "max_detections": (
            Annotated[int | None, typer.Option(min=1, help="The best so many boxes per image.", show_default=False)],
            None,
        ),
        "classes": (
            Annotated[
                list[str] | None,
                typer.Option("--class", metavar="NAME", help="Only boxes of this class. May be repeated."),
            ],
            None,
        ),
        "draw": (Annotated[Path | None, typer.Option(metavar="PATH", help=_PICTURES, show_default=False)], None),
    },
)
"""For commands that look for objects in images."""
