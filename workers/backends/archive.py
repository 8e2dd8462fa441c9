"""What lies in a `torch.export` archive (`.pt2`), read without torch and without running anything of it.

`torch.export.load` of torch 2.13 opens much more than weights: it unpickles tensors of unusual classes, custom objects
and the older formats, gives shapes to `sympify`, which evaluates them, looks functions up by whatever name the file
gives, runs its guards as source text, loads compiled libraries, and where its careful unpickling of the example inputs
fails, it unpickles them carelessly. None of that is needed to serve a network, so a file with any of it is refused
here, before torch sees it. What is left is a graph of torch's own operators over plain tensors; that this list is
complete is what nobody can promise, hence `trust: code`.

Used by workers, and by the command line for what a file declares.
"""

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from workers.backends.base import LoadFailed

SUFFIX = ".pt2"
SAMPLE_INPUTS = "data/sample_inputs/model.pt"
"""A pickle in every archive; `workers.backends.exported` opens it with `weights_only` first."""
MAX_ENTRIES = 100_000
MAX_GRAPH_BYTES = 256 * 1024 * 1024
"""Of the graph and of the lists of weights; a graph of 10,000 operators has some 20 MB."""
_MAX_EXPRESSION = 10_000
"""Characters of one shape; the size of a picture behind ten layers has some hundred."""

_GRAPH = "models/model.json"
_PAYLOADS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_TENSOR = re.compile(r"(?:data/weights/weight_|data/constants/tensor_)\d+")
_OTHERS = re.compile(
    r"archive_format|archive_version|byteorder|\.data/\w+|\.format_version|\.storage_alignment|version"
)
_WORD = r"(?:[A-Za-z0-9]|_(?!_))\w*"
_OPERATOR = re.compile(rf"torch\.ops\.(?!_)\w+\.(?:{_WORD}|__(?:and|or|xor|lshift|rshift)__)(?:\.{_WORD})?")
_SCALAR = re.compile(
    r"_operator\.(?:getitem|add|sub|mul|floordiv|truediv|mod|neg|pow|eq|ne|lt|le|gt|ge|and_|or_|not_)"
    r"|math\.(?:trunc|ceil|floor|sqrt)|torch\.(?:_sym_\w+|sym_\w+)"
)
_NAMES = (
    "Symbol Integer Rational Float Add Mul Pow Max Min Abs Mod PythonMod ModularIndexing FloorDiv CeilDiv CleanDiv "
    "FloorToInt CeilToInt TruncToInt TruncToFloat RoundToInt RoundDecimal ToFloat IntTrueDiv FloatTrueDiv FloatPow "
    "PowByNatural LShift RShift Where Identity And Or Not Equality Unequality LessThan GreaterThan StrictLessThan "
    "StrictGreaterThan positive nonnegative nonzero integer precision True False true false"
)
"""What shapes are computed with, as torch writes it."""
_EXPRESSION = re.compile(
    rf"(?:\b(?:{_NAMES.replace(' ', '|')})\b|\b[suz]\d{{1,9}}\b|\b\d{{1,18}}\b"
    r"|'[suz]\d{1,9}'|'\d{1,18}(?:\.\d{0,18})?'|[-+*/%(),=<>&|~ ])*"
)
_DATATYPES = {1: "UINT8", 2: "INT8", 3: "INT16", 4: "INT32", 5: "INT64", 6: "FP16", 7: "FP32", 8: "FP64", 12: "BOOL"}
"""The archive's numbers of element types → names of the Open Inference Protocol."""


class Declared(NamedTuple):
    """An input or output of the network."""

    name: str
    datatype: str
    """Empty: it is no tensor, or has a type without a name."""
    shape: tuple[int, ...]
    """With the row dimension; -1 is free."""


class Archive(NamedTuple):
    """What a checked file declares."""

    inputs: tuple[Declared, ...]
    outputs: tuple[Declared, ...]


