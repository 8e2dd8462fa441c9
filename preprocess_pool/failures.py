"""Exceptions of hooks as data: what the caller may read, and what only the log says."""

from shared.errors import HeadraceError, InternalFault, InvalidInput, NotReady, StartupError
from shared.logs import get_logger
from shared.messages import Failure

log = get_logger()


def fault_of_input(error: Exception, kind: str) -> InvalidInput | None:
    """What to tell the caller when `preprocess` raised something unforeseen; None: it is our fault.

    While an image is prepared everything is put down to the image: decoders raise all kinds of things over broken
    bytes. The trace goes to the log, where the author of a pipeline finds a mistake of the pipeline's own.
    """
    if isinstance(error, MemoryError):
        return InvalidInput("the input needs more memory than pool.memory_bytes allows")
    if kind != "image":
        return None
    log.error("preprocess failed over an image", exc_info=error)
    return InvalidInput("the image can't be prepared: it is broken or of an unsupported kind")


def describe(error: Exception, stage: str) -> Failure:
    """An exception as a Failure. Unforeseen ones are logged with their trace, and the caller reads a fixed text."""
    if isinstance(error, HeadraceError):
        return Failure(error.code, error.text)
    log.error("a pipeline's hook failed", stage=stage, exc_info=error)
    return describe(InternalFault(), stage)


def refusal(error: Exception) -> Failure:
    """Why a pipeline can't be built, as a Failure; the model stays not ready and says so."""
    if isinstance(error, StartupError):
        return describe(NotReady(error.text), "open")
    return describe(error, "open")
