"""YAML with line numbers and without surprises: `headrace.yaml` and `model.yaml`. Used by all processes at start.

Reads plain data only: text, numbers, true/false, null, lists and mappings. Refuses, with file and line: tags of any
kind, merge keys, duplicate keys, keys that are not text, tabs as indentation, several documents, files over 1 MB,
deep nesting and aliases that expand to more than they show (a "billion laughs" file costs milliseconds).
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 32
"""Nesting; ours need four levels. Checked before anything recursive sees the text."""
MAX_ALIASES = 32
MAX_VALUES = 20_000
"""Values after aliases are expanded; also stops an alias that contains itself."""

KeyPath = tuple[str | int, ...]

# libyaml where PyYAML was built with it (ten times faster); the same safe events and nodes either way.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_TAG + name for name in ("str", "int", "float", "bool", "null", "seq", "map")}
_READ_AS_TEXT = {_TAG + "timestamp", _TAG + "value"}
"""What YAML 1.1 guesses from plain text and we do not: a date or `=` stays text."""


_PLAIN_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)")
"""YAML 1.1 also reads 010 as eight and 1:30 as ninety."""


class YamlError(Exception):
    """The file can't be used. `text` is one sentence that starts with `file:line`."""

    def __init__(self, where: str, text: str) -> None:
        super().__init__(f"{where}: {text}")
        self.text = f"{where}: {text}"


class Document:
    """A parsed file: plain `data`, and the line of every key in it."""

    def __init__(self, name: str, data: dict[str, Any], lines: dict[KeyPath, int]) -> None:
        self.name = name
        self.data = data
        self._lines = lines

    def where(self, path: KeyPath) -> str:
        """`file:line` of a key, or of the nearest key around it that the file has."""
        while path and path not in self._lines:
            path = path[:-1]
        return f"{self.name}:{self._lines[path]}" if path else self.name

    def has(self, path: KeyPath) -> bool:
        """Whether the file itself holds this key."""
        return path in self._lines


def read(path: Path, name: str | None = None) -> Document:
    """Read a file; `name` is what messages call it (default: the file's name). Raises YamlError."""
    return parse_bytes(read_bytes(path, name), name or path.name)


def read_bytes(path: Path, name: str | None = None) -> bytes:
    """A file as it is, no larger than `MAX_BYTES`. Raises YamlError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise YamlError(str(path), f"can't be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise YamlError(f"{name or path.name}:1", f"is larger than {MAX_BYTES} bytes")
    return raw


def parse_bytes(raw: bytes, name: str) -> Document:
    """As `parse`, of what a file called `name` holds. Raises YamlError."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise YamlError(f"{name}:{line}", "is not UTF-8 text") from None
    return parse(text, name)


def parse(text: str, name: str) -> Document:
    """Parse text that came from a file called `name`. An empty text is an empty mapping. Raises YamlError."""
    try:
        _check_events(text, name)
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise _marked(error, text, name) from None
    except yaml.YAMLError as error:
        raise YamlError(f"{name}:{_line_of(error, text)}", "holds a character that YAML does not allow") from None
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag == _TAG + "null"):
        return Document(name, {}, {})
    builder = _Builder(name)
    data = builder.value(root, ())
    if not isinstance(data, dict):
        raise YamlError(f"{name}:{root.start_mark.line + 1}", "must be a mapping of `key: value` lines")
    return Document(name, data, builder.lines)


def _check_events(text: str, name: str) -> None:
    """Walk the flat event stream, which needs no recursion, so that `compose` meets only sane nesting."""
    depth = aliases = values = 0
    events: Iterator[yaml.Event] = yaml.parse(text, Loader=_Loader)
    for event in events:
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise YamlError(f"{name}:{line}", f"is nested deeper than {MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
            if aliases > MAX_ALIASES:
                raise YamlError(f"{name}:{line}", f"uses more than {MAX_ALIASES} aliases")
        else:
            values += 1
            if values > 2 * MAX_VALUES:  # a key and a value each
                raise YamlError(f"{name}:{line}", f"holds more than {MAX_VALUES} values")


class _Builder:
    """Nodes → plain data, remembering the line of each key."""

    def __init__(self, name: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._name = name
        self._values = 0
        self._scalars = yaml.SafeLoader("")

    def _refuse(self, node: yaml.Node, text: str) -> YamlError:
        return YamlError(f"{self._name}:{node.start_mark.line + 1}", text)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            place = (*path, key)
            line = key_node.start_mark.line + 1
            if key in found:
                dotted = ".".join(str(part) for part in place)
                raise self._refuse(key_node, f"{dotted} is given twice (first on line {self.lines[place]})")
            self.lines[place] = line
            found[key] = self.value(value_node, place)
        return found

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._refuse(node, "a key must be text, not a list or mapping")
        if node.tag == _TAG + "merge":
            raise self._refuse(node, "merge keys (<<) are not used here: write the values out")
        return str(node.value)

    def value(self, node: yaml.Node, path: KeyPath) -> Any:  # noqa: ANN401 - plain data of any kind
        self._values += 1
        if self._values > MAX_VALUES or len(path) > MAX_DEPTH:
            # An alias's node lies where its anchor is; the key that uses it is the place to look at.
            line = self.lines[path[:1]] if path else 1
            raise YamlError(f"{self._name}:{line}", f"aliases expand this file to more than {MAX_VALUES} values")
        if node.tag in _READ_AS_TEXT:
            return node.value
        if node.tag not in _PLAIN_TAGS:
            raise self._refuse(
                node, f"the tag {node.tag.replace(_TAG, '!!')[:80]} is not allowed: only plain values are"
            )
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                self.lines[*path, index] = item.start_mark.line + 1
                items.append(self.value(item, (*path, index)))
            return items
        return self._scalar(node)

    def _scalar(self, node: yaml.Node) -> Any:  # noqa: ANN401 - plain data of any kind
        if node.tag == _TAG + "int" and not _PLAIN_INT.fullmatch(node.value):
            raise self._refuse(
                node, f"{node.value[:80]} would not be the decimal number it looks like: write it in full"
            )
        try:
            return self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError, KeyError, OverflowError):
            raise self._refuse(node, f"{str(node.value)[:80]!r} can't be read as a value") from None


def _marked(error: yaml.MarkedYAMLError, text: str, name: str) -> YamlError:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    lines = text.splitlines()
    if "\t" in (lines[line - 1] if line <= len(lines) else ""):
        return YamlError(f"{name}:{line}", "holds a tab: YAML is indented with spaces")
    if "single document" in (error.context or ""):
        return YamlError(f"{name}:{line}", "holds a second document (`---`): only one is read")
    return YamlError(f"{name}:{line}", f"is not valid YAML: {error.problem or error.context or 'syntax error'}")


def _line_of(error: yaml.YAMLError, text: str) -> int:
    position = getattr(error, "position", 0)
    return text.count("\n", 0, position if isinstance(position, int) else 0) + 1