def check(path: Path, told: str) -> Archive:
    """Look at every entry; `told` is how messages call the file. Raises LoadFailed with one sentence."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = _entries(archive, told)
            for name in _PAYLOADS:
                _check_payloads(_json(archive, names, name, told), told)
            return _graph(_json(archive, names, _GRAPH, told), told)
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise LoadFailed(f"{told}: is no torch.export archive ({type(error).__name__})", str(error)[:200]) from None
    except OSError as error:
        raise LoadFailed(f"{told}: can't be read: {error.strerror}") from None


def _entries(archive: zipfile.ZipFile, told: str) -> dict[str, zipfile.ZipInfo]:
    """Name below the archive's one folder → entry; every name is one that a plain archive has."""
    infos = archive.infolist()
    if len(infos) > MAX_ENTRIES:
        raise LoadFailed(f"{told}: has more than {MAX_ENTRIES} entries")
    names: dict[str, zipfile.ZipInfo] = {}
    top = infos[0].filename.partition("/")[0] if infos else ""
    for info in infos:
        folder, _, name = info.filename.partition("/")
        if folder != top or name.lower() in names or info.compress_type != zipfile.ZIP_STORED:
            raise LoadFailed(f"{told}: is not laid out as torch.export.save does it")
        if name not in (_GRAPH, SAMPLE_INPUTS, *_PAYLOADS) and not (_TENSOR.fullmatch(name) or _OTHERS.fullmatch(name)):
            raise LoadFailed(
                f"{told}: holds {name[:100]!a}, which is neither the graph nor a plain tensor: only what "
                "torch.export.save writes for a network of plain tensors is opened"
            )
        names[name.lower()] = info
    return names


def _json(archive: zipfile.ZipFile, names: dict[str, zipfile.ZipInfo], name: str, told: str) -> dict[str, Any]:
    info = names[name]
    if info.file_size > MAX_GRAPH_BYTES:
        raise LoadFailed(f"{told}: {name} is larger than {MAX_GRAPH_BYTES} bytes")
    found = json.loads(archive.read(info))
    if not isinstance(found, dict):
        raise TypeError(name)
    return found


def _check_payloads(payloads: dict[str, Any], told: str) -> None:
    for name, payload in payloads["config"].items():
        place = str(payload["path_name"])
        if payload.get("use_pickle") or not re.fullmatch(r"(?:weight|tensor)_\d+", place):
            raise LoadFailed(f"{told}: {name[:100]!a} is a pickled object: export the network with plain tensors only")


def _graph(program: dict[str, Any], told: str) -> Archive:
    for key, value in _pairs(program):
        if key == "target" and isinstance(value, str) and not (_OPERATOR.fullmatch(value) or _SCALAR.fullmatch(value)):
            raise LoadFailed(f"{told}: calls {value[:100]!a}, which is none of torch's operators")
        if key == "expr_str" and (len(value) > _MAX_EXPRESSION or not _EXPRESSION.fullmatch(value)):
            raise LoadFailed(f"{told}: has a shape that is no plain expression: {value[:100]!a}")
    module = program["graph_module"]
    values, signature = module["graph"]["tensor_values"], module["signature"]
    inputs = [spec["user_input"]["arg"] for spec in signature["input_specs"] if "user_input" in spec]
    outputs = [spec["user_output"]["arg"] for spec in signature["output_specs"] if "user_output" in spec]
    return Archive(*(tuple(_declared(part, values) for part in parts) for parts in (inputs, outputs)))


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - JSON
    """Every key of every object, however deep; the parser has bounded the depth."""
    todo = [value]
    while todo:
        found = todo.pop()
        if isinstance(found, dict):
            yield from found.items()
            todo.extend(found.values())
        elif isinstance(found, list):
            todo.extend(found)


def _declared(part: dict[str, Any], values: dict[str, Any]) -> Declared:
    name = str(part.get("as_tensor", {}).get("name", ""))
    if not name:
        return Declared("", "", ())
    meta = values[name]
    shape = tuple(size.get("as_int", -1) for size in meta["sizes"])
    return Declared(name, _DATATYPES.get(meta["dtype"], ""), shape)
