from typing import Any

import pytest
from structlog.testing import capture_logs

from preprocess_pool.failures import Traces, describe, fault_of_input, refusal
from shared.errors import ExitCode, InternalFault, InvalidInput, StartupError
from shared.messages import Failure


class Clock:
    """Moves when a test says so."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def traces(clock: Clock) -> Traces:
    return Traces("cats", clock)


def told(lines: list[Any]) -> list[tuple[str, int]]:
    return [(line["event"], line["left_out"]) for line in lines if isinstance(line["exc_info"], Exception)]


def test_a_pipeline_that_raises_on_every_image_writes_one_trace_in_some_seconds(traces: Traces, clock: Clock) -> None:
    with capture_logs() as lines:
        for _ in range(1000):
            assert isinstance(fault_of_input(ValueError("a bug"), "image", traces), InvalidInput)
        clock.now_s += 60
        fault_of_input(ValueError("a bug"), "image", traces)
    assert told(lines) == [("preprocess failed over an image", 0), ("preprocess failed over an image", 999)]
    assert {line["model"] for line in lines} == {"cats"}


def test_each_hook_has_its_own_traces_and_every_failure_its_answer(traces: Traces) -> None:
    with capture_logs() as lines:
        answers = [describe(KeyError("x"), stage, traces) for stage in ("prepare", "prepare", "finish")]
    assert answers == [Failure("internal", InternalFault.TEXT)] * 3
    assert told(lines) == [("a pipeline's prepare hook failed", 0), ("a pipeline's finish hook failed", 0)]


def test_what_was_foreseen_leaves_no_trace(traces: Traces) -> None:
    with capture_logs() as lines:
        assert describe(InvalidInput("too short"), "prepare", traces) == Failure("invalid_input", "too short")
        assert refusal(StartupError(ExitCode.MODEL_LOAD, "no labels"), traces) == Failure("not_ready", "no labels")
        assert fault_of_input(ValueError("a bug"), "text", traces) is None
        assert fault_of_input(MemoryError(), "image", traces) is not None
    assert lines == []
