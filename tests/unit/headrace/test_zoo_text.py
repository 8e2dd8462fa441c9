import json
import re

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from headrace.zoo_text import _as_rust_tokenizer

FILTERS = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'
KERAS = {
    "word_index": {"the": 1, "you're": 2, "good": 3, "bad": 4, "rare": 5, "é": 6},
    "num_words": 5,
    "filters": FILTERS,
    "split": " ",
}


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(_as_rust_tokenizer(KERAS)))


def _keras(text: str) -> list[int]:
    """What Keras's `text_to_word_sequence` and `texts_to_sequences` do, with 0 for what they leave out."""
    text = text.lower().translate({ord(each): " " for each in FILTERS})
    known = {word: number for word, number in KERAS["word_index"].items() if number < 5}  # type: ignore[attr-defined]  # a dictionary
    return [known.get(word, 0) for word in text.split(" ") if word]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The good, the bad", [1, 3, 1, 4]),
        ("You're\tGOOD\nbad", [2, 3, 4]),
        ("good[bad]{the}\\good^bad", [3, 4, 1, 3, 4]),
        ("rare unknown good", [0, 0, 3]),
        ("[UNK] <pad>", [0, 0]),
        ("... !!!", []),
        ("good\u00a0bad", [0]),
    ],
)
def test_words_are_split_as_keras_does(tokenizer: tokenizers.Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text).ids == ids == _keras(text)


@given(st.text(alphabet="abdehotuyr' gG" + FILTERS, max_size=60))
def test_any_text_is_split_as_keras_does(text: str) -> None:
    subject = tokenizers.Tokenizer.from_str(json.dumps(_as_rust_tokenizer(KERAS)))
    assert subject.encode(text).ids == _keras(text)


def test_characters_of_words_can_be_found(tokenizer: tokenizers.Tokenizer) -> None:
    text = "The -- good"
    assert [text[start:end] for start, end in tokenizer.encode(text).offsets] == ["The", "good"]
    assert not re.search(r"\s", "".join(tokenizer.encode(text).tokens))
