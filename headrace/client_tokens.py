"""What the client tells of a generated text besides the text itself: its tokens, and why it ended."""

from dataclasses import dataclass

from protos.headrace.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a generated text."""

    id: int
    data: bytes
    """What it adds; part of a character is possible."""
    logprob: float
    """Natural logarithm of its probability, before temperature, penalty and cut-offs."""
    alternatives: "tuple[Token, ...]" = ()
    """The likeliest ones in its place, best first."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Where a generated text ended, and why."""

    reason: str
    """`end_token`, `stop_string` or `length`."""
    prompt_tokens: int
    completion_tokens: int


def finished(message: pb.Finished) -> Finished:
    """From the wire."""
    return Finished(pb.Finished.Reason.Name(message.reason).lower(), message.prompt_tokens, message.completion_tokens)


def token(message: pb.Token) -> Token:
    """From the wire."""
    return Token(message.id, message.bytes, message.logprob, tuple(map(token, message.alternatives)))
