"""What the client raises: one type a cause, with the server's machine-readable facts."""

from collections.abc import Iterable
from typing import Any

import grpc

from protos.headrace.v1 import inference_pb2 as pb

_REASON = "error-reason"
_PUSHBACK = "grpc-retry-pushback-ms"
_REQUEST_ID = "request-id"

Trailers = dict[str, str]


class InferenceError(Exception):
    """Base of all failures of a call."""

    def __init__(
        self,
        text: str,
        *,
        code: grpc.StatusCode,
        reason: str,
        retry_after_ms: int | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(text)
        self.text = text
        """One sentence from the server."""
        self.code = code
        self.reason = reason
        """Machine-readable cause, e.g. `invalid_input`; `unreachable` when no server answered."""
        self.retry_after_ms = retry_after_ms
        """Milliseconds that the server asks to wait before a retry; None: a retry can't help, or nobody said."""
        self.request_id = request_id
        """Finds the call in the server's log; empty when the call did not get that far."""


class WrongTask(TypeError):
    """The model answers something else than the method returns: it has another task."""

    def __init__(self, model: str, answers: str, wanted: str) -> None:
        super().__init__(f"model {model} answers {answers}, not {wanted}; use predict()")
        self.model = model
        self.answers = answers
        """What it answers, by the name of its type."""
        self.wanted = wanted


class InvalidRequest(InferenceError):
    """The request can't succeed as it is: undecodable input, wrong option, …"""


class TooLarge(InvalidRequest):
    """The message or one of its parts is over a limit of the server."""


class NotFound(InferenceError):
    """No such model or version."""


class Overloaded(InferenceError):
    """The server has no room now."""


class Unavailable(InferenceError):
    """Nobody answers, or the server is starting or stopping. Safe to retry."""


class DeadlineExceeded(InferenceError):
    """The time limit passed first."""


class Cancelled(InferenceError):
    """The call was cancelled."""


class ServerError(InferenceError):
    """A fault of the server."""


_BY_CODE: dict[grpc.StatusCode, type[InferenceError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}

_NUMBERS = {code.value[0]: code for code in grpc.StatusCode}

_WITHOUT_REASON = {
    # No word of ours in the trailers: gRPC itself answered, at the server's door or on this side of the network.
    grpc.StatusCode.UNAVAILABLE: ("unreachable", "no server answers: {}"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: ("too_large", "{}; the server's setting is gateway.max_message_bytes"),
}


def trailers_of(metadata: Iterable[Any] | None) -> Trailers:
    """Textual trailing metadata by name."""
    return {str(key): value for key, value in metadata or () if isinstance(value, str)}


def from_call(code: grpc.StatusCode, details: str | None, metadata: Iterable[Any] | None) -> InferenceError:
    """A failed call's status as its exception."""
    trailers = trailers_of(metadata)
    reason, text = trailers.get(_REASON, ""), "{}"
    if not reason:
        reason, text = _WITHOUT_REASON.get(code, (code.name.lower(), text))
    pushback = trailers.get(_PUSHBACK, "")
    return _type_of(code, reason)(
        text.format(details or code.name),
        code=code,
        reason=reason,
        retry_after_ms=int(pushback) if pushback.isdecimal() else None,  # a negative one means: don't
        request_id=trailers.get(_REQUEST_ID, ""),
    )


def from_message(error: pb.Error, request_id: str = "") -> InferenceError:
    """A failure inside an answer as the same exception."""
    code = _NUMBERS.get(error.code, grpc.StatusCode.UNKNOWN)
    return _type_of(code, error.reason)(
        error.message,
        code=code,
        reason=error.reason,
        retry_after_ms=error.retry_after_ms or None,
        request_id=request_id,
    )


def _type_of(code: grpc.StatusCode, reason: str) -> type[InferenceError]:
    return TooLarge if reason == "too_large" else _BY_CODE.get(code, ServerError)
