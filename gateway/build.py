"""Builds the served models from the repository; called once by the composition root."""

from typing import NamedTuple

from gateway.batcher import BatchLimits
from gateway.prepared_cache import preprocessing_digest
from gateway.readiness import NO_WORKER
from gateway.served import ServedModel
from gateway.state import ModelState
from shared.errors import ExitCode, HeadraceError, StartupError
from shared.logs import get_logger
from shared.pipeline_loader import code_digest, load_pipeline
from shared.repository import Repository
from shared.repository_files import file_digest
from shared.settings import Settings

log = get_logger()


class Models(NamedTuple):
    """What the repository gives."""

    served: list[ServedModel]
    broken: list[ModelState]
    """Models that can't even be described; they are shown with the reason, and the others are served."""


def served_models(settings: Settings) -> Models:
    """All models to serve, each at its current version.

    Raises StartupError naming the next step when there is none, or the first model's reason when none can be used.
    """
    repository = Repository(settings.repository)
    names = settings.models or tuple(name for name in repository.names() if repository.versions(name))
    if not names:
        raise StartupError(
            ExitCode.BAD_SETTINGS,
            f"no model in repository {settings.repository} has a version; "
            "fetch the default one: headrace models fetch efficientnet-lite0",
        )
    found = Models([], [])
    errors: list[StartupError] = []
    for number, name in enumerate(names, start=1):
        try:
            found.served.append(_at_start(repository, settings, number, name))
        except StartupError as error:
            errors.append(error)
            found.broken.append(ModelState(name, "", "failed", error.text))
            log.error("model can't be served", model=name, reason=error.told)  # noqa: TRY400 - the sentence says it all
    if not found.served:
        raise errors[0]
    return found


def _at_start(repository: Repository, settings: Settings, number: int, name: str) -> ServedModel:
    try:
        return served_model(repository, settings, number, name)
    except StartupError:
        raise
    except HeadraceError as error:
        raise StartupError(ExitCode.MODEL_LOAD, error.text) from error
    except Exception as error:  # a pipeline is the user's code and may raise anything, also when it is only described
        log.exception("model can't be described", model=name)
        text = f"model {name}: its pipeline raised {type(error).__name__} while it was described, see the log"
        raise StartupError(ExitCode.MODEL_LOAD, text) from error


def served_model(
    repository: Repository,
    settings: Settings,
    number: int,
    name: str,
    version: str = "",
    config: bytes | None = None,
) -> ServedModel:
    """One version of a model (default: the current one, with the model.yaml on the disk).

    Raises UnknownModel, UnknownVersion, StartupError.
    """
    found = repository.open(name, version, config)
    batching = found.batching(settings.batching)
    limits = BatchLimits(
        batching.max_rows,
        batching.max_wait_ms / 1000,
        tuple(batching.sizes),
        batching.weight,
        max_tokens=batching.max_tokens,
    )
    state = ModelState(found.name, found.version, "no_worker", NO_WORKER, on_demand=found.config.load == "on_demand")
    model = ServedModel(number, state, load_pipeline(found, torch_allowed=False), limits)
    model.config = found.config_bytes
    model.cached = found.config.cache and not model.pipeline.generates  # a text is drawn anew each time
    own_code = code_digest(found.folder) if ":" in found.config.pipeline else ""
    files = [model.pipeline.find_file(name) for name in model.pipeline.files()]
    model.preprocessing = preprocessing_digest(
        found.config, own_code, found.labels(), [file_digest(path) if path.is_file() else "" for path in files]
    )
    return model
