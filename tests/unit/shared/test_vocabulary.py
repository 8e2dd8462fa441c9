"""Bytes of tokens, held against the library that runs the same file."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shared.errors import ExitCode, StartupError
from shared.generation import Detokeniser
from shared.vocabulary import TokenizerFile
from tests.support.tokenizer_files import MARKERS, changed, pieces, small_byte_level, small_characters


def _generated(file: TokenizerFile, ids: list[int]) -> str:
    detokeniser = Detokeniser(file.vocabulary(()))
    return "".join([*(detokeniser.feed(token) for token in ids), detokeniser.finish()])


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_byte_level(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def sentence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pieces(tmp_path_factory.mktemp("pieces"))


@given(text=st.text(max_size=40))
@settings(max_examples=60)
def test_text_comes_back_from_bytes(byte_level: Path, text: str) -> None:
    ids = Tokenizer.from_file(str(byte_level)).encode(text, add_special_tokens=False).ids
    if not any(marker in text for marker in MARKERS):
        assert _generated(TokenizerFile(byte_level), ids) == text


@given(ids=st.lists(st.integers(0, 263), max_size=20))
@settings(max_examples=60)
def test_any_tokens_are_decoded_as_the_library_does(byte_level: Path, ids: list[int]) -> None:
    expected = Tokenizer.from_file(str(byte_level)).decode(ids, skip_special_tokens=True)
    assert _generated(TokenizerFile(byte_level), ids) == expected


@given(text=st.text("ab é€😀", max_size=20))
@settings(max_examples=60)
def test_text_comes_back_from_pieces_and_bytes(sentence: Path, text: str) -> None:
    """But for the library's habit to strip a first blank: an answer's first blank is meant."""
    tokenizer = Tokenizer.from_file(str(sentence))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    said = _generated(TokenizerFile(sentence), ids)
    assert said == text
    assert said.removeprefix(" ") == tokenizer.decode(ids)


def test_a_word_that_was_added_is_text_and_a_marker_is_none(byte_level: Path, sentence: Path) -> None:
    words, markers = TokenizerFile(sentence), TokenizerFile(byte_level)
    assert words.vocabulary(()).piece(words.number("hello", "end")) == b"hello"
    assert [markers.vocabulary(()).piece(markers.number(marker, "end")) for marker in MARKERS] == [b"", b""]
    assert markers.markers == MARKERS


def test_one_token_per_character(tmp_path: Path) -> None:
    file = TokenizerFile(small_characters(tmp_path))
    assert file.size == 8
    vocabulary = file.vocabulary([file.number("<s>", "end")])
    assert [vocabulary.piece(token) for token in range(8)] == [b"", b"a", b"b", b"c", b" ", "é".encode(), b"\n", b""]
    assert vocabulary.end_ids == {7}


def test_an_end_token_that_is_none_is_named(byte_level: Path) -> None:
    with pytest.raises(StartupError, match=r"^preprocessing.end names '<eos>', which is no token") as caught:
        TokenizerFile(byte_level).number("<eos>", "end")
    assert caught.value.exit_code is ExitCode.BAD_SETTINGS


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"decoder": None}, "its decoder is none"),
        ({"decoder": {"type": "WordPiece"}}, "its decoder is WordPiece"),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "CTC"}]}}, "ByteLevel, CTC"),
        ({"model": {"vocab": {"a": 2_000_000}}, "added_tokens": []}, "token numbers outside 0..1999999"),
        ({"model": {"vocab": {"a": -1, "b": 0}}, "added_tokens": []}, "token numbers outside"),
        ({"model": {"vocab": {}}, "added_tokens": []}, "or none"),
        ({"model": {}}, "vocab"),
    ],
)
def test_a_file_that_we_would_decode_wrongly_is_refused(tmp_path: Path, parts: dict[str, object], reason: str) -> None:
    path = changed(small_byte_level(tmp_path), **parts)
    with pytest.raises(StartupError, match=rf"^tokenizer.json can't be used: .*{re.escape(reason)}"):
        TokenizerFile(path)


def test_a_missing_and_a_broken_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"^nothing.json can't be used: it can't be read \(FileNotFoundError\)$"):
        TokenizerFile(tmp_path / "nothing.json")
    (tmp_path / "broken.json").write_bytes(b"{")
    with pytest.raises(StartupError, match=r"^broken.json can't be used: "):
        TokenizerFile(tmp_path / "broken.json")


def test_a_vocabulary_as_a_list_of_scores(tmp_path: Path) -> None:
    parts = {
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["▁the", -1.5], ["e", -2.0]]},
        "added_tokens": [],
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
    }
    vocabulary = TokenizerFile(changed(small_byte_level(tmp_path), **parts)).vocabulary(())
    assert [vocabulary.piece(token) for token in range(3)] == [b"<unk>", b" the", b"e"]
