"""Exceptions of hooks as data: what the caller may read, and what only the log says."""

from shared.clock import Clock, now_s
from shared.errors import HeadraceError, InternalFault, InvalidInput, NotReady, StartupError
from shared.logs import Seldom, get_logger
from shared.messages import Failure

log = get_logger()


class Traces:
    """The traces of one model's hooks: one of each kind in some seconds, since a hook may raise on every request."""

    def __init__(self, model: str, clock: Clock = now_s) -> None:
        self._model = model
        self._clock = clock
        self._seldom: dict[str, Seldom] = {}

    def write(self, event: str, error: Exception) -> None:
        """Log the exception with its trace, or count it for the next line's `left_out`; few phrases are an `event`."""
        left_out = self._seldom.setdefault(event, Seldom()).due(self._clock())
        if left_out is not None:
            log.error(event, model=self._model, left_out=left_out, exc_info=error)


def fault_of_input(error: Exception, kind: str, traces: Traces) -> InvalidInput | None:
    """What to tell the caller when `preprocess` raised something unforeseen; None: it is our fault.

    While an image is prepared everything is put down to the image: decoders raise all kinds of things over broken
    bytes. The trace goes to the log, where the author of a pipeline finds a mistake of the pipeline's own.
    """
    if isinstance(error, MemoryError):
        return InvalidInput("the input needs more memory than pool.memory_bytes allows")
    if kind != "image":
        return None
    traces.write("preprocess failed over an image", error)
    return InvalidInput("the image can't be prepared: it is broken or of an unsupported kind")


def describe(error: Exception, stage: str, traces: Traces) -> Failure:
    """An exception as a Failure. Unforeseen ones are logged with their trace, and the caller reads a fixed text."""
    if not isinstance(error, HeadraceError):
        traces.write(f"a pipeline's {stage} hook failed", error)
        error = InternalFault()
    return Failure(error.code, error.text)


def refusal(error: Exception, traces: Traces) -> Failure:
    """Why a pipeline can't be built, as a Failure; the model stays not ready and says so."""
    return describe(NotReady(error.text) if isinstance(error, StartupError) else error, "open", traces)
