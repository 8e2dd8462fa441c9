"""`headrace models import`: a model file becomes a served model, or nothing happens.

The new version is put together in a hidden folder of the repository, with a model.yaml that follows from the file, and
has to answer a real input in a process of its own there. Only then does it get its name. What a killed import leaves
behind is that hidden folder, which nobody reads and the next import removes.
"""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headrace import import_proof
from headrace.import_config import Draft, Found, Shape, draft, look
from headrace.listing import size_text
from shared.errors import ExitCode, StartupError
from shared.model_config import CONFIG_FILE, ModelConfig, config_bytes, parse_config
from shared.onnx_check import OnnxTensor
from shared.repository import TRAFFIC_FILE, VERSIONS, Meta, Repository, RepositoryError, is_name, no_name
from shared.repository_lock import locked, workplace
from shared.repository_sources import collect
from shared.repository_writer import add_version, write_atomically

BY = "headrace models import"
PROOF_LIMIT_S = 600.0
"""For loading, warming up and one answer; a network that takes longer is not served by a busy server either."""
_MAX_LABEL_BYTES = 16 * 1024 * 1024


class ImportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says."""

    shape: Shape = Shape()
    """What goes into a new model.yaml."""
    labels: Path | None = None
    """One label a line; becomes a file of the version."""
    meta: Meta = Meta(source=BY)


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of it."""

    name: str
    version: str
    current: bool
    """Whether it answers now: a model's first version does, a later one when it is told to."""
    present: bool
    """Whether the same content was there already."""
    pipeline: str
    backend: str
    inputs: tuple[OnnxTensor, ...]
    """As the file declares them, rows first; empty where it holds weights alone."""
    outputs: tuple[OnnxTensor, ...]
    rows: int
    """Of the batch that was timed."""
    batch_s: float
    """Seconds that it took, on the CPU."""
    answer: str
    """The beginning of what the model answered to its pipeline's example."""
    new_config: bool
    """Whether model.yaml was written now; else it was there, and stays as it is."""
    unconfirmed: tuple[str, ...] = ()
    """Settings of a new model.yaml that are a guess."""


def run(root: Path, name: str, file: Path, options: ImportOptions) -> Imported:
    """Import a file as a version of the model `name`, which may be new. Makes no later version current.

    Raises StartupError with one sentence (RepositoryError among them); then the repository is as it was.
    """
    if not is_name(name):
        raise RepositoryError(no_name(name), ExitCode.BAD_SETTINGS)
    found = look(file)
    labels = _labels(options.labels)
    with _stage(root, name) as stage:
        folder = stage / name
        made = _config(root / name, folder, found, options, labels)
        config = parse_config(config_bytes(folder), name)
        _check_kept(config, found, file.name)
        files = _files(file, found, config, options.labels)
        staged = add_version(stage, name, files, options.meta, by=BY)
        proof = _prove(folder, name)
        present = name in (repository := Repository(root)).names() and staged.version in repository.versions(name)
        _keep(root, folder, made is not None, files, options.meta)
    return Imported(
        name=name,
        version=staged.version,
        current=Repository(root).current(name) == staged.version,
        present=present,
        pipeline=config.pipeline,
        backend=config.backend,
        inputs=found.inputs,
        outputs=found.outputs,
        rows=proof.rows,
        batch_s=proof.batch_s,
        answer=proof.answer,
        new_config=made is not None,
        unconfirmed=made.unconfirmed if made is not None else (),
    )


