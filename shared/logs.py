"""Structured logs on stderr: JSON lines, or colours on a terminal. Called once by each process's main.

Every line carries `process` and, inside `bind_request`, `request_id`. Libraries that log through the standard library
(uvicorn, asyncio, grpc) come out in the same form. Nothing is logged at info for a request that went well. A trace is
written for unexpected exceptions only (`log.exception(…)`), and never with local variables: they may hold user data.
"""

import contextlib
import logging
import sys
from typing import IO, Any

import msgspec
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from shared.settings import LogSettings

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_QUIET = ("uvicorn.access", "httpx", "httpcore")
"""They log each request; the metrics count them already."""


class _Stream:
    """Stderr that outlives its reader: a closed pipe must not turn every log line into an exception."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def configure(process: str, settings: LogSettings, stream: IO[str] | None = None) -> None:
    """Set up logging of this process. `process` is its stable name, e.g. `gateway` or `pool-0`."""
    target = stream or sys.stderr
    console = settings.format == "console" or (settings.format == "auto" and target.isatty())
    level = _LEVELS[settings.level]

    def add_process(_logger: object, _method: str, event: EventDict) -> EventDict:
        event["process"] = process
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        add_process,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
    ]
    final: list[Processor] = (
        [
            structlog.dev.ConsoleRenderer(
                colors=target.isatty(), exception_formatter=structlog.dev.plain_traceback, timestamp_key="ts"
            )
        ]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]
    )
    output = _Stream(target)
    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=output),  # type: ignore[arg-type]  # it needs write and flush
        cache_logger_on_first_use=True,
    )
    _adopt_standard_logging(level, output, shared, final)


def _adopt_standard_logging(level: int, output: _Stream, shared: list[Processor], final: list[Processor]) -> None:
    remove_meta: Processor = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler: logging.Handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=[*shared, _add_name], processors=[remove_meta, *final])
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries speak at info about their own insides; ours is the say about what an operator reads.
    root.setLevel(max(level, logging.WARNING) if level != logging.DEBUG else level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)


def _add_name(_logger: object, _method: str, event: EventDict) -> EventDict:
    record = event.get("_record")
    if record is not None:
        event["logger"] = record.name
    return event


def _to_json(event: EventDict, **_ignored: object) -> str:
    return msgspec.json.encode(event, enc_hook=str).decode()


class Seldom:
    """One line in `every_s` seconds, and how many were left out: for what may go wrong with every request."""

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._next_s = float("-inf")
        self._left_out = 0

    def due(self, now_s: float) -> int | None:
        """How many were left out since the last line; None: leave this one out, too."""
        if now_s < self._next_s:
            self._left_out += 1
            return None
        left_out, self._left_out, self._next_s = self._left_out, 0, now_s + self._every_s
        return left_out


def get_logger(**context: Any) -> FilteringBoundLogger:  # noqa: ANN401 - any value that has a text form
    """A logger; fields given here go with every line."""
    logger: FilteringBoundLogger = structlog.get_logger(**context)
    return logger


def bind_request(request_id: str) -> contextlib.AbstractContextManager[None]:
    """Inside this block (one asyncio task or thread), every line carries the request's id."""
    return structlog.contextvars.bound_contextvars(request_id=request_id)
