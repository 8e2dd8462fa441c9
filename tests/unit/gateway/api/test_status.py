import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st

from gateway.api import status
from shared.errors import (
    BY_CODE,
    Code,
    Draining,
    HeadraceError,
    InvalidInput,
    NotReady,
    Overloaded,
    ProcessLost,
    TooLarge,
)


def trailers(error: HeadraceError) -> dict[str, str | bytes]:
    return dict(status.error_trailers(error, status.sentence(error)))


def test_every_code_has_a_row_and_no_row_is_left_over() -> None:
    assert set(status.TABLE) == set(Code)


@pytest.mark.parametrize("error_type", BY_CODE.values(), ids=lambda kind: kind.__name__)
def test_every_error_says_its_reason_twice_in_the_trailers(error_type: type[HeadraceError]) -> None:
    found = trailers(error_type("a sentence"))

    details = Status.FromString(bytes(found["grpc-status-details-bin"]))  # type: ignore[arg-type]  # bytes by its name
    info = ErrorInfo()
    assert details.details[0].Unpack(info)
    assert info.reason == found["error-reason"] == error_type.code.value
    assert details.code == status.TABLE[error_type.code].grpc.value[0]
    assert details.message == "a sentence"


@pytest.mark.parametrize("error_type", [Overloaded, NotReady, ProcessLost, Draining])
def test_a_refusal_that_may_be_retried_always_carries_a_hint(error_type: type[HeadraceError]) -> None:
    found = trailers(error_type("no room"))

    assert int(str(found["grpc-retry-pushback-ms"])) > 0


def test_the_errors_own_hint_goes_before_the_tables() -> None:
    found = trailers(Overloaded("no room", retry_after_ms=7))

    details = Status.FromString(bytes(found["grpc-status-details-bin"]))  # type: ignore[arg-type]  # bytes by its name
    retry = RetryInfo()
    assert details.details[1].Unpack(retry)
    assert found["grpc-retry-pushback-ms"] == "7"
    assert retry.retry_delay.ToMilliseconds() == 7


def test_too_large_forbids_a_retry_although_its_status_is_one_that_clients_retry() -> None:
    assert trailers(TooLarge("too many"))["grpc-retry-pushback-ms"] == "-1"


def test_a_callers_fault_has_no_hint() -> None:
    assert "grpc-retry-pushback-ms" not in trailers(InvalidInput("bad", retry_after_ms=5))


@given(st.text(min_size=0, max_size=5000))
def test_a_sentence_always_fits_the_trailers(text: str) -> None:
    cut = status.sentence(InvalidInput(text))

    assert len(cut.encode(errors="replace")) <= 1500
    assert text.startswith(cut) or "?" in cut


def test_an_error_inside_an_answer_has_the_same_facts() -> None:
    message = status.error_message(Overloaded("no room", retry_after_ms=7))

    assert (message.code, message.message, message.reason, message.retry_after_ms) == (8, "no room", "overloaded", 7)
