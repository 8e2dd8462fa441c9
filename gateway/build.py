"""Builds the served models from the repository; called once by the composition root."""

from gateway.batcher import BatchLimits
from gateway.readiness import NO_WORKER
from gateway.served import ServedModel
from gateway.state import ModelState
from shared.errors import ExitCode, HeadraceError, StartupError
from shared.pipeline_loader import load_pipeline
from shared.repository import Repository
from shared.settings import Settings


def served_models(settings: Settings) -> list[ServedModel]:
    """All models to serve, each at its current version. Raises StartupError naming the model and the next step."""
    repository = Repository(settings.repository)
    names = settings.models or tuple(name for name in repository.names() if repository.versions(name))
    if not names:
        raise StartupError(
            ExitCode.BAD_SETTINGS,
            f"no model in repository {settings.repository} has a version; "
            "fetch the default one: headrace models fetch efficientnet-lite0",
        )
    return [_at_start(repository, settings, number, name) for number, name in enumerate(names, start=1)]


def _at_start(repository: Repository, settings: Settings, number: int, name: str) -> ServedModel:
    try:
        return served_model(repository, settings, number, name)
    except HeadraceError as error:
        raise StartupError(ExitCode.MODEL_LOAD, error.text) from error


def served_model(repository: Repository, settings: Settings, number: int, name: str) -> ServedModel:
    """One model at its current version. Raises UnknownModel, UnknownVersion, StartupError."""
    version = repository.open(name)
    batching = version.batching(settings.batching)
    limits = BatchLimits(batching.max_rows, batching.max_wait_ms / 1000, tuple(batching.sizes))
    state = ModelState(version.name, version.version, "no_worker", NO_WORKER)
    return ServedModel(number, state, load_pipeline(version, torch_allowed=False), limits)
