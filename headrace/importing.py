"""What `headrace models import` takes and prints; the import itself is `headrace.import_model`."""

from pathlib import Path

import msgspec
from rich.console import Console

from headrace import import_model as importer
from headrace import live
from headrace.import_config import Shape
from headrace.listing import print_done
from headrace.options import Given
from headrace.output import literal, print_json
from headrace.storing import Added, meta_of, parent_of, print_added
from shared.errors import ExitCode, StartupError
from shared.onnx_check import OnnxTensor
from shared.settings import Settings


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The command's options, as they were typed; empty: left out."""

    pipeline: str = ""
    network: str = ""
    size: int | None = None
    mean: str = ""
    std: str = ""
    labels: Path | None = None
    trust: str = "data"
    current: bool = False


def import_model(settings: Settings, name: str, file: Path, asked: Asked, given: Given, *, as_json: bool) -> None:
    """`headrace models import`. Raises StartupError, HeadraceError."""
    root = settings.repository
    meta = meta_of(given, parent_of(given, root, name), importer.BY)
    options = importer.ImportOptions(shape=_shape(asked), labels=asked.labels, meta=meta)
    done = importer.run(root, name, file, options)
    if asked.current and not done.current:
        live.make_current(settings, name, done.version, importer.BY)
        done = msgspec.structs.replace(done, current=True)
    if as_json:
        print_json(done)
        return
    print_added(Added(name, done.version, current=done.current, present=done.present), root)
    _print_found(done, root)


def _shape(asked: Asked) -> Shape:
    given = {
        "pipeline": asked.pipeline or None,
        "network": asked.network or None,
        "size": asked.size,
        "mean": _triple(asked.mean, "--mean"),
        "std": _triple(asked.std, "--std"),
        "trust": asked.trust,
    }
    try:
        return msgspec.convert(given, Shape)
    except msgspec.ValidationError as error:
        field = str(error).rpartition("$.")[2].strip("`")
        text = f"--{field} is {given.get(field)!r}: see `headrace models import --help`"
        raise StartupError(ExitCode.BAD_SETTINGS, text) from None


def _triple(text: str, option: str) -> tuple[float, ...] | None:
    if not text:
        return None
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != 3:
        raise StartupError(ExitCode.BAD_SETTINGS, f"{option} is {text[:100]!r}: must be three numbers like 127,127,127")
    return numbers


def _print_found(done: importer.Imported, root: Path) -> None:
    console = Console()
    for words, tensors in (("takes", done.inputs), ("gives", done.outputs)):
        if tensors:
            console.print(literal(f"  {words} {', '.join(map(_told, tensors))}"), soft_wrap=True)
    console.print(
        literal(f"  answered a batch of {done.rows} in {done.batch_s * 1e3:.1f} ms on this CPU: {done.answer}"),
        soft_wrap=True,
    )
    if done.new_config:
        print_done(f"{root / done.name / 'model.yaml'} is new: pipeline {done.pipeline}, backend {done.backend}")
    if done.unconfirmed:
        guesses = ", ".join(done.unconfirmed)
        console.print(literal(f"  no file tells these, look at them: {guesses}"), soft_wrap=True)


def _told(tensor: OnnxTensor) -> str:
    shape = list(tensor.shape) if tensor.shape is not None else "any shape"
    return f"{tensor.name} {tensor.datatype or 'of no known type'} {shape}"
