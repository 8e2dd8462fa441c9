"""Text → tokens: what comes out, what is refused, and that the work stays bounded."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shared.errors import InvalidInput, NotReady
from shared.text_tokens import CHARACTERS_PER_TOKEN, Tokeniser, read_text
from tests.support.text_parts import vocabulary, write_tokeniser


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokeniser(tmp_path_factory.mktemp("tokens"))


def pieces(ids: "list[int]") -> list[str]:
    known = list(dict.fromkeys(vocabulary()))
    return [known[number] for number in ids]


def test_the_files_own_padding_and_cutting_are_off(path: Path) -> None:
    tokens = Tokeniser(path, 512).encode(b"the river " * 200, truncate=True)
    assert len(tokens.ids) == 402
    assert len(Tokeniser(path, 512).encode(b"the river", truncate=True).ids) == 4


def test_tokens_are_those_of_the_library(path: Path) -> None:
    plain = Tokenizer.from_file(str(path))
    plain.no_padding()
    plain.no_truncation()
    for text in ("The river turns the wheel.", "a", "été à la mairie", "東京 🙂", "x" * 300, "new\u0000york"):
        ours = Tokeniser(path, 512).encode(text.encode(), truncate=True)
        theirs = plain.encode(text)
        assert ours.ids.tolist() == theirs.ids
        assert ours.spans == theirs.offsets
        assert not ours.truncated


def test_a_long_text_is_cut_as_the_library_cuts(path: Path) -> None:
    plain = Tokenizer.from_file(str(path))
    plain.no_padding()
    plain.enable_truncation(10)
    text = "the river turns the wheel of the mill and the man is eating"
    tokens = Tokeniser(path, 10).encode(text.encode(), truncate=True)
    assert tokens.ids.tolist() == plain.encode(text).ids
    assert len(tokens.ids) == 10
    assert tokens.truncated


def test_a_text_of_just_the_most_tokens_is_whole(path: Path) -> None:
    tokens = Tokeniser(path, 6).encode(b"the river turns wheel", truncate=False)
    assert (len(tokens.ids), tokens.truncated) == (6, False)


def test_without_truncate_the_sentence_names_tokens_limit_and_option(path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        Tokeniser(path, 6).encode(b"the river turns wheel mill", truncate=False)
    assert refused.value.text == (
        "text has 7 tokens; the model takes 6 (preprocessing.max_tokens): shorten it, or set options.truncate to true"
    )


@pytest.mark.parametrize("text", ["   ", "\n\t", "\u200b\u0000", "\u00ad"])
def test_a_text_without_a_token_is_refused(path: Path, text: str) -> None:
    with pytest.raises(InvalidInput, match="text is empty"):
        Tokeniser(path, 32).encode(text.encode(), truncate=True)


def test_special_tokens_in_a_text_are_text(path: Path) -> None:
    ids = Tokeniser(path, 32).encode(b"[SEP] the [PAD]", truncate=True).ids.tolist()
    assert ids.count(3) == 1  # the model's own, at the end
    assert 0 not in ids


@pytest.mark.parametrize(
    ("data", "at"), [(b"ab\xff", 2), (b"ab\xc3", 2), (b"\x80", 0), (b"a\xed\xa0\x80", 1), (b"\xc3(" + b"x" * 50, 0)]
)
def test_what_is_no_utf8_is_refused_by_its_byte(path: Path, data: bytes, at: int) -> None:
    with pytest.raises(InvalidInput, match=f"^text is not UTF-8 at byte {at}$"):
        Tokeniser(path, 32).encode(data, truncate=True)


@given(st.text(), st.integers(0, 40))
def test_the_beginning_is_read_whole_characters_at_a_time(text: str, most: int) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert read_text(text.encode(), most) == (text[:most], len(text) > most)


@settings(max_examples=30)
@given(st.text(min_size=1, max_size=400))
def test_any_text_gives_tokens_or_a_sentence(path: Path, text: str) -> None:
    data = text.encode("utf-8", "ignore")
    try:
        tokens = Tokeniser(path, 24).encode(data, truncate=True)
    except InvalidInput:
        return
    assert 1 <= len(tokens.ids) <= 24
    assert len(tokens.spans) == len(tokens.words) == len(tokens.ids)
    assert all(0 <= start <= end <= len(tokens.text) for start, end in tokens.spans)


@pytest.mark.parametrize("text", ["a" * 10_000_000, "the river " * 1_000_000, "東" * 3_400_000])
def test_ten_megabytes_are_bounded_work(path: Path, text: str) -> None:
    tokeniser = Tokeniser(path, 256)
    tokeniser.encode(b"warm", truncate=True)
    data = text.encode()
    started_s = time.process_time()
    tokens = tokeniser.encode(data, truncate=True)
    assert time.process_time() - started_s < 1.0  # whole, it takes many seconds
    assert tokens.truncated
    assert len(tokens.text) <= 256 * CHARACTERS_PER_TOKEN
    with pytest.raises(InvalidInput, match="over 16384 characters"):
        tokeniser.encode(data, truncate=False)


WORDS = st.sampled_from(
    ["the ", "river ", "turns", "\n", "東", "🙂", "x" * 90, " " * 40, "new york. ", "x" * 400, "e\u0301"]
)


@settings(max_examples=40, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=300), st.integers(3, 40))
def test_reading_a_first_part_gives_the_tokens_of_the_whole(path: Path, words: list[str], most: int) -> None:
    text = "".join(words)[: most * CHARACTERS_PER_TOKEN]
    plain = Tokenizer.from_file(str(path))
    plain.no_padding()
    plain.enable_truncation(most)
    want = plain.encode(text).ids
    if len(want) > 2:
        assert Tokeniser(path, most).encode(text.encode(), truncate=True).ids.tolist() == want


def test_of_a_long_text_no_more_is_made_into_tokens_than_is_needed(path: Path) -> None:
    tokens = Tokeniser(path, 8192).encode(b"the river turns. " * 100_000, truncate=True)
    assert (len(tokens.ids), tokens.truncated) == (8192, True)
    assert len(tokens.text) < 8192 * 10
    with pytest.raises(InvalidInput, match=r"text has over 1[0-9]{4} tokens; the model takes 8192"):
        Tokeniser(path, 8192).encode(b"the river turns. " * 10_000, truncate=False)


def test_a_text_that_begins_with_megabytes_of_nothing_is_refused_by_what_was_read(path: Path) -> None:
    with pytest.raises(InvalidInput, match="the first 16384 characters of text make no token"):
        Tokeniser(path, 256).encode(b" " * 10_000_000 + b"x", truncate=True)


def test_a_broken_file_is_told_without_its_path(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 3}))
    with pytest.raises(NotReady) as refused:
        Tokeniser(tmp_path / "tokenizer.json", 32).encode(b"x", truncate=True)
    assert refused.value.text == "the model's tokenizer.json can't be read as a tokeniser, see the log"


def test_fewer_tokens_than_the_file_adds_leave_no_room_for_a_text(path: Path) -> None:
    assert len(Tokeniser(path, 3).encode(b"the river", truncate=True).ids) == 3
    with pytest.raises(
        NotReady, match=r"preprocessing\.max_tokens is 2, and the model's tokenizer\.json adds 2 tokens"
    ):
        Tokeniser(path, 2).encode(b"the river", truncate=True)
