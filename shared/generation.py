"""What generating text is made of, without a network: options, the bytes of tokens, and text out of tokens.

Pure. The gateway parses the options, the worker chooses tokens by them and turns tokens into text.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from shared.pipeline import Options

MAX_STOP_STRINGS = 16
"""Each is looked for in each piece of text."""
MAX_STOP_CHARACTERS = 256
"""Of one stop string: as much text is held back while it may be the beginning of one."""
MAX_STOP_TOKENS = 64
MAX_SEED = 2**64 - 1


class GenerationOptions(Options, frozen=True):
    """What a request may say; also what the worker is told. `text_generation` checks what belongs together."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 128
    """Tokens to add; prompt and answer together fit the model's context."""
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    """Divides the logits before a token is drawn; 0 takes the likeliest one."""
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    """Draw from so many of the likeliest tokens; 0 from all."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that together have this probability."""
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.1, le=10)] = 1.0
    """Above 1 makes tokens of prompt and answer less likely: divides positive logits, multiplies negative ones."""
    seed: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Up to `MAX_SEED`. The same seed, prompt and options give the same text."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these."""
    stop_token_ids: tuple[int, ...] = ()
    """The text ends with the first of these, too; they add nothing to it."""
    beams: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    """Continuations that beam search keeps; 1 is none."""
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    """Tell the log probability of each token, and those of so many of the likeliest."""
    length_penalty: Annotated[float, msgspec.Meta(ge=-10, le=10)] = 1.0
    """Beam search compares log probability / tokens ** length_penalty."""


class Vocabulary:
    """The bytes that each token adds to a text, and the tokens that end one."""

    def __init__(self, pieces: Sequence[bytes], end_ids: Iterable[int]) -> None:
        """`pieces[i]` are the bytes of token i: empty for one that is no text, such as a marker.

        Raises ValueError when an end token is none of them.
        """
        self._pieces = tuple(pieces)
        self.end_ids = frozenset(end_ids)
        strange = [token for token in self.end_ids if not 0 <= token < len(self._pieces)]
        if strange:
            raise ValueError(f"end token {strange[0]} is not one of the {len(self._pieces)} tokens")

    def __len__(self) -> int:
        """How many tokens there are: the network's number of logits may be larger, never smaller."""
        return len(self._pieces)

    def piece(self, token: int) -> bytes:
        """What a token adds; nothing where the network has more logits than there are tokens."""
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""


class Detokeniser:
    """Text out of one sequence's tokens, piece by piece: whole characters, and nothing behind a stop string.

    All that `feed` and `finish` return, put together, depends on the tokens' bytes alone and not on where one token
    ends: it is the whole, decoded at once (what is no UTF-8 becomes U+FFFD), cut before the stop string that is
    complete first; of several that are complete with the same character, the longest.
    """

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str] = ()) -> None:
        self._vocabulary = vocabulary
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False
        """A stop string has been found: the text is at its end, and later tokens add nothing."""

    def feed(self, token: int) -> str:
        """What is certain with this token; may be empty. Ask `stopped` afterwards."""
        return self._add(self._decoder.decode(self._vocabulary.piece(token)))

    def finish(self) -> str:
        """What was held back and no stop string came of. Call it once, when no token will follow."""
        rest = self._add(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return rest + held

    def copy(self) -> "Detokeniser":
        """One that goes on from here by itself: a text of beam search that parts."""
        twin = Detokeniser(self._vocabulary, self._stop)
        twin._decoder.setstate(self._decoder.getstate())
        twin._held, twin.stopped = self._held, self.stopped
        return twin

    def _add(self, new: str) -> str:
        if self.stopped or not new:
            return ""
        known = len(self._held)
        text = self._held + new
        cut = self._first_stop(text, known)
        if cut is not None:
            self.stopped, self._held = True, ""
            return text[:cut]
        kept = self._may_begin_stop(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _first_stop(self, text: str, known: int) -> int | None:
        """Where the stop string begins that is complete first; none is complete in the first `known` characters."""
        found = []
        for stop in self._stop:
            start = text.find(stop, max(0, known - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        return min(found)[1] if found else None

    def _may_begin_stop(self, text: str) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
