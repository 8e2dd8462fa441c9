"""The one table from error code to gRPC and HTTP status, and a failure's form on the wire. Used by the edge only."""

from typing import NamedTuple

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from protos.headrace.v1 import inference_pb2 as pb
from shared.errors import Code, HeadraceError

Trailers = tuple[tuple[str, str | bytes], ...]
"""Trailing metadata of a call."""

REQUEST_ID = "request-id"
SERVER_TIMING = "server-timing"
REASON = "error-reason"
"""The words of ErrorInfo.reason once more, for clients that have no google.rpc messages at hand."""
PUSHBACK = "grpc-retry-pushback-ms"
DETAILS = "grpc-status-details-bin"

DOMAIN = "headrace"
_TEXT_BYTES = 1500  # twice in the trailers, percent-encoded and base64: must stay below gRPC's 8 KB


class Row(NamedTuple):
    """One row of the table."""

    grpc: grpc.StatusCode
    http: int
    retry_after_ms: int | None = None
    """Hint when the error itself carries none; None: a retry of the same request can't help."""


_S = grpc.StatusCode
TABLE: dict[Code, Row] = {
    Code.INVALID_INPUT: Row(_S.INVALID_ARGUMENT, 400),
    Code.INVALID_OPTION: Row(_S.INVALID_ARGUMENT, 400),
    Code.TOO_LARGE: Row(_S.RESOURCE_EXHAUSTED, 413),
    Code.UNKNOWN_MODEL: Row(_S.NOT_FOUND, 404),
    Code.UNKNOWN_VERSION: Row(_S.NOT_FOUND, 404),
    Code.UNKNOWN_REGION: Row(_S.NOT_FOUND, 404),
    Code.UNSUPPORTED: Row(_S.UNIMPLEMENTED, 501),
    Code.OVERLOADED: Row(_S.RESOURCE_EXHAUSTED, 429, 100),
    Code.DEADLINE_EXCEEDED: Row(_S.DEADLINE_EXCEEDED, 504),
    Code.CANCELLED: Row(_S.CANCELLED, 499),
    Code.NOT_READY: Row(_S.UNAVAILABLE, 503, 1000),
    Code.PROCESS_LOST: Row(_S.UNAVAILABLE, 503, 100),
    Code.DRAINING: Row(_S.UNAVAILABLE, 503, 500),
    Code.MODEL_DISABLED: Row(_S.FAILED_PRECONDITION, 409),
    Code.CONFLICT: Row(_S.FAILED_PRECONDITION, 409),
    Code.NONFINITE_OUTPUT: Row(_S.FAILED_PRECONDITION, 422),
    Code.INTERNAL: Row(_S.INTERNAL, 500),
}

_RETRYABLE = (_S.RESOURCE_EXHAUSTED, _S.UNAVAILABLE)


def _packed(message: ErrorInfo | RetryInfo) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


_ERROR_INFO = {code: _packed(ErrorInfo(reason=code.value, domain=DOMAIN)) for code in Code}


def retry_after_ms(error: HeadraceError) -> int | None:
    """Milliseconds to wait before a retry; None when a retry can't help."""
    row = TABLE[error.code]
    if row.retry_after_ms is None or error.retry_after_ms is None:
        return row.retry_after_ms
    return max(0, error.retry_after_ms)


def bare(error: HeadraceError) -> HeadraceError:
    """The same failure without what led to it.

    Its trace holds the frames of the call, and with them the message. One of them holds the failure: a ring that would
    wait for the garbage collector.
    """
    error.__cause__ = error.__context__ = error.__traceback__ = None
    return error


def sentence(error: HeadraceError) -> str:
    """The error's text, cut so that the trailers always fit; gRPC would replace the status otherwise."""
    text = error.text
    if len(text) * 4 <= _TEXT_BYTES:
        return text
    return text.encode(errors="replace")[:_TEXT_BYTES].decode(errors="ignore")


def error_trailers(error: HeadraceError, text: str) -> Trailers:
    """Machine-readable facts of a failed call; `text` is the status message that goes with them."""
    row, wait_ms = TABLE[error.code], retry_after_ms(error)
    details = [_ERROR_INFO[error.code]]
    trailers: list[tuple[str, str | bytes]] = [(REASON, error.code.value)]
    if wait_ms is not None:
        retry = RetryInfo()
        retry.retry_delay.FromMilliseconds(wait_ms)
        details.append(_packed(retry))
        trailers.append((PUSHBACK, str(wait_ms)))
    elif row.grpc in _RETRYABLE:
        trailers.append((PUSHBACK, "-1"))  # gRPC's word for: do not retry, whatever your retry policy says
    status = Status(code=row.grpc.value[0], message=text, details=details)
    trailers.append((DETAILS, status.SerializeToString()))
    return tuple(trailers)


def error_message(error: HeadraceError) -> pb.Error:
    """The same facts inside an answer."""
    return pb.Error(
        code=TABLE[error.code].grpc.value[0],
        message=sentence(error),
        reason=error.code.value,
        retry_after_ms=retry_after_ms(error) or 0,
    )
