"""`headrace new`: a whole small model that serves at once, to be changed into one's own.

It is built in a hidden folder of the repository and renamed: it is there with its first version, or not at all.
"""

from pathlib import Path

from rich.console import Console

from headrace.listing import print_done
from headrace.new_templates import TEMPLATES, Template
from headrace.output import literal, print_json
from headrace.ready import reachable
from shared.errors import ExitCode, StartupError
from shared.mistakes import nearest
from shared.pipeline_loader import load_object
from shared.repository import Meta, RepositoryError, is_name, no_name
from shared.repository_lock import workplace
from shared.repository_writer import add_version
from shared.settings import GatewaySettings, Settings

BY = "headrace new"


def create(settings: Settings, name: str, kind: str, *, as_json: bool) -> None:
    """Write the model `name` for requests that bring an image, a text or tensors.

    Raises StartupError for a bad name or kind, RepositoryError when it exists or can't be written.
    """
    if not is_name(name):
        raise RepositoryError(no_name(name))
    template = TEMPLATES.get(kind)
    if template is None:
        known = ", ".join(TEMPLATES)
        raise StartupError(ExitCode.BAD_SETTINGS, f"--from is {kind[:100]!r}: must be one of {known}{_near(kind)}")
    root = settings.repository
    target = root / name
    if target.exists() or target.is_symlink():
        raise RepositoryError(f"{target} is there already; nothing was changed")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with workplace(root) as scratch:
            version = _write(scratch, name, template)
            (scratch / name).rename(target)
    except OSError as error:
        raise RepositoryError(f"{target} can't be written: {error.strerror}") from error
    files = [f"{target}/{file.replace('NAME', _module(name))}" for file in template.files]
    call = _call(template, name, settings.gateway)
    if as_json:
        print_json({"name": name, "version": version, "files": files, "call": call})
    else:
        _print(target, version, files, call)


def _call(template: Template, name: str, gateway: GatewaySettings) -> str:
    """The command that calls it, at the server of these settings."""
    command = template.call.replace("NAME", name)
    http, grpc = reachable(gateway.http_address), reachable(gateway.grpc_address)
    if template.http:
        return command.replace(GatewaySettings().http_address, http)
    return command if grpc == GatewaySettings().grpc_address else f"{command} --address {grpc}"


def _near(kind: str) -> str:
    return nearest(kind, TEMPLATES)


def _module(name: str) -> str:
    """A test file's name of its own: pytest takes two of one name for one."""
    return name.replace("-", "_").replace(".", "_")


def _write(root: Path, name: str, template: Template) -> str:
    """The model below `root`, with random weights as its first version, which is returned."""
    folder = root / name
    folder.mkdir()
    for file, content in template.files.items():
        (folder / file.replace("NAME", _module(name))).write_text(content.replace("NAME", name), encoding="utf-8")
    weights = root / "weights.safetensors"
    _save_random_weights(folder, name, weights)
    meta = Meta(source=BY, data_version="none: random weights")
    return add_version(root, name, {weights.name: weights}, meta, by=BY).version


def _save_random_weights(folder: Path, name: str, target: Path) -> None:
    import torch  # noqa: PLC0415 - only this one step needs it
    from safetensors.torch import save_file  # noqa: PLC0415

    torch.manual_seed(0)  # the same every time, so that the version is, too
    network: torch.nn.Module = load_object("network:build", folder, name)()
    save_file(network.state_dict(), target)


def _print(target: Path, version: str, files: list[str], call: str) -> None:
    print_done(f"{target.name} {version} is in {target}, with random weights:")
    console = Console()
    steps = {
        f"pytest {target}": "its test",
        "headrace serve": "serves it, with the other models",
        f"headrace models load {target.name}": "where a server runs already",
        call: "calls it",
        f"headrace models add {target.name} weights.safetensors": "your own weights, as a new version",
    }
    lines = [*(f"  {file}" for file in files), "Next:", *(f"  {step}    # {what}" for step, what in steps.items())]
    for line in lines:
        console.print(literal(line), soft_wrap=True)
