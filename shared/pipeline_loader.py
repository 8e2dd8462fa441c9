"""Builds the pipeline that a model version names. Used by the gateway, pool processes, workers and the command line.

A built-in pipeline is a file in `shared/pipelines/`; a user's own is `module:Class`, where `module` is a file in the
model's folder, or else importable. Every failure is a StartupError with one sentence: the user's own code never brings
a process down with a trace. What that code raised is in the log; callers, who read the sentence too, get its type.
"""

import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from shared.errors import ExitCode, StartupError
from shared.logs import get_logger
from shared.mistakes import nearest, struct_sentence
from shared.model_config import RepositoryError, document_of
from shared.pipeline import Config, Pipeline
from shared.repository import ModelVersion
from shared.strict_yaml import KeyPath

BUILT_IN = "shared.pipelines"
KEPT_STATES = 4
"""Of a file that is edited while versions serve: as many as a model can have versions at work, current, canary and
standby, and the one that is being loaded. Older ones lose their name, and go with the last version that runs them."""

AnyPipeline = Pipeline[Any]

_log = get_logger()


def load_pipeline(version: ModelVersion, *, torch_allowed: bool) -> AnyPipeline:
    """Import and build a version's pipeline.

    `torch_allowed` False (gateway, pool): an `import torch` at module level is refused with a sentence that says where
    it belongs. Raises StartupError: BAD_SETTINGS for model.yaml, MODEL_LOAD for the pipeline's own code.
    """
    with contextlib.nullcontext() if torch_allowed else _without_torch(version):
        pipeline_class = _find_class(version)
        config = _read_config(version, pipeline_class)
        labels = version.labels()
        try:
            pipeline = pipeline_class.__new__(pipeline_class)
            pipeline.version_folder = version.files  # what `__init__` reads may lie there
            pipeline.__init__(config, version.folder, labels)  # type: ignore[misc]  # in two steps, see above
            return pipeline
        except StartupError:
            raise
        except Exception as error:  # the user's own code may raise anything
            what = f"model {version.name}: pipeline {version.config.pipeline} can't be built"
            raise own_code_failed(what, error) from error


def load_object(reference: str, folder: Path, name: str) -> Any:  # noqa: ANN401 - a class or a factory
    """The object that `module:attribute` names; a file `module.py` in `folder` comes first. `name` is the model's.

    Raises StartupError(MODEL_LOAD) when the module can't be imported or has no such attribute.
    """
    module_name, _, attribute = reference.partition(":")
    module = _import(module_name, folder, name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        known = [key for key in vars(module) if not key.startswith("_")]
        raise RepositoryError(f"model {name}: {module_name} has no {attribute}{nearest(attribute, known)}") from None


def code_digest(folder: Path) -> str:
    """What tells one state of the user's own code from another: all Python files of a model's folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def built_in_names() -> list[str]:
    """The pipelines that need no code of the user's."""
    folder = Path(importlib.import_module(BUILT_IN).__path__[0])
    return sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))


def own_code_failed(what: str, error: Exception) -> StartupError:
    """`what` failed because the user's own code raised `error`, which may say anything: its words go to the log."""
    if _torch_refusal(error) is None:  # which has a sentence of its own
        _log.error("a model's own code failed", what=what, exc_info=error)
    text = f"{what} ({type(error).__name__}, see the log)"
    return RepositoryError(text, detail=" ".join(str(error).split())[:300])


def _bad(version: ModelVersion, text: str) -> StartupError:
    return RepositoryError(f"model {version.name}: pipeline {version.config.pipeline} {text}")


def _find_class(version: ModelVersion) -> type[AnyPipeline]:
    reference = version.config.pipeline
    if ":" in reference:
        found = load_object(reference, version.folder, version.name)
        if not (isinstance(found, type) and issubclass(found, Pipeline)):
            raise _bad(version, "is not a subclass of shared.pipeline.Pipeline")
    else:
        known = built_in_names()
        if reference not in known:
            where = document_of(version.config_bytes, version.name).where(("pipeline",))
            raise RepositoryError(
                f"{where}: pipeline is {reference!r}: no built-in pipeline has that name{nearest(reference, known)} "
                f"(built in: {', '.join(known)}; your own: module:Class)",
                ExitCode.BAD_SETTINGS,
            )
        found = _only_class(version, importlib.import_module(f"{BUILT_IN}.{reference}"))
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise _bad(version, f"lacks {missing}")
    return found


