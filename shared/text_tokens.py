"""Text → token ids, in one place for every pipeline of texts. Used in pool processes; `tokenizers` is imported there.

Work is bounded whatever comes: of a text only as many characters are read as the model's most tokens can stand for.
"""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from shared.errors import InvalidInput, NotReady
from shared.logs import get_logger

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

CHARACTERS_PER_TOKEN = 64
"""Of a text no more characters are read than this many for each of the model's tokens: ordinary text has about four,
and what follows after so many could only count where nearly all before it is white space."""
_FIRST_CHARACTERS = 8
"""So many for each token are read first, and the others only where these do not give all tokens that there may be."""
_MARGIN = 256
"""Characters before the end of the first part that decide on no token: what follows could change theirs."""
_BYTES_PER_CHARACTER = 4
"""The most that UTF-8 needs."""

_log = get_logger()


class Tokens(NamedTuple):
    """One text."""

    ids: npt.NDArray[np.int32]
    """Special ones of the model's own included, where it has any."""
    spans: list[tuple[int, int]]
    """Per token: from which character of the text up to which; of a special one (0, 0)."""
    words: list[int | None]
    """Per token: the number of the word that it is of; None of a special one."""
    text: str
    """As far as it was read."""
    truncated: bool
    """The text's end was left out."""


class Tokeniser:
    """One file, opened when it is needed. Not for several threads at a time."""

    def __init__(self, path: Path, max_tokens: int) -> None:
        """`path`: a tokenizer.json. `max_tokens` of one text, special ones included."""
        self._path = path
        self._max_tokens = max_tokens
        self._opened: Tokenizer | None = None

    def encode(self, data: bytes | memoryview, *, truncate: bool) -> Tokens:
        """UTF-8 text as tokens. With `truncate` the end of a text that is too long is left out.

        Raises InvalidInput for what is no UTF-8, has no token in it or, without `truncate`, too many of them; NotReady
        when the model's file can't be read.
        """
        tokeniser = self.open()
        most = self._max_tokens * CHARACTERS_PER_TOKEN
        text, cut = read_text(data, most)
        if cut and not truncate:
            raise InvalidInput(
                f"text has over {most} characters, too many for the {self._max_tokens} tokens that the model takes "
                "(preprocessing.max_tokens): shorten it, or set options.truncate to true"
            )
        special = tokeniser.num_special_tokens_to_add(is_pair=False)
        encoding, text, more = _encoded(
            tokeniser, text, self._max_tokens * _FIRST_CHARACTERS, self._max_tokens - special
        )
        if not encoding.ids:
            what = f"the first {most} characters of text make no token" if cut else "text is empty: it makes no token"
            raise InvalidInput(f"{what} of this model; white space alone is none")
        total = len(encoding.ids) + special
        if total > self._max_tokens:
            if not truncate:
                count = f"over {total}" if more else total
                raise InvalidInput(
                    f"text has {count} tokens; the model takes {self._max_tokens} (preprocessing.max_tokens): "
                    "shorten it, or set options.truncate to true"
                )
            encoding.truncate(self._max_tokens - special)
        return _tokens(tokeniser.post_process(encoding), text, truncated=cut or total > self._max_tokens)

    def open(self) -> "Tokenizer":
        """Read the file, unless that is done. Raises NotReady."""
        if self._opened is None:
            tokeniser = opened(self._path)
            special = tokeniser.num_special_tokens_to_add(is_pair=False)
            if special >= self._max_tokens:
                raise NotReady(
                    f"preprocessing.max_tokens is {self._max_tokens}, and the model's {self._path.name} adds {special} "
                    "tokens to each text: there is no room for the text"
                )
            self._opened = tokeniser
        return self._opened


def _encoded(tokeniser: "Tokenizer", text: str, first: int, room: int) -> tuple["Encoding", str, bool]:
    """The tokens, no special ones among them; what was read for them; and whether there is more.

    Of a long text `first` characters are enough where they make more than `room` tokens, and the last of those that fit
    is of a word that is over well before the end: nothing that follows could change it.
    """
    begin = text[: first + _MARGIN]
    if len(begin) < len(text):
        encoding = tokeniser.encode(begin, add_special_tokens=False)
        if len(encoding.ids) > room:
            words = encoding.word_ids
            over = words[room - 1] is not None and words[room - 1] != words[-1]
            if over and encoding.offsets[room - 1][1] <= first:
                return encoding, begin, True
    return tokeniser.encode(text, add_special_tokens=False), text, False


def opened(path: Path) -> "Tokenizer":
    """The tokeniser in a file, as we use it. Raises NotReady."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - a library of some 10 MB, which only a pool process needs

    try:
        tokeniser = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exceptions
        _log.error("a tokeniser can't be read", file=path.name, reason=str(error)[:300])
        raise NotReady(f"the model's {path.name} can't be read as a tokeniser, see the log") from error
    # Files carry settings of whoever saved them: padding to 128 and cutting at 128 are common ones.
    tokeniser.no_padding()
    tokeniser.no_truncation()
    # What a caller writes is text, also where it spells a special token of the model's.
    tokeniser.encode_special_tokens = True
    return tokeniser


def read_text(data: bytes | memoryview, most: int) -> tuple[str, bool]:
    """At most `most` characters of UTF-8 text, and whether there are more. Raises InvalidInput naming the byte."""
    head = bytes(data[: most * _BYTES_PER_CHARACTER])
    complete = len(head) == len(data)
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        # The last character of the part that is read may go on behind it.
        if complete or error.start < len(head) - _BYTES_PER_CHARACTER + 1 or error.reason != "unexpected end of data":
            raise InvalidInput(f"text is not UTF-8 at byte {error.start}") from None
        text = head[: error.start].decode()
    return text[:most], not complete or len(text) > most


def _tokens(encoding: "Encoding", text: str, *, truncated: bool) -> Tokens:
    return Tokens(np.array(encoding.ids, np.int32), encoding.offsets, encoding.word_ids, text, truncated)
