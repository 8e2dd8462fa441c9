"""Small `tokenizer.json` files of the kinds that generating models come with."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models

from headrace.zoo_tokenizers import byte_level, characters

MARKERS = ("<|end|>", "<|start|>")
"""Tokens 0 and 1 of `small_byte_level`."""
MERGES = ("Ġ t", "h e", "Ġt he", "Ã ©", "â Ĥ", "âĤ ¬")


def byte_letters() -> list[str]:
    """The 256 characters that stand for bytes, in the library's own order."""
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def small_byte_level(folder: Path) -> Path:
    """All bytes, six merges (of them one that is half a character) and two markers."""
    tokens = [*MARKERS, *byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]
    path = folder / "tokenizer.json"
    path.write_text(byte_level(tokens, MERGES, (0, 1)), encoding="utf-8")
    return path


def small_characters(folder: Path, letters: str = "abc é\n") -> Path:
    """One token per character, `<s>` in front."""
    numbers = {letter: number + 1 for number, letter in enumerate(letters)} | {"<s>": len(letters) + 1}
    path = folder / "tokenizer.json"
    path.write_text(characters(json.dumps(numbers).encode()), encoding="utf-8")
    return path


def pieces(folder: Path) -> Path:
    """SentencePiece's kind: a blank is `▁`, and bytes that no token has are tokens of their own."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    model = models.BPE(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[("▁", "a"), ("a", "b")],
        unk_token="<unk>",  # noqa: S106 - no password
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_tokens(["hello"])
    path = folder / "tokenizer.json"
    path.write_text(tokenizer.to_str(), encoding="utf-8")
    return path


def changed(path: Path, **parts: Any) -> Path:  # noqa: ANN401 - any JSON
    """The same file with other parts."""
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | parts), encoding="utf-8")
    return path