def _labels(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        if path.stat().st_size > _MAX_LABEL_BYTES:
            raise RepositoryError(f"{path}: is larger than {size_text(_MAX_LABEL_BYTES)}", ExitCode.BAD_SETTINGS)
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise RepositoryError(f"{path}: can't be read: {error.strerror}", ExitCode.BAD_SETTINGS) from None
    except UnicodeDecodeError:
        raise RepositoryError(f"{path}: is not UTF-8 text", ExitCode.BAD_SETTINGS) from None


def _config(real: Path, folder: Path, found: Found, options: ImportOptions, labels: list[str]) -> Draft | None:
    """Bring the model's folder, without its versions, to the stage. Returns the draft when it had no model.yaml."""
    if real.is_dir():
        shutil.copytree(
            real,
            folder,
            ignore=lambda where, names: [
                name
                for name in names
                if name.startswith(".") or (Path(where) == real and name in (VERSIONS, TRAFFIC_FILE))
            ],
            ignore_dangling_symlinks=True,
        )
    else:
        folder.mkdir()
    if (folder / CONFIG_FILE).exists():
        if options.shape.given:
            raise RepositoryError(
                f"{real.name}/{CONFIG_FILE} is there already and decides: leave out {', '.join(options.shape.given)}, "
                "or edit the file",
                ExitCode.BAD_SETTINGS,
            )
        return None
    made = draft(found, options.shape, labels)
    (folder / CONFIG_FILE).write_text(made.text, encoding="utf-8")
    return made


def _check_kept(config: ModelConfig, found: Found, told: str) -> None:
    """Whether a model.yaml that was there is for files of this kind."""
    wanted = {".onnx": "onnxruntime"}.get(found.suffix, "torch")
    if config.backend != wanted:
        raise RepositoryError(
            f"{told} needs backend {wanted}, and model.yaml says {config.backend}: import it under another name, or "
            "edit model.yaml",
            ExitCode.BAD_SETTINGS,
        )


def _files(file: Path, found: Found, config: ModelConfig, labels: Path | None) -> dict[str, Path]:
    """Name in the version → file. Raises RepositoryError for links, pickles and bad names."""
    files = collect([file, *(file.parent / name for name in found.external)])
    if labels is not None:
        if config.labels is None:
            raise RepositoryError("--labels is given, but model.yaml names no labels file", ExitCode.BAD_SETTINGS)
        files[config.labels] = labels
    return files


def _prove(folder: Path, name: str) -> import_proof.Proof:
    """Load the stage's version and answer one input, in a process that may crash or hang without harm."""
    result = folder.parent / "proof.json"
    command = [sys.executable, "-P", "-m", "headrace.import_proof", str(folder), str(result)]
    try:
        done = subprocess.run(command, timeout=PROOF_LIMIT_S, check=False, stdout=subprocess.DEVNULL)  # noqa: S603 - our own module
    except subprocess.TimeoutExpired:
        raise RepositoryError(
            f"model {name}: gave no answer within {PROOF_LIMIT_S:g} s; nothing was imported"
        ) from None
    try:
        proof = msgspec.json.decode(result.read_bytes(), type=import_proof.Proof)
    except (OSError, msgspec.DecodeError):
        raise RepositoryError(
            f"model {name}: the process that tried it ended without an answer (exit {done.returncode}); "
            "nothing was imported"
        ) from None
    if proof.problem:
        raise RepositoryError(f"{proof.problem}; nothing was imported")
    return proof


def _keep(root: Path, folder: Path, new_config: bool, files: dict[str, Path], meta: Meta) -> None:  # noqa: FBT001 - a fact, not a switch
    """Give what has been proved its place."""
    real = root / folder.name
    if not real.exists():
        folder.rename(real)
        return
    config = real / CONFIG_FILE
    if new_config:
        with locked(real):
            write_atomically(config, (folder / CONFIG_FILE).read_bytes())
    try:
        add_version(root, real.name, files, meta, by=BY)
    except StartupError:
        if new_config:
            config.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _stage(root: Path, name: str) -> Iterator[Path]:
    """A folder in the repository that no reader sees; gone afterwards."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with workplace(root) as place:
            yield place
    except OSError as error:
        raise RepositoryError(
            f"model {name}: can't be stored: {error.strerror or error}; nothing was imported"
        ) from error
