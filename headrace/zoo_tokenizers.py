"""Tokenizers from vocabularies in other forms, as `tokenizer.json`: data, the same bytes for the same input."""

import json
from collections.abc import Sequence


def byte_level(tokens: Sequence[str], merges: Sequence[str], markers: Sequence[int]) -> str:
    """Byte-pair encoding as GPT-2 writes it, digits one by one; `markers`: numbers of tokens that are no text."""
    import tokenizers  # noqa: PLC0415 - only while a model is converted
    from tokenizers import decoders, models, pre_tokenizers  # noqa: PLC0415

    pairs = [(first, second) for first, second in (merge.split(" ") for merge in merges)]
    model = models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=pairs)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(tokens[number], special=True) for number in markers])
    return tokenizer.to_str()


def characters(vocabulary: bytes) -> str:
    """One token per character, 0 for any other; each text begins with the token `<s>`.

    `vocabulary` is JSON, an object of characters and numbers.
    """
    import tokenizers  # noqa: PLC0415 - only while a model is converted
    from tokenizers import decoders, models, pre_tokenizers, processors  # noqa: PLC0415

    numbers = {"<unk>": 0, **json.loads(vocabulary)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(dict(sorted(numbers.items(), key=_number)), unk_token="<unk>"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", numbers["<s>"])])
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in ("<unk>", "<s>")])
    return tokenizer.to_str()


def _number(entry: tuple[str, int]) -> int:
    return entry[1]
