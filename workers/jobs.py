"""Prompts on their way from a gateway to the stepper of their version. No torch."""

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from shared.errors import Code
from shared.generation import GenerationOptions
from shared.generation_messages import Generate, Piece
from shared.messages import Failure
from workers.loaded import Key


class Job(NamedTuple):
    """What was asked for."""

    owner: Hashable
    """Who gets the answer."""
    number: int
    """The owner's."""
    deadline_s: float
    prompt: Sequence[int]
    """1 .. context - 1 tokens."""
    options: GenerationOptions


class Refused(Exception):
    """A job that is not begun, and why."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.failure = Failure(code, text)


_options = msgspec.msgpack.Decoder(GenerationOptions)


def read(message: Generate, owner: Hashable) -> Job:
    """A message as a job. Raises ValueError where it is not what a gateway sends."""
    prompt = np.frombuffer(message.prompt, "<i4").tolist()
    return Job(owner, message.job, message.deadline_s, prompt, _options.decode(message.options))


class Inbox:
    """One gateway's jobs: those that nobody has taken up yet, and who of all has been cancelled."""

    def __init__(self) -> None:
        self._new: deque[tuple[Key, Generate]] = deque()  # taken up at each look of the loop
        self._open: set[int] = set()
        """Without a last piece; a gateway has no more of them than `stepper.MAX_WAITING` and what runs."""
        self._cancelled: set[int] = set()

    def add(self, key: Key, message: Generate) -> None:
        """A prompt has come."""
        self._new.append((key, message))
        self._open.add(message.job)

    def cancel(self, jobs: Iterable[int]) -> None:
        """Only what is open can be; what has ended must not be remembered for ever."""
        self._cancelled.update(self._open.intersection(jobs))

    def keys(self) -> Collection[Key]:
        """The versions that new jobs are for."""
        return {key for key, _ in self._new}

    def take(self) -> tuple[Sequence[tuple[Key, Generate]], Sequence[int]]:
        """New jobs, then the cancelled ones, which may be among them."""
        new, cancelled = list(self._new), list(self._cancelled)
        self._new.clear()
        self._cancelled.clear()
        return new, cancelled

    def ended(self, pieces: Iterable[Piece]) -> None:
        """These are about to be said."""
        self._open.difference_update(piece.job for piece in pieces if piece.end or piece.failure)

    def __len__(self) -> int:
        return len(self._open)
