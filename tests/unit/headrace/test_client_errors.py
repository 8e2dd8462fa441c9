import grpc
import pytest

from gateway.api import status
from headrace import client_errors as errors
from protos.headrace.v1 import inference_pb2 as pb
from shared.errors import BY_CODE, HeadraceError

EXPECTED = {
    "invalid_input": errors.InvalidRequest,
    "invalid_option": errors.InvalidRequest,
    "too_large": errors.TooLarge,
    "unknown_model": errors.NotFound,
    "unknown_version": errors.NotFound,
    "unknown_region": errors.NotFound,
    "unsupported": errors.ServerError,
    "overloaded": errors.Overloaded,
    "deadline_exceeded": errors.DeadlineExceeded,
    "cancelled": errors.Cancelled,
    "not_ready": errors.Unavailable,
    "process_lost": errors.Unavailable,
    "draining": errors.Unavailable,
    "model_disabled": errors.InvalidRequest,
    "conflict": errors.InvalidRequest,
    "nonfinite_output": errors.InvalidRequest,
    "internal": errors.ServerError,
}


@pytest.mark.parametrize("error_type", BY_CODE.values(), ids=lambda kind: kind.__name__)
def test_everything_the_server_can_say_has_its_type_in_a_status_and_in_an_answer(
    error_type: type[HeadraceError],
) -> None:
    said = error_type("a sentence")
    metadata = (("request-id", "r1"), *status.error_trailers(said, "a sentence"))

    heard = errors.from_call(status.TABLE[said.code].grpc, "a sentence", metadata)
    inside = errors.from_message(status.error_message(said), "r1")

    for error in (heard, inside):
        assert type(error) is EXPECTED[said.code.value]
        assert (error.text, str(error), error.reason, error.request_id) == (
            "a sentence",
            "a sentence",
            said.code.value,
            "r1",
        )
        assert error.retry_after_ms == status.retry_after_ms(said)
        assert error.code is status.TABLE[said.code].grpc


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable, "unreachable"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.TooLarge, "too_large"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded, "deadline_exceeded"),
        (grpc.StatusCode.UNIMPLEMENTED, errors.ServerError, "unimplemented"),
    ],
)
def test_what_grpc_itself_says_has_a_type_and_a_reason_too(
    code: grpc.StatusCode, kind: type[errors.InferenceError], reason: str
) -> None:
    error = errors.from_call(code, "details", None)

    assert type(error) is kind
    assert (error.reason, error.retry_after_ms, error.request_id) == (reason, None, "")
    assert "details" in error.text


def test_a_code_from_the_future_is_the_servers_fault() -> None:
    assert type(errors.from_message(pb.Error(code=99, reason="novel"))) is errors.ServerError
