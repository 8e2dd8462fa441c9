import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from shared.logs import Seldom, bind_request, configure, get_logger
from shared.settings import LogSettings


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    logging.captureWarnings(capture=False)
    root.handlers[:] = handlers
    root.setLevel(level)


def _lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_carry_process_level_time_and_request() -> None:
    stream = io.StringIO()
    configure("gateway", LogSettings(format="json"), stream)
    log = get_logger(model="m")
    with bind_request("r-1"):
        log.info("taken", rows=3)
    log.warning("odd")
    first, second = _lines(stream)
    assert first["event"] == "taken"
    assert (first["process"], first["level"], first["request_id"]) == ("gateway", "info", "r-1")
    assert (first["model"], first["rows"]) == ("m", 3)
    assert first["ts"].endswith("Z")
    assert "request_id" not in second


def test_what_is_below_the_level_is_not_written() -> None:
    stream = io.StringIO()
    configure("gateway", LogSettings(format="json", level="warning"), stream)
    get_logger().info("no")
    get_logger().error("yes")
    assert [line["event"] for line in _lines(stream)] == ["yes"]


def test_a_trace_is_in_the_log_without_local_variables() -> None:
    secret = "swordfish"  # noqa: S105 - it stands for user data
    for form in ("json", "console"):
        stream = io.StringIO()
        configure("gateway", LogSettings.model_validate({"format": form}), stream)
        try:
            int(secret[:0])
        except ValueError:
            get_logger().exception("failed")
        assert "Traceback" in stream.getvalue()
        assert "swordfish" not in stream.getvalue()


def test_the_standard_library_comes_out_in_the_same_form() -> None:
    stream = io.StringIO()
    configure("worker-0", LogSettings(format="json"), stream)
    logging.getLogger("asyncio").error("task %s", "lost")
    logging.getLogger("uvicorn.access").info("GET /")
    (line,) = _lines(stream)
    assert (line["event"], line["logger"], line["process"]) == ("task lost", "asyncio", "worker-0")


def test_console_on_a_plain_stream_has_no_colour_codes() -> None:
    stream = io.StringIO()
    configure("gateway", LogSettings(format="console"), stream)
    get_logger().info("hello", n=1)
    assert "hello" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_auto_is_json_when_stderr_is_no_terminal() -> None:
    stream = io.StringIO()
    configure("gateway", LogSettings(), stream)
    get_logger().info("hello")
    assert _lines(stream)[0]["event"] == "hello"


def test_a_value_without_json_form_becomes_text() -> None:
    stream = io.StringIO()
    configure("gateway", LogSettings(format="json"), stream)
    get_logger().info("x", error=ValueError("why"), thing=object)
    assert _lines(stream)[0]["error"] == "why"


def test_a_closed_stderr_does_not_raise() -> None:
    stream = io.StringIO()
    configure("gateway", LogSettings(format="json"), stream)
    stream.close()
    get_logger().error("nobody reads this")


def test_of_what_happens_often_few_lines_are_written_and_the_others_counted() -> None:
    seldom = Seldom(every_s=10.0)
    assert [seldom.due(now_s) for now_s in (5.0, 6.0, 14.9, 15.0, 15.1, 40.0)] == [0, None, None, 2, None, 1]
