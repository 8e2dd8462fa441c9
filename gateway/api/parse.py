"""Protobuf → `gateway.request.Request`: everything a caller can get wrong is refused here, with a sentence.

Each sentence names the field, the limit and the setting. Text that comes from the caller is cut to 100 characters.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from gateway.api import elements
from gateway.api.elements import Allowance
from protos.headrace.v1 import inference_pb2 as pb
from shared.errors import HeadraceError, InvalidInput, TooLarge, UnknownVersion
from shared.pipeline import RawInput
from shared.settings import AdmissionSettings
from shared.tensors import DTYPES, RawTensor

_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VERSION = re.compile(r"[0-9a-f]{16}")
_TASK = re.compile(r"[a-z0-9_]{0,128}")
_PRINTABLE = re.compile(r"[ -~]{0,128}")

_SENTENCE_CHARS = 300
"""Of a decoder's message."""
MAX_TENSORS = 64
"""Tensors of one input; no model of ours takes more, and each costs the gateway time."""
MAX_KEY_CHARS = 256
"""Of a routing key, which is hashed with every request: room for an e-mail address or a UUID."""
ROLES = ("system", "user", "assistant")
"""Who speaks in a conversation."""
MAX_MESSAGES = 256
"""Of a conversation; more than any context of the models that this serves has room for."""
MAX_RANK = 16
"""Dimensions of a tensor; bounds the product before it is computed."""


def shown(text: str) -> str:
    """A caller's text for a sentence: quoted, escaped to ASCII, cut to 100 characters."""
    escaped = ascii(text[:101])
    return escaped if len(escaped) <= 102 and len(text) <= 100 else f"{escaped[:100]}…'"


def sentence(error: Exception) -> str:
    """A decoder's message in the middle of a sentence of ours, cut."""
    text = str(error)[:_SENTENCE_CHARS].replace("`", "'").removeprefix("JSON is malformed: ")
    return f"{text[:1].lower()}{text[1:]}"


def check_model(name: str, version: str) -> None:
    """Raises InvalidInput, or UnknownVersion for what can't be one."""
    if name and (not _MODEL.fullmatch(name) or ".." in name):
        raise InvalidInput(
            f"model is {shown(name)}: a name has 1..128 characters of A-Z a-z 0-9 . _ -, starts with a letter or digit "
            "and has no two dots in a row"
        )
    if version and not _VERSION.fullmatch(version):
        raise UnknownVersion(f"version is {shown(version)}: a version is 16 lower-case hexadecimal digits")


def check_task(task: str) -> None:
    """Raises InvalidInput."""
    if not _TASK.fullmatch(task):
        raise InvalidInput(f"task is {shown(task)}: it has 0..128 characters of a-z 0-9 _, such as object_detection")


def check_request_id(request_id: str) -> None:
    """Raises InvalidInput."""
    if not _PRINTABLE.fullmatch(request_id):
        raise InvalidInput(f"request_id is {shown(request_id)}: it has 0..128 printable ASCII characters")


def check_routing_key(key: str) -> None:
    """Raises InvalidInput."""
    if len(key) > MAX_KEY_CHARS:
        raise InvalidInput(f"routing_key has {len(key)} characters; at most {MAX_KEY_CHARS} are allowed")


def may_reuse(cache: str) -> bool:
    """What a request says of the caches: `bypass`, or nothing. Raises InvalidInput."""
    if cache not in {"", "bypass"}:
        raise InvalidInput(f"cache is {shown(cache)}; it takes bypass, or nothing")
    return not cache


NO_IMAGES: Mapping[int, memoryview] = {}


class Inputs(NamedTuple):
    """What a request brings."""

    inputs: list[RawInput]
    nbytes: int
    """Payload bytes."""
    unreadable: dict[int, HeadraceError]
    """By index; `inputs` has an empty input there."""


def raw_inputs(
    request: pb.PredictRequest, limits: AdmissionSettings, images: Mapping[int, memoryview] = NO_IMAGES
) -> Inputs:
    """The inputs; with `partial_results` also those that can't be read. `images`: by index, those kept out of protobuf.

    Raises InvalidInput naming the input, TooLarge naming the setting.
    """
    count = len(request.inputs)
    if not count:
        raise InvalidInput(
            f"inputs is empty; a request has 1..{limits.max_inputs_per_request} inputs "
            "(admission.max_inputs_per_request)"
        )
    if count > limits.max_inputs_per_request:
        raise TooLarge(
            f"inputs has {count} entries; the limit is {limits.max_inputs_per_request} "
            "(admission.max_inputs_per_request)"
        )
    found: list[RawInput] = []
    unreadable: dict[int, HeadraceError] = {}
    nbytes, allowance = 0, Allowance()
    for index, given in enumerate(request.inputs):
        try:
            raw, size = _raw_input(given, index, allowance, images.get(index))
        except InvalidInput as error:
            if not request.partial_results or count == 1:
                raise
            unreadable[index] = error
            raw, size = RawInput(kind="image"), 0
        found.append(raw)
        nbytes += size
    return Inputs(found, nbytes, unreadable)


