"""Every way a request can fail, as types; used by all processes.

An error has a `code` (a closed set, mapped to gRPC and HTTP status in `gateway/api/status.py`) and one sentence for
the caller. The sentence names the field, the limit and the setting, and never a path, process or socket of ours.
Across a process border a failure travels as data (`shared.messages.Failure`), never as an exception object.
"""

import enum
from typing import ClassVar


class Code(enum.StrEnum):
    """Why a request failed. Metrics and logs use exactly these words as `reason`."""

    INVALID_INPUT = "invalid_input"
    INVALID_OPTION = "invalid_option"
    TOO_LARGE = "too_large"
    UNKNOWN_MODEL = "unknown_model"
    UNKNOWN_VERSION = "unknown_version"
    UNKNOWN_REGION = "unknown_region"
    UNSUPPORTED = "unsupported"
    OVERLOADED = "overloaded"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    NOT_READY = "not_ready"
    PROCESS_LOST = "process_lost"
    DRAINING = "draining"
    MODEL_DISABLED = "model_disabled"
    CONFLICT = "conflict"
    NONFINITE_OUTPUT = "nonfinite_output"
    INTERNAL = "internal"


class HeadraceError(Exception):
    """Base of all foreseen failures. `text` is safe to show to a caller."""

    code: ClassVar[Code] = Code.INTERNAL
    poison: ClassVar[bool] = False
    """Whether the gateway should remember the input, since it has ended two processes."""

    def __init__(self, text: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.retry_after_ms = retry_after_ms


class CallerFault(HeadraceError):
    """The caller sent something that can never succeed as it is."""


class ServerFault(HeadraceError):
    """The server can't answer now; the request may be fine."""


class InvalidInput(CallerFault):
    """An input is undecodable, or has the wrong kind, shape, size or datatype."""

    code = Code.INVALID_INPUT


class Poison(InvalidInput):
    """The input has ended two pool processes. To the caller an invalid input."""

    poison = True


class InvalidOption(CallerFault):
    """An option is unknown to the model's pipeline or outside its range."""

    code = Code.INVALID_OPTION


class TooLarge(CallerFault):
    """A message, row count or image is over a configured limit."""

    code = Code.TOO_LARGE


class UnknownModel(CallerFault):
    """No model of that name is served."""

    code = Code.UNKNOWN_MODEL


class UnknownVersion(CallerFault):
    """The model has no such version."""

    code = Code.UNKNOWN_VERSION


class UnknownRegion(CallerFault):
    """No shared memory region of that name is registered, or its object does not exist."""

    code = Code.UNKNOWN_REGION


class Unsupported(CallerFault):
    """The method or extension exists, but the settings switch it off."""

    code = Code.UNSUPPORTED


class ModelDisabled(CallerFault):
    """The model or the input is present but must not run (disabled, quarantined)."""

    code = Code.MODEL_DISABLED


class Conflict(CallerFault):
    """What is asked for can't be done in the present state: no canary to promote, a version in use."""

    code = Code.CONFLICT


class NonfiniteOutput(CallerFault):
    """The model answered NaN or infinity for this input, in FP32 too."""

    code = Code.NONFINITE_OUTPUT


class Cancelled(CallerFault):
    """The caller has left."""

    code = Code.CANCELLED


class DeadlineExceeded(CallerFault):
    """The request's own deadline passed, or could not be met from the start."""

    code = Code.DEADLINE_EXCEEDED


class Overloaded(ServerFault):
    """Admission has no room; carries `retry_after_ms`."""

    code = Code.OVERLOADED


class NotReady(ServerFault):
    """No worker has this model loaded, warmed and proven yet. Safe to retry."""

    code = Code.NOT_READY


class ProcessLost(ServerFault):
    """The process that held the request died, and a second try was not possible. Safe to retry."""

    code = Code.PROCESS_LOST


class LostTwice(ProcessLost):
    """Two workers died while they ran this input alone: it may be the cause, or have had bad luck."""

    poison = True


class Draining(ServerFault):
    """The server is stopping and takes no new work. Safe to retry elsewhere."""

    code = Code.DRAINING


class InternalFault(ServerFault):
    """A bug of ours: fixed text for the caller, the trace only in the log."""

    code = Code.INTERNAL
    TEXT: ClassVar[str] = "internal error; the request id finds it in the server's log"

    def __init__(self, text: str = TEXT, *, retry_after_ms: int | None = None) -> None:
        super().__init__(text, retry_after_ms=retry_after_ms)


def _by_code(base: type[HeadraceError]) -> dict[Code, type[HeadraceError]]:
    """The class that gives each code its name: the most general one, where a subclass shares its code."""
    found: dict[Code, type[HeadraceError]] = {}
    for child in base.__subclasses__():
        if "code" in vars(child):
            found[child.code] = child
        found = _by_code(child) | found
    return found


BY_CODE: dict[Code, type[HeadraceError]] = _by_code(HeadraceError)
"""Code → the class that carries it; complete by construction, checked by a test."""


def rebuild(code: str, text: str) -> HeadraceError:
    """Turn a failure that crossed a process border back into its error; an unknown code is ours: INTERNAL."""
    try:
        return BY_CODE[Code(code)](text)
    except ValueError:
        return InternalFault()


class ExitCode(enum.IntEnum):
    """What each process's exit code means (RELIABILITY promise 8)."""

    OK = 0
    BAD_SETTINGS = 2
    IN_USE = 3
    MODEL_LOAD = 4
    INTERNAL = 70
    PEER_LOST = 71
    DEVICE_LOST = 72


class StartupError(Exception):
    """A process can't start. The message is printed as it is, without a trace, and `exit_code` is returned.

    Where it concerns one model only, `text` is also what callers read, so it obeys the rule at the top of this file;
    `detail` (a path, the words of the user's own exception) is for whoever started the process.
    """

    def __init__(self, exit_code: ExitCode, text: str, detail: str = "") -> None:
        super().__init__(text)
        self.exit_code = exit_code
        self.text = text
        self.detail = detail

    @property
    def told(self) -> str:
        """Everything, for a terminal or a log."""
        return f"{self.text}: {self.detail}" if self.detail else self.text
