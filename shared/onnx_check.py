"""What an ONNX file declares, and which other files it names. Refuses those that lead out of the version's folder.

An ONNX file may say that a tensor's bytes lie in another file. Runtimes open that file as the server's user, so a model
could read any file there is and answer with it. Here every place where a tensor can stand is looked at: initialisers,
sparse ones, attributes of nodes, graphs inside nodes, functions, training graphs. A location must be the plain name of
one of the version's own files, which the content hash covers; `Repository.verify` has refused links by then.

Used by workers before a file is opened, and by the command line before it is stored. Needs neither `onnx`, which has
been wrong about this more than once, nor a runtime.
"""

import mmap
import re
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from shared.model_config import RepositoryError
from shared.onnx_wire import BYTES, VARINT, Field, Malformed, Walk, text

SUFFIX = ".onnx"
MAX_TENSORS = 256
"""Inputs or outputs that a file may declare; a pipeline may have 64."""
MAX_RANK = 32

DATATYPES = {
    1: "FP32",
    2: "UINT8",
    3: "INT8",
    4: "UINT16",
    5: "INT16",
    6: "INT32",
    7: "INT64",
    8: "BYTES",
    9: "BOOL",
    10: "FP16",
    11: "FP64",
    12: "UINT32",
    13: "UINT64",
    16: "BF16",
}
"""ONNX's numbers of element types → names of the Open Inference Protocol; the others have none."""

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_EXTERNAL = 1
"""`data_location` of a tensor that lies in another file."""


class OnnxTensor(msgspec.Struct, frozen=True):
    """An input or output of the network."""

    name: str
    datatype: str
    """A name of the Open Inference Protocol, or empty: it has none, or is no tensor."""
    shape: tuple[int, ...] | None
    """With the row dimension; -1 is free. None: the file does not say."""


class OnnxFile(msgspec.Struct, frozen=True):
    """The facts of one file."""

    inputs: tuple[OnnxTensor, ...]
    """Without those that only give a weight its shape."""
    outputs: tuple[OnnxTensor, ...]
    external: tuple[str, ...]
    """Names of the files that hold weights, sorted. Checked for their form only."""


def check(path: Path, names: Collection[str], told: str) -> OnnxFile:
    """Read a file that is to be opened by a runtime; `names`: the files of its version, which lie in its folder.

    `told` is how messages call it. Raises RepositoryError when it is no ONNX file, or names any other file, a link, or
    a file that has a second name.
    """
    found = read(path, told)
    for name in found.external:
        if name not in names:
            raise RepositoryError(f"{told}: keeps weights in {name}, which is none of the version's files")
        status = (path.parent / name).lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise RepositoryError(f"{told}: keeps weights in {name}, which is a link or no plain file")
    return found


def read(path: Path, told: str) -> OnnxFile:
    """What a file declares. Raises RepositoryError, also where it names a file by anything but a plain name."""
    try:
        with path.open("rb") as file:
            # Unmapped when the last view of it is gone: an exception holds some for as long as it is handled.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _Reader(told).model(memoryview(mapped))
    except ValueError:  # an empty file can't be mapped
        raise RepositoryError(f"{told}: is empty") from None
    except OSError as error:
        raise RepositoryError(f"{told}: can't be read: {error.strerror}") from None
    except Malformed as error:
        raise RepositoryError(f"{told}: is no ONNX file: {error}") from None


class _Graph(NamedTuple):
    """Field numbers are those of onnx.proto; they never change."""

    inputs: list[OnnxTensor]
    outputs: list[OnnxTensor]
    weights: set[str]