def options(request: pb.PredictRequest | pb.GenerateRequest) -> dict[str, Any]:
    """Options that the caller has set, by name; the model's pipeline knows their bounds."""
    if not request.HasField("options"):
        return {}
    return {field.name: list(value) if field.is_repeated else value for field, value in request.options.ListFields()}


def _raw_input(given: pb.Input, index: int, allowance: Allowance, image: memoryview | None) -> tuple[RawInput, int]:
    kind = given.WhichOneof("kind")
    data: bytes | memoryview
    if kind == "image":
        data = given.image if image is None else image
    elif kind == "text":
        data = given.text.encode()
    elif kind == "file":
        data = given.file
    elif kind == "chat":
        data = chat(given.chat, f"inputs[{index}].chat")
    elif kind == "tensors":
        return _tensors(given.tensors, index, allowance)
    else:
        raise InvalidInput(f"inputs[{index}] is empty; set one of image, text, tensors, file or chat")
    if not data:
        raise InvalidInput(f"inputs[{index}].{kind} has 0 bytes; at least 1 is needed")
    return RawInput(kind=kind, data=data), len(data)


def chat(given: pb.Chat, where: str) -> bytes:
    """A conversation in the form that pipelines take. Raises InvalidInput."""
    count = len(given.messages)
    if not 1 <= count <= MAX_MESSAGES:
        raise InvalidInput(f"{where}.messages has {count} entries; a conversation has 1..{MAX_MESSAGES}")
    for number, message in enumerate(given.messages):
        if message.role not in ROLES:
            raise InvalidInput(f"{where}.messages[{number}].role is {shown(message.role)}; known: {', '.join(ROLES)}")
    return msgspec.json.encode([(message.role, message.content) for message in given.messages])


def _tensors(given: pb.TensorList, index: int, allowance: Allowance) -> tuple[RawInput, int]:
    count = len(given.tensors)
    if not 1 <= count <= MAX_TENSORS:
        raise InvalidInput(f"inputs[{index}].tensors has {count} tensors; an input has 1..{MAX_TENSORS}")
    names: set[str] = set()
    tensors: list[RawTensor] = []
    nbytes = 0
    for number, one in enumerate(given.tensors):
        tensor, size = _tensor(one, f"inputs[{index}].tensors[{number}]", allowance)
        if tensor.name in names:
            raise InvalidInput(f"inputs[{index}].tensors has the name {shown(tensor.name)} twice")
        names.add(tensor.name)
        tensors.append(tensor)
        nbytes += size
    return RawInput(kind="tensors", tensors=tuple(tensors)), nbytes


def _tensor(given: pb.Tensor, where: str, allowance: Allowance) -> tuple[RawTensor, int]:
    if not _MODEL.fullmatch(given.name):
        raise InvalidInput(
            f"{where}.name is {shown(given.name)}: a name has 1..128 characters of A-Z a-z 0-9 . _ - "
            "and starts with a letter or digit"
        )
    dtype = DTYPES.get(given.datatype)
    if dtype is None:
        raise InvalidInput(f"{where}.datatype is {shown(given.datatype)}; known: {', '.join(DTYPES)}")
    if not 1 <= len(given.shape) <= MAX_RANK:
        raise InvalidInput(f"{where}.shape has {len(given.shape)} dimensions; allowed are 1..{MAX_RANK}")
    shape = tuple(given.shape)
    if min(shape) < 0:
        raise InvalidInput(f"{where}.shape is {list(shape)}; no dimension may be negative")
    data = given.data
    count = math.prod(shape)
    expected = count * dtype.itemsize
    if given.datatype == "BYTES":
        allowance.take(where, count)
        elements.check(f"{where}.data", data, count)
    elif len(data) != expected:
        raise InvalidInput(f"{where}.data has {len(data)} bytes; {given.datatype} {list(shape)} needs {expected}")
    return RawTensor(given.name, given.datatype, shape, data), len(data)
