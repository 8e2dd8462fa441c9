"""What the two clients share: requests, retries, channel options. No input or output of its own but reading files."""

import errno
import ipaddress
import os
import random
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import grpc

from headrace.client_errors import InferenceError
from headrace.client_results import File, Tensors, Text
from protos.headrace.v1 import inference_pb2 as pb

DEFAULT_ADDRESS = "127.0.0.1:8001"
DEFAULT_TIMEOUT_S = 30.0
MAX_ATTEMPTS = 4
"""Of one call, the first one included."""
DETECTION, EMBEDDING, ENTITIES = "object_detection", "text_embedding", "token_classification"
"""The tasks that are meant where no model is named."""
IN_FLIGHT = 16
"""Requests of one stream on their way at a time: two per batch of a usual size, and little memory."""
MAX_IMAGE_BYTES = 256 * 1024 * 1024
"""Of one file: far above what servers take, and still a bound on this side for a pipe that never ends."""

Image: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview
"""A file's path, or the encoded image itself."""
Input: TypeAlias = Image | Text | File | Tensors


class DetectOptions(TypedDict, total=False):
    """What a request for boxes may say; left out or None: the model's default."""

    score_threshold: float | None
    """Boxes with a lower score are left out, 0..1."""
    iou_threshold: float | None
    """Of two boxes of one class that overlap by more (intersection over union), the better one stays, 0..1."""
    max_detections: int | None
    """The best so many boxes, 1 or more."""
    classes: Sequence[str] | None
    """Only boxes of these classes, by name."""


class TextOptions(TypedDict, total=False):
    """What a request for classes of a text, or entities in it, may say; left out or None: the model's default."""

    score_threshold: float | None
    """Classes or entities with a lower score are left out, 0..1."""
    truncate: bool | None
    """Whether the end of a text that is too long is left out; else it is refused."""


class EmbedOptions(TypedDict, total=False):
    """What a request for a vector may say; left out or None: the model's default."""

    truncate: bool | None
    """As of TextOptions."""
    normalize: bool | None
    """Whether the vector is brought to length 1."""


def read_image(image: Image) -> bytes:
    """The encoded bytes; reads the file or pipe when a path is given. Raises OSError, also for over 256 MiB."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    mode = Path(image).stat().st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise OSError(errno.EINVAL, "it is a device, not a file", os.fspath(image))
    with Path(image).open("rb") as file:
        size = os.fstat(file.fileno()).st_size  # 0 for a pipe
        data = b"" if size > MAX_IMAGE_BYTES else file.read(size or MAX_IMAGE_BYTES + 1)
    if max(size, len(data)) > MAX_IMAGE_BYTES:
        raise OSError(errno.EFBIG, f"it has over {MAX_IMAGE_BYTES >> 20} MiB, too much for one input", os.fspath(image))
    return data


def wire_input(given: Input) -> pb.Input:
    """One input as a message. Raises OSError for a file that can't be read."""
    if isinstance(given, Text):
        return pb.Input(text=given.text)
    if isinstance(given, File):
        return pb.Input(file=read_image(given.data))
    if isinstance(given, Tensors):
        tensors = (
            pb.Tensor(name=one.name, datatype=one.datatype, shape=one.shape, data=one.data) for one in given.tensors
        )
        return pb.Input(tensors=pb.TensorList(tensors=tensors))
    return pb.Input(image=read_image(given))


def classification_of(given: Input) -> str:
    """The task that is meant where no model is named: which classification takes such an input."""
    kind = "text" if isinstance(given, Text) else "file" if isinstance(given, File) else "image"
    return f"{kind}_classification"


def wire_request(inputs: Iterable[Input], options: Mapping[str, Any], **fields: Any) -> pb.PredictRequest:  # noqa: ANN401 - protobuf checks each field
    """A request as a message. Raises ValueError or TypeError for an option that the contract does not have."""
    set_options = {name: value for name, value in options.items() if value is not None}
    message = pb.PredictRequest(inputs=[wire_input(one) for one in inputs], **fields)
    if set_options:
        message.options.CopyFrom(pb.Options(**set_options))
    return message


def timeout_ms(timeout_s: float) -> int:
    """For `PredictStreamRequest.timeout_ms`: at least 1, for 0 would mean the server's default."""
    return max(1, int(timeout_s * 1e3))


def retry_wait_s(error: InferenceError, attempt: int, max_attempts: int, left_s: float) -> float | None:
    """Seconds to wait before the next try, or None: give up.

    Only UNAVAILABLE, only when the server names a time, only while time and attempts are left. The wait is spread over
    a quarter more, so that callers who were refused together do not come back together.
    """
    if error.code is not grpc.StatusCode.UNAVAILABLE or error.retry_after_ms is None or attempt >= max_attempts:
        return None
    wait_s = error.retry_after_ms / 1e3 * random.uniform(1.0, 1.25)  # noqa: S311 - spreads load, keeps no secret
    return wait_s if wait_s < left_s else None


def channel_options(address: str) -> list[tuple[str, int]]:
    """GRPC's options for a client's channel."""
    options = [
        ("grpc.max_receive_message_length", -1),  # answers are the server's to bound
        # A server that vanished is noticed while calls run; the server allows a ping every 5 s.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # A connection of its own for each client: of several gateways on one port each connection reaches only one.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if _is_loopback(address):
        options.append(("grpc.enable_http_proxy", 0))  # a proxy can't reach this machine's own loopback
    return options


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost" or address.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
