"""One prompt on its way to one text: what has been chosen, what of it has been said, and why it ends."""

import abc
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from shared.generation import Detokeniser, Vocabulary
from shared.results import FinishReason, TextEnd, Token
from workers.generation.beams import BeamSearch
from workers.generation.sampler import Choice, Seen, Way
from workers.jobs import Job


class Reader(NamedTuple):
    """What is the same for all texts of a version."""

    vocabulary: Vocabulary
    context: int
    vocabulary_size: int
    device: torch.device


class Said(msgspec.Struct):
    """What a step has added to a text."""

    text: str = ""
    tokens: list[Token] = []
    end: TextEnd | None = None


class Text(abc.ABC):
    """A job under way. A new one has one row, which its prompt is to fill."""

    def __init__(self, job: Job, reader: Reader) -> None:
        self.job = job
        self.places: list[int] = []
        """Rows of the state that hold what is known of each of its rows; kept up by who moves them."""
        self.filled = 0
        """Tokens of each row that the state knows."""
        self._reader = reader
        self._ends = reader.vocabulary.end_ids | frozenset(job.options.stop_token_ids)
        self._most = min(job.options.max_tokens, reader.context - len(job.prompt))
        seed = job.options.seed
        self._seed = secrets.randbits(64) if seed is None else seed

    @property
    def width(self) -> int:
        """Most rows that it will have."""
        return self.job.options.beams

    @property
    def reserved(self) -> int:
        """Most tokens of each of its rows."""
        return len(self.job.prompt) + self._most

    @property
    def unread(self) -> int:
        """Tokens of the prompt that the state does not know yet."""
        return max(0, len(self.job.prompt) - self.filled)

    @property
    def grown(self) -> int:
        """Tokens of its answer after a step: the state does not know the last of them."""
        return max(0, self.filled + 1 - len(self.job.prompt))

    @abc.abstractmethod
    def last_tokens(self) -> list[int]:
        """Of each row, the one that the state does not know yet; only when the whole prompt is known."""

    def _token(self, choice: Choice) -> Token:
        def token(number: int, logprob: float) -> Token:
            return Token(number, self._reader.vocabulary.piece(number), logprob)

        told = token(choice.token, choice.logprob)
        told.alternatives = [token(*alternative) for alternative in choice.alternatives]
        return told

    def _tokens(self, choices: Sequence[Choice]) -> list[Token]:
        return [] if self.job.options.logprobs is None else [self._token(choice) for choice in choices]

    def _end(self, reason: FinishReason, count: int) -> TextEnd:
        return TextEnd(reason, len(self.job.prompt), count)

    def _seen(self, tokens: Sequence[int]) -> Seen | None:
        if self.job.options.repetition_penalty == 1:
            return None
        return Seen([*self.job.prompt, *tokens], self._reader.vocabulary_size, self._reader.device)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.job.number} filled={self.filled} rows={self.places}>"


class Chain(Text):
    """One token after another, greedily or drawn: said as it comes."""

    def __init__(self, job: Job, reader: Reader) -> None:
        super().__init__(job, reader)
        self._detokeniser = Detokeniser(reader.vocabulary, job.options.stop)
        self._count = 0
        self._last = 0
        self._mask: Seen | None = None

    def last_tokens(self) -> list[int]:
        """See Text."""
        return [self._last]

    def way(self) -> Way:
        """How its next token is to be chosen."""
        if not self._count:
            self._mask = self._seen(())
        mask = None if self._mask is None else self._mask.mask
        return Way(self.job.options, self._seed, self._count, mask)

    def take(self, choice: Choice) -> Said:
        """The next token has been chosen."""
        self._count += 1
        self._last = choice.token
        if self._mask is not None:
            self._mask.add(choice.token)
        said = Said(tokens=self._tokens([choice]))
        reason = self._reason(choice.token, said)
        if reason is not None:
            if reason is not FinishReason.STOP_STRING:
                said.text += self._detokeniser.finish()
            said.end = self._end(reason, self._count)
        return said

    def _reason(self, token: int, said: Said) -> FinishReason | None:
        if token in self._ends:
            return FinishReason.END_TOKEN
        said.text = self._detokeniser.feed(token)
        if self._detokeniser.stopped:
            return FinishReason.STOP_STRING
        return FinishReason.LENGTH if self._count == self._most else None


class Beams(Text):
    """Beam search: said at the end, since what is ahead may still fall behind."""

    def __init__(self, job: Job, reader: Reader) -> None:
        super().__init__(job, reader)
        self._search = BeamSearch(job.options, reader.vocabulary, self._ends, self._most)

    def last_tokens(self) -> list[int]:
        """See Text."""
        return self._search.last_tokens()

    def take(self, logits: Tensor) -> Said:
        """Go on from the logits `[rows, vocabulary]` of its rows."""
        masks = [self._seen(tokens) for tokens in self._search.tokens()]
        ways = [Way(self.job.options, 0, 0, None if mask is None else mask.mask) for mask in masks]
        self.places = [self.places[row] for row in self._search.advance(logits, ways)]
        if self.places:
            return Said()
        found = self._search.best
        if found is None:
            raise RuntimeError("the network leaves no token to go on with, and no continuation has ended")
        return Said(found.text, self._tokens(found.choices), self._end(found.reason, len(found.choices)))


def text_of(job: Job, reader: Reader) -> Text:
    """Begin a job."""
    return Beams(job, reader) if job.options.beams > 1 else Chain(job, reader)
