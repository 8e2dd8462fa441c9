"""What a `tokenizer.json` says of its tokens, without the library that runs it: their bytes, their numbers.

The worker turns tokens into bytes by itself: `tokenizers` decodes whole texts, and a token may be part of a character.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ExitCode, StartupError
from shared.generation import Vocabulary

MAX_TOKENS = 2_000_000
"""Of one vocabulary; the largest published ones have an eighth of it. Bounds the table of their bytes."""


class AddedToken(msgspec.Struct, frozen=True):
    """A token beside the trained ones."""

    id: int
    content: str
    special: bool = False
    """A marker: no text."""


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]]


class _File(msgspec.Struct, frozen=True):
    model: _Model
    added_tokens: list[AddedToken] = []
    decoder: dict[str, Any] | None = None


class TokenizerFile:
    """The tokens of a file. It is read anew when their bytes are asked for: only a worker needs those."""

    def __init__(self, path: Path) -> None:
        """Raises StartupError(MODEL_LOAD) when the file is missing, broken, or of a kind that we can't decode."""
        self._path = path
        file = _read(path)
        self._numbers = _numbers(file)
        """Only of added tokens, after the check: the whole table is large."""
        self.size = max(self._numbers.values(), default=-1) + 1
        """Numbers that a token can have: 0 .. size - 1."""
        if not 1 <= self.size <= MAX_TOKENS or min(self._numbers.values()) < 0:
            raise _broken(path, f"it has token numbers outside 0..{MAX_TOKENS - 1}, or none")
        _piece_of(file, path)
        self.markers = tuple(token.content for token in file.added_tokens if token.special)
        """As they are written."""

    def number(self, content: str, setting: str) -> int:
        """The number of a token; `setting` names who asks. Raises StartupError(BAD_SETTINGS)."""
        if content not in self._numbers:
            raise StartupError(
                ExitCode.BAD_SETTINGS, f"preprocessing.{setting} names {content!a}, which is no token of the tokenizer"
            )
        return self._numbers[content]

    def forget_numbers(self) -> None:
        """They have been asked for, and are large."""
        self._numbers = {}

    def vocabulary(self, end_ids: Iterable[int]) -> Vocabulary:
        """All tokens with their bytes."""
        file = _read(self._path)
        piece = _piece_of(file, self._path)
        pieces = [b""] * self.size
        for content, number in _numbers(file).items():
            pieces[number] = piece(content)
        for token in file.added_tokens:
            pieces[token.id] = b"" if token.special else token.content.encode()
        return Vocabulary(pieces, end_ids)


def _read(path: Path) -> _File:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise _broken(path, f"it can't be read ({type(error).__name__})") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _broken(path, str(error)[:200]) from None


def _numbers(file: _File) -> dict[str, int]:
    vocab = file.model.vocab
    trained = vocab if isinstance(vocab, dict) else {content: number for number, (content, _) in enumerate(vocab)}
    return {**trained, **{token.content: token.id for token in file.added_tokens}}


def _piece_of(file: _File, path: Path) -> Callable[[str], bytes]:
    """How the file's decoder makes bytes of one token. Raises StartupError for a decoder that looks at several."""
    steps = _steps(file.decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _from_byte_level
    if kinds and set(kinds) <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        return _from_pieces(steps)
    told = ", ".join(str(kind) for kind in kinds)[:100] or "none"
    raise _broken(
        path, f"its decoder is {told}: text is generated with ByteLevel, Metaspace, Fuse, or Replace and ByteFallback"
    )


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder.get("decoders", ())) if decoder.get("type") == "Sequence" else [decoder]


def _from_byte_level(content: str) -> bytes:
    return b"".join(_BYTES.get(character) or character.encode() for character in content)


def _from_pieces(steps: list[Mapping[str, Any]]) -> Callable[[str], bytes]:
    """Tokens of SentencePiece's kind. What strips the first blank of a text is left out: an answer goes on."""
    blanks = {step.get("replacement", "▁") for step in steps if step["type"] == "Metaspace"}
    blanks |= {step.get("pattern", {}).get("String") for step in steps if step["type"] == "Replace"}
    falls_back = any(step["type"] == "ByteFallback" for step in steps)

    def piece(content: str) -> bytes:
        if falls_back and len(content) == 6 and content.startswith("<0x") and content.endswith(">"):
            return bytes.fromhex(content[3:5])
        for blank in blanks:
            content = content.replace(blank, " ") if blank else content
        return content.encode()

    return piece


def _byte_table() -> dict[str, bytes]:
    """GPT-2's: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): bytes([byte]) for byte in printable}
    return table | {chr(256 + number): bytes([byte]) for number, byte in enumerate(others)}


def _broken(path: Path, reason: str) -> StartupError:
    return StartupError(ExitCode.MODEL_LOAD, f"{path.name} can't be used: {reason}")


_BYTES = _byte_table()