def _only_class(version: ModelVersion, module: ModuleType) -> type[AnyPipeline]:
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Pipeline) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise _bad(version, f"must hold exactly one pipeline class, has {len(found)}")
    return found[0]


def _import(module_name: str, folder: Path, name: str) -> ModuleType:
    path = folder.joinpath(*module_name.split(".")).with_suffix(".py")
    try:
        if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
            return _import_file(path)
        return importlib.import_module(module_name)
    except StartupError:
        raise
    except ModuleNotFoundError as error:
        if error.name != module_name.split(".", maxsplit=1)[0]:
            raise RepositoryError(
                f"model {name}: {module_name} imports {error.name}, which is not installed"
            ) from error
        raise RepositoryError(
            f"model {name}: {module_name} is neither a file {path.name} in the model's folder nor importable"
        ) from error
    except Exception as error:  # the user's own code may raise anything
        raise own_code_failed(f"model {name}: {module_name} can't be imported", error) from error


class _Source(importlib.machinery.SourceFileLoader):
    """Runs the very bytes that were looked at, and keeps no compiled copy.

    Python takes one for fresh whose source has kept its size and the second of its last change, as two edits may.
    """

    def __init__(self, name: str, path: str, content: bytes) -> None:
        super().__init__(name, path)
        self._content = content

    def get_data(self, path: str) -> bytes:  # noqa: ARG002 - importlib's signature
        return self._content

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError(f"{path} has no compiled copy")


def _import_file(path: Path) -> ModuleType:
    """Import a file under a name of its own, so that two models may each have its `pipeline.py`, and an edit counts."""
    content = path.read_bytes()
    place = f"headrace_model_{_short(str(path.resolve()).encode())}_"
    unique = f"{place}{_short(content)}_{path.stem}"
    known = sys.modules.pop(unique, None)
    if known is not None:
        sys.modules[unique] = known  # as the latest one
        return known
    spec = importlib.util.spec_from_loader(unique, _Source(unique, str(path), content))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} is no Python source file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    for old in [name for name in list(sys.modules) if name.startswith(place)][:-KEPT_STATES]:
        sys.modules.pop(old, None)
    return module


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _read_config(version: ModelVersion, pipeline_class: type[AnyPipeline]) -> Config:
    try:
        return msgspec.convert(version.config.preprocessing, pipeline_class.config_type)
    except msgspec.ValidationError as error:
        path: KeyPath
        path, sentence = struct_sentence(error, pipeline_class.config_type, ("preprocessing",))
        raise RepositoryError(
            f"{document_of(version.config_bytes, version.name).where(path)}: {sentence}", ExitCode.BAD_SETTINGS
        ) from None


class _TorchRefused(ImportError):
    pass


def _torch_refusal(error: BaseException) -> _TorchRefused | None:
    """The refused import that led to this error, if one did."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, _TorchRefused):
        cause = cause.__cause__ or cause.__context__
    return cause


class _TorchGuard(importlib.abc.MetaPathFinder):
    """Stands before all other finders while a pipeline is imported and built."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.split(".", maxsplit=1)[0] in {"torch", "torchvision", "torchaudio"}:
            raise _TorchRefused(fullname)
        return None


@contextlib.contextmanager
def _without_torch(version: ModelVersion) -> Iterator[None]:
    guard = _TorchGuard()
    sys.meta_path.insert(0, guard)
    try:
        yield
    except StartupError as error:
        refusal = _torch_refusal(error)
        if refusal is None:
            raise
        raise _bad(
            version,
            f"imports {refusal} when it is loaded: the gateway and the pool run it without torch; "
            "move the import into `normalise` or `head`, which only the worker calls",
        ) from None
    finally:
        sys.meta_path.remove(guard)
