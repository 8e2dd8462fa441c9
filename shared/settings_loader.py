"""Finds the settings: defaults, then `headrace.yaml`, then `HEADRACE_…` environment variables. Used by every process.

Every mistake is a StartupError with exit code 2 whose one line names the file and line (or the variable), the key, and
the nearest valid key; two values that contradict each other are both named. Nothing is ignored in silence.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_origin

import msgspec
from pydantic import ValidationError

from shared import strict_yaml
from shared.errors import ExitCode, StartupError
from shared.mistakes import first_of, leaves, nearest, sentences, stray_booleans, unknown_keys
from shared.settings import Settings
from shared.strict_yaml import Document, KeyPath, YamlError

DEFAULT_FILE = Path("headrace.yaml")
"""Read from the working folder when it is there and no other file is named."""

PREFIX = "HEADRACE_"
_NESTED = "__"
_RELATIVE_TO_FILE = ("repository", "runtime_dir", "admin.certificate", "admin.key", "admin.token_file")
"""Paths that, given in a file, are relative to the file's folder, so that a server starts from anywhere."""


class Loaded(msgspec.Struct, frozen=True):
    """The effective settings, and where each value came from."""

    settings: Settings
    origins: dict[str, str]
    """`gateway.grpc_address` → `default`, `derived`, `headrace.yaml:12` or `HEADRACE_GATEWAY__GRPC_ADDRESS`."""

    def values(self) -> dict[str, Any]:
        """Dotted name → effective value, in the order of the settings' source."""
        return {dotted: _attribute(self.settings, dotted) for dotted in self.origins}


def load(config: Path | None, environ: Mapping[str, str] = os.environ) -> Loaded:
    """Read file and environment. `config` None: ./headrace.yaml if there is one. Raises StartupError(BAD_SETTINGS)."""
    try:
        document = _read_file(config)
    except YamlError as error:
        raise _refusal(error.text) from None
    variables = _read_environment(environ)
    origins = {dotted: _origin(dotted, document, variables) for dotted in leaves(Settings)}
    try:
        settings = Settings(**_merge(document, variables, config))
    except ValidationError as error:
        raise _refusal(first_of(sentences(error, lambda path: _where(path, origins, document)))) from None
    return Loaded(settings=settings, origins=_mark_derived(settings, origins))


def variable_of(dotted: str) -> str:
    """The environment variable that overrides a value: `pool.processes` → `HEADRACE_POOL__PROCESSES`."""
    return PREFIX + dotted.replace(".", _NESTED).upper()


def _refusal(text: str) -> StartupError:
    return StartupError(ExitCode.BAD_SETTINGS, text)


def _read_file(config: Path | None) -> Document:
    if config is None:
        if not DEFAULT_FILE.exists():
            return Document(DEFAULT_FILE.name, {}, {})
        config = DEFAULT_FILE
    elif not config.is_file():
        raise YamlError(str(config), "there is no such settings file")
    document = strict_yaml.read(config)
    found = [*unknown_keys(document, Settings), *stray_booleans(document, Settings)]
    if found:
        raise _refusal(first_of(found))
    return document


def _read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Dotted name → raw text of every HEADRACE_ variable. Raises StartupError for a variable that names nothing."""
    by_variable = {variable_of(dotted): dotted for dotted in leaves(Settings)}
    given = [name for name in environ if name.upper().startswith(PREFIX)]
    unknown = [
        f"{name}: unknown environment variable{nearest(name.upper(), by_variable)}"
        for name in sorted(given)
        if name not in by_variable
    ]
    if unknown:
        raise _refusal(first_of(unknown))
    return {by_variable[name]: environ[name] for name in given}


def _merge(document: Document, variables: dict[str, str], config: Path | None) -> dict[str, Any]:
    """One nested mapping for the model. An empty group in the file (all its lines commented out) is no group."""
    fields = leaves(Settings)
    merged: dict[str, Any] = {
        key: dict(value) if isinstance(value, dict) else value
        for key, value in document.data.items()
        if not (value is None and key not in fields)
    }
    base = (config or DEFAULT_FILE).absolute().parent
    for dotted in _RELATIVE_TO_FILE:
        group, _, name = dotted.rpartition(".")
        place: Any = merged.get(group) if group else merged
        if isinstance(place, dict) and isinstance(place.get(name), str) and place[name].strip():
            place[name] = base / place[name]  # an empty one is refused as it is
    for dotted, raw in variables.items():
        *parents, last = dotted.split(".")
        place = merged
        for parent in parents:
            place = place.setdefault(parent, {})
        if isinstance(place, dict):  # else the file has a plain value for the group, which validation tells
            place[last] = _from_text(dotted, raw, fields[dotted].annotation)
    return merged


def _from_text(dotted: str, raw: str, annotation: Any) -> Any:  # noqa: ANN401 - types and values of any field
    """A variable's text as the field's value: a list as `[1, 2]` or `1,2`, `null` for none, the rest as it stands."""
    if get_origin(annotation) is tuple:
        text = raw.strip().removeprefix("[").removesuffix("]")
        return [part.strip().strip("\"'") for part in text.split(",") if part.strip()]
    default = leaves(Settings)[dotted].default
    return None if default is None and raw in {"", "null"} else raw


def _origin(dotted: str, document: Document, variables: dict[str, str]) -> str:
    if dotted in variables:
        return variable_of(dotted)
    path = tuple(dotted.split("."))
    return document.where(path) if document.has(path) else "default"


def _where(path: KeyPath, origins: dict[str, str], document: Document) -> str:
    """The place to blame for a value; an item of a list has its own line in the file."""
    dotted = ".".join(str(part) for part in path[:2])
    origin = origins.get(dotted) or origins.get(str(path[0]) if path else "")
    if origin is None or not origin.startswith((PREFIX, "default")):
        return document.where(path)
    return origin


def _mark_derived(settings: Settings, origins: dict[str, str]) -> dict[str, str]:
    """A value that nobody gave but that differs from the default follows from another one."""
    fields = leaves(Settings)
    defaults = Settings.model_construct()
    return {
        dotted: "derived"
        if origin == "default" and _attribute(settings, dotted) != _attribute(defaults, dotted)
        else origin
        for dotted, origin in origins.items()
        if dotted in fields
    }


def _attribute(settings: Settings, dotted: str) -> Any:  # noqa: ANN401 - values of any field
    value: Any = settings
    for part in dotted.split("."):
        value = getattr(value, part)
    return value
