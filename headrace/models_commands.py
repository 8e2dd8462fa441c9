"""`headrace models list | zoo | fetch | add | import | show | history`: what is there, and how it comes there."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.options import (
    HASH_HELP,
    ConfigOption,
    Given,
    JsonOption,
    NameArgument,
    Target,
    at_repository,
    described,
)

_CurrentOption = Annotated[bool, typer.Option("--current", help="All traffic to it at once.")]

models_app = typer.Typer(
    help="The model repository: what is there, where it comes from, and what is no longer needed.",
    no_args_is_help=True,
)


@models_app.command("list")
@at_repository
def models_list(*, target: Target, as_json: JsonOption = False) -> None:
    """List the models of the repository, their versions, and who answers.

    Examples:
        headrace models list

        headrace models list --json | jq -r '.[] | select(.role == "current") | .name'
    """
    from headrace.listing import print_models  # noqa: PLC0415 - imports rich

    if target.address:
        from headrace import elsewhere  # noqa: PLC0415 - imports gRPC and rich

        elsewhere.print_models(target, as_json=as_json)
        return
    print_models(target.settings().repository, as_json=as_json)


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

    `headrace models zoo` lists what is known.

    Examples:
        headrace models fetch

        headrace models fetch efficientnet-lite0 --photos

        headrace models fetch builtin     (identity, identity_bytes, add_sub, simulated_slow)
    """
    from headrace.zoo_adding import fetch_with_progress  # noqa: PLC0415 - imports rich
    from shared.settings_loader import load  # noqa: PLC0415 - imports pydantic

    fetch_with_progress(names or [], load(config).settings.repository, photos=photos, as_json=as_json)


@models_app.command("add")
@at_repository
@described
def models_add(
    name: Annotated[
        str,
        typer.Argument(
            help="Which model: a folder of the repository with a model.yaml; or `zoo:` and a name.", show_default=False
        ),
    ],
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Files of the version, or folders of files.", metavar="PATH...", show_default=False),
    ] = None,
    *,
    given: Given,
    current: _CurrentOption = False,
    target: Target,
    as_json: JsonOption = False,
) -> None:
    """Store files as a version under their content hash; the same content is stored once.

    A model's first version answers at once, a later one when it is given traffic. `zoo:NAME` fetches a known model by
    name, version and SHA-256 and converts it; `headrace models zoo` lists them.

    Examples:
        headrace models add zoo:all-minilm-l6-v2

        headrace models add my-classifier weights.safetensors

        headrace models add my-classifier out/ --data-version 2026-11 --metric top1=0.962 --param lr=0.001

        headrace models add my-classifier weights.safetensors --parent 3f2a --current
    """
    from headrace import storing, zoo_adding  # noqa: PLC0415 - import rich

    if zoo_adding.is_of_zoo(name):
        zoo_adding.add(target, name, paths or [], given, make_current=current, as_json=as_json)
        return
    if not paths:
        raise typer.BadParameter("which files? (only zoo:NAME needs none)", param_hint="PATH...")
    if target.address:
        from headrace import elsewhere  # noqa: PLC0415 - imports gRPC and rich

        elsewhere.add_model(target, name, paths, given, make_current=current, as_json=as_json)
        return
    storing.add_model(target.settings(), name, paths, given, make_current=current, as_json=as_json)


@models_app.command("zoo")
def models_zoo(*, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the known models that can be fetched, and which of them the repository has.

    Examples:
        headrace models zoo

        headrace models zoo --json | jq -r '.[] | select(.task == "text_embedding") | .name'
    """
    from headrace.zoo_adding import print_zoo  # noqa: PLC0415 - imports rich
    from shared.settings_loader import load  # noqa: PLC0415 - imports pydantic

    print_zoo(load(config).settings.repository, as_json=as_json)


@models_app.command("import")
@described
def models_import(  # noqa: PLR0913 - one parameter per option
    name: Annotated[str, typer.Argument(help="What the model is, or is to be, called.", show_default=False)],
    file: Annotated[Path, typer.Argument(help="An .onnx, .pt2 or .safetensors file.", show_default=False)],
    *,
    pipeline: Annotated[str, typer.Option(metavar="image_classification|tensor", help="Else by its inputs.")] = "",
    network: Annotated[str, typer.Option(metavar="MODULE:FACTORY", help="Of a .safetensors file.")] = "",
    size: Annotated[int | None, typer.Option(min=1, help="Height and width of the images.")] = None,
    mean: Annotated[str, typer.Option(metavar="R,G,B", help="Subtracted, in units of 0..255.")] = "",
    std: Annotated[str, typer.Option(metavar="R,G,B", help="Divides what is left.")] = "",
    labels: Annotated[Path | None, typer.Option(help="A text file, one label a line.")] = None,
    trust: Annotated[str, typer.Option(metavar="data|code", help="`code`: an archive of torch.export.")] = "data",
    given: Given,
    current: _CurrentOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a model of a file, or a new version of it: model.yaml by what the file declares, proven by a real batch.

    Examples:
        headrace models import my-detector detector.onnx

        headrace models import my-classifier classifier.onnx --labels labels.txt --mean 127,127,127 --std 128,128,128
    """
    from headrace.importing import Asked, import_model  # noqa: PLC0415 - imports rich
    from shared.settings_loader import load  # noqa: PLC0415 - imports pydantic

    asked = Asked(
        pipeline=pipeline, network=network, size=size, mean=mean, std=std, labels=labels, trust=trust, current=current
    )
    import_model(load(config).settings, name, file, asked, given, as_json=as_json)


@models_app.command("show")
@at_repository
def models_show(
    name: NameArgument,
    version: Annotated[str, typer.Argument(metavar="[HASH]", help=f"{HASH_HELP} Default: the current one.")] = "",
    *,
    target: Target,
    as_json: JsonOption = False,
) -> None:
    """Show where a version comes from, its files, and its model's traffic with every change.

    Examples:
        headrace models show my-classifier

        headrace models show my-classifier 3f2a --json | jq .meta.metrics
    """
    from headrace.versions import print_shown  # noqa: PLC0415 - imports rich

    if target.address:
        from headrace import elsewhere  # noqa: PLC0415 - imports gRPC and rich

        elsewhere.print_shown(target, name, version, as_json=as_json)
        return
    print_shown(target.settings().repository, name, version, as_json=as_json)


@models_app.command("history")
@at_repository
def models_history(name: NameArgument, *, target: Target, as_json: JsonOption = False) -> None:
    """Show every change of a model's traffic: when, by whom, from which version to which, and why.

    Examples:
        headrace models history my-classifier

        headrace models history my-classifier --json | jq '.[-1]'
    """
    from headrace.versions import print_history  # noqa: PLC0415 - imports rich

    if target.address:
        from headrace import elsewhere  # noqa: PLC0415 - imports gRPC and rich

        elsewhere.print_history(target, name, as_json=as_json)
        return
    print_history(target.settings().repository, name, as_json=as_json)