class _Reader:
    """One walk over one file. Every method takes a message and how deep it lies."""

    def __init__(self, told: str) -> None:
        self._told = told
        self._walk = Walk()
        self._external: set[str] = set()

    def model(self, message: memoryview) -> OnnxFile:
        """ModelProto. A graph that is given twice is one to protobuf: both are looked at."""
        graph = _Graph([], [], set())
        seen = False
        for field in self._parts(message, 0):
            if field.number == 7:
                seen = True
                self._graph(field.data, 1, graph)
            elif field.number == 20:  # training_info
                for part in self._parts(field.data, 1):
                    self._graph(part.data, 2)
            elif field.number == 25:  # functions
                self._function(field.data, 1)
        if not seen:
            raise Malformed("it holds no graph")
        inputs = tuple(tensor for tensor in graph.inputs if tensor.name not in graph.weights)
        return OnnxFile(inputs, tuple(graph.outputs), tuple(sorted(self._external)))

    def _parts(self, message: memoryview, depth: int) -> Iterator[Field]:
        """The fields that hold messages or strings."""
        return (field for field in self._walk.fields(message, depth) if field.kind == BYTES)

    def _graph(self, message: memoryview, depth: int, into: _Graph | None = None) -> None:
        for field in self._parts(message, depth):
            match field.number:
                case 1:
                    self._node(field.data, depth + 1)
                case 5:
                    name = self._tensor(field.data, depth + 1)
                    if into is not None:
                        into.weights.add(name)
                case 15:
                    name = self._sparse(field.data, depth + 1)
                    if into is not None:
                        into.weights.add(name)
                case 11 | 12 if into is not None:
                    there = into.inputs if field.number == 11 else into.outputs
                    there.append(self._value(field.data, depth + 1))
                    if len(there) > MAX_TENSORS + len(into.weights):  # old files list their weights as inputs, too
                        raise Malformed(f"it declares more than {MAX_TENSORS} inputs or outputs")

    def _function(self, message: memoryview, depth: int) -> None:
        for field in self._parts(message, depth):
            if field.number == 7:
                self._node(field.data, depth + 1)
            elif field.number == 11:  # attribute_proto: attributes with defaults
                self._attribute(field.data, depth + 1)

    def _node(self, message: memoryview, depth: int) -> None:
        for field in self._parts(message, depth):
            if field.number == 5:
                self._attribute(field.data, depth + 1)
            elif field.number == 4 and bytes(field.data[:16]) == b"EPContext":
                raise RepositoryError(f"{self._told}: holds a node EPContext, which loads compiled code: refused")

    def _attribute(self, message: memoryview, depth: int) -> None:
        for field in self._parts(message, depth):
            match field.number:
                case 5 | 10:
                    self._tensor(field.data, depth + 1)
                case 6 | 11:
                    self._graph(field.data, depth + 1)
                case 22 | 23:
                    self._sparse(field.data, depth + 1)

    def _sparse(self, message: memoryview, depth: int) -> str:
        """SparseTensorProto: values, which carry its name, and indices."""
        name = ""
        for field in self._parts(message, depth):
            if field.number in (1, 2):
                found = self._tensor(field.data, depth + 1)
                name = found if field.number == 1 else name
        return name

    def _tensor(self, message: memoryview, depth: int) -> str:
        """TensorProto; its name. Both signs of external data count by themselves: runtimes differ in what they ask."""
        name, outside = "", False
        locations: list[str] = []
        for field in self._walk.fields(message, depth):
            if field.number == 8 and field.kind == BYTES:
                name = text(field.data)
            elif field.number == 13 and field.kind == BYTES:
                outside = True
                locations += self._location(field.data, depth + 1)
            elif field.number == 14 and field.kind == VARINT:
                outside |= field.value & 0xFFFF_FFFF == _EXTERNAL  # protobuf keeps so much of an enumeration
        if outside and not locations:
            raise RepositoryError(f"{self._told}: weight {name[:100]!r} lies in another file, but no file is named")
        for location in locations:
            if not _PLAIN.fullmatch(location) or ".." in location:
                raise RepositoryError(
                    f"{self._told}: weight {name[:100]!r} lies in {location[:100]!r}: only the plain name of a file "
                    "beside it is allowed"
                )
        self._external.update(locations)
        return name

    def _location(self, message: memoryview, depth: int) -> list[str]:
        """StringStringEntryProto: its value where the key is `location`."""
        key, value = "", ""
        for field in self._parts(message, depth):
            if field.number == 1:
                key = text(field.data)
            elif field.number == 2:
                value = text(field.data, 5000)
        return [value] if key == "location" else []

    def _value(self, message: memoryview, depth: int) -> OnnxTensor:
        """ValueInfoProto → TypeProto → TypeProto.Tensor."""
        name, datatype = "", ""
        shape: tuple[int, ...] | None = None
        for field in self._parts(message, depth):
            if field.number == 1:
                name = text(field.data)
            elif field.number == 2:
                for kind in self._parts(field.data, depth + 1):
                    if kind.number == 1:
                        datatype, shape = self._tensor_type(kind.data, depth + 2)
        return OnnxTensor(name, datatype, shape)

    def _tensor_type(self, message: memoryview, depth: int) -> tuple[str, tuple[int, ...] | None]:
        datatype = ""
        shape: tuple[int, ...] | None = None
        for field in self._walk.fields(message, depth):
            if field.number == 1 and field.kind == VARINT:
                datatype = DATATYPES.get(field.value, "")
            elif field.number == 2 and field.kind == BYTES:
                dimensions = [part for part in self._parts(field.data, depth + 1) if part.number == 1]
                if len(dimensions) > MAX_RANK:
                    raise Malformed(f"it declares a tensor of more than {MAX_RANK} dimensions")
                shape = tuple(self._dimension(part.data, depth + 2) for part in dimensions)
        return datatype, shape

    def _dimension(self, message: memoryview, depth: int) -> int:
        for field in self._walk.fields(message, depth):
            if field.number == 1 and field.kind == VARINT and 0 < field.value < 2**62:
                return field.value
        return -1
