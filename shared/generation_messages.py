"""The part of the wire messages that is about generated text; see `shared.messages`. Gateway and worker.

A job is one prompt on its way to one text. It gets any number of pieces, and exactly one of them, the last one, has an
`end` or a `failure`; after the death of the process that held it there is none.
"""

from shared.model_messages import Failure, Message
from shared.results import TextEnd, Token

# ------------------------------------------------------------------ gateway → worker


class Generate(Message, tag="generate"):
    """Continue a prompt. The gateway sends no more than `GenerationLimits` of the model allow at a time."""

    job: int
    model: int
    deadline_s: float
    prompt: bytes
    """Its tokens, int32, little-endian: as long as a message may be, so that no slot is needed."""
    options: bytes
    """`shared.generation.GenerationOptions`, MessagePack."""


class CancelJobs(Message, tag="cancel_jobs"):
    """These jobs' callers have left: end them at the next step. Each still gets its last piece (`cancelled`)."""

    jobs: list[int]


# ------------------------------------------------------------------ worker → gateway


class Piece(Message):
    """What one job has come to since its last piece."""

    job: int
    text: str = ""
    """What is new: whole characters, and nothing that may turn out to be the beginning of a stop string."""
    tokens: list[Token] = []  # noqa: RUF012 - a struct copies it
    """What is new, with log probabilities; empty unless the options ask for them. Not cut where the text is."""
    end: TextEnd | None = None
    failure: Failure | None = None
    count: int = 0
    """Tokens that the text has by now; 0 where nothing has grown."""


class Generated(Message, tag="generated"):
    """After each step: the pieces of all of this gateway's jobs that have one."""

    pieces: list[Piece]
