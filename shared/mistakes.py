"""Mistakes in settings, told so that they can be corrected at once: place, key, value, what is allowed, nearest key.

Used by `shared.settings_loader` (headrace.yaml, environment) and `shared.repository` (model.yaml).
"""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from shared.strict_yaml import Document, KeyPath

_WORDS = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "path_type": "must be a path",
    "tuple_type": "must be a list",
    "dict_type": "must be a group of keys",
    "model_type": "must be a group of keys",
    "missing": "is required",
}
"""Pydantic's error types in our words; the others keep pydantic's own sentence."""

_DOTTED = re.compile(r"\b[a-z]\w*\.[a-z]\w*\b")


def groups(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The fields of a model that are models themselves."""
    return {
        name: field.annotation
        for name, field in model.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def leaves(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Dotted name → field of every value in a model and its groups, in the order of the source."""
    found: dict[str, FieldInfo] = {}
    nested = groups(model)
    for name, field in model.model_fields.items():
        if name in nested:
            found.update(leaves(nested[name], f"{prefix}{name}."))
        else:
            found[prefix + name] = field
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)`, or nothing when no known name is near. Knows keys that were put into a wrong group."""
    names = list(known)
    last = name.rsplit(".", maxsplit=1)[-1]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if not close:
        tails = {candidate.rsplit(".", maxsplit=1)[-1]: candidate for candidate in names}
        close = [tails[tail] for tail in difflib.get_close_matches(last, tails, n=1, cutoff=0.75)]
    return f" (did you mean {close[0]}?)" if close else ""


def unknown_keys(document: Document, model: type[BaseModel]) -> list[str]:
    """One sentence per key of the file that the model does not have."""
    known = [*leaves(model), *groups(model)]
    return [
        f"{document.where(path)}: unknown key {_dotted(path)}{nearest(_dotted(path), known)}"
        for path in _unknown_paths(document.data, model, ())
    ]


def _unknown_paths(data: dict[str, Any], model: type[BaseModel], path: KeyPath) -> list[KeyPath]:
    nested = groups(model)
    found: list[KeyPath] = []
    for key, value in data.items():
        if key not in model.model_fields:
            found.append((*path, key))
        elif key in nested and isinstance(value, dict):
            found.extend(_unknown_paths(value, nested[key], (*path, key)))
    return found


def stray_booleans(document: Document, model: type[BaseModel]) -> list[str]:
    """`true` where a number is meant: pydantic would take it for 1."""
    found = []
    for dotted, field in leaves(model).items():
        path = tuple(dotted.split("."))
        value = _at(document.data, path)
        if isinstance(value, bool) and field.annotation not in {bool, dict}:
            found.append(f"{document.where(path)}: {dotted} is {str(value).lower()}: must not be true or false")
    return found


def sentences(error: ValidationError, where: Callable[[KeyPath], str]) -> list[str]:
    """One sentence per mistake pydantic found. `where` tells the place of a key, e.g. `headrace.yaml:12`."""
    return [_sentence(dict(detail), where) for detail in error.errors(include_url=False)]


def _sentence(detail: dict[str, Any], where: Callable[[KeyPath], str]) -> str:
    path = tuple(part for part in detail["loc"] if part != "[key]")
    if detail["type"] == "value_error":
        return _contradiction(str(detail["ctx"]["error"]), path, where)
    words = _WORDS.get(detail["type"])
    if words is None:
        words = detail["msg"].replace("Input should be", "must be").replace("Value error, ", "")
        words = words if words.startswith("must") else f"is not valid: {words[0].lower()}{words[1:]}"
    if detail["type"] == "literal_error" and isinstance(detail["input"], str):
        words += nearest(detail["input"], re.findall(r"'([^']+)'", words))
    if detail["type"] == "missing":
        return f"{where(path[:-1])}: {_dotted(path)} {words}"
    return f"{where(path)}: {_dotted(path)} is {_shown(detail['input'])}: {words}"


def _contradiction(text: str, path: KeyPath, where: Callable[[KeyPath], str]) -> str:
    """Two values that disagree, or one in itself: the sentence names them, the places say where each came from."""
    keys = list(dict.fromkeys(_DOTTED.findall(text)))
    places = {key: where(tuple(key.split("."))) for key in keys}
    if len(places) < 2:
        return f"{next(iter(places.values()), None) or where(path)}: {text}"
    given = [place for place in places.values() if place != "default"]
    told = ", ".join(f"{key} from {place}" for key, place in places.items())
    return f"{given[0] if given else 'default'}: {text} ({told})"


def struct_sentence(error: msgspec.ValidationError, struct: type[msgspec.Struct], path: KeyPath) -> tuple[KeyPath, str]:
    """Msgspec's complaint about a block at `path`: the key path it is about, and the sentence without its place."""
    text = str(error)
    inside = re.search(r"`\$\.?([^`]*)`", text)
    inner: KeyPath = tuple(re.findall(r"\w+", inside[1])) if inside else ()
    unknown = re.search(r"unknown field `(.+?)`", text)
    if unknown:
        known = [field.encode_name for field in msgspec.structs.fields(struct)]
        place = (*path, *inner, unknown[1])
        return place, f"unknown key {_dotted(place)}{nearest(unknown[1], known)}"
    missing = re.search(r"missing required field `(.+?)`", text)
    if missing:
        return (*path, *inner), f"{_dotted((*path, *inner, missing[1]))} is required"
    reason = text.split(" - at ", maxsplit=1)[0].replace("`", "")
    return (*path, *inner), f"{_dotted((*path, *inner))}: {reason[0].lower()}{reason[1:]}"


def first_of(found: list[str]) -> str:
    """One line for all mistakes: the first one in the file, and how many follow."""
    more = len(found) - 1
    return min(found, key=_line_number) + (f" (and {more} more mistake{'s' if more > 1 else ''})" if more else "")


def _line_number(sentence: str) -> int:
    line = re.match(r"[^:]*:(\d+):", sentence)
    return int(line[1]) if line else 0


def _dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def _at(data: Any, path: KeyPath) -> Any:  # noqa: ANN401 - plain YAML data
    for part in path:
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _shown(value: Any) -> str:  # noqa: ANN401 - whatever the file holds
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
