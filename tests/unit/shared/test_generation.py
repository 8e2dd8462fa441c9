"""Text out of tokens: never cut inside a character, never past a stop string, whatever the tokens' borders are."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.generation import Detokeniser, GenerationOptions, Vocabulary


def _cut(data: bytes, stop: tuple[str, ...]) -> str:
    """The reference: everything decoded at once, then read character by character for the first complete stop."""
    text = data.decode("utf-8", errors="replace")
    for end in range(1, len(text) + 1):
        ending = [word for word in stop if text[:end].endswith(word)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


def _run(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], Detokeniser]:
    detokeniser = Detokeniser(Vocabulary(pieces, ()), stop)
    said = []
    for token in range(len(pieces)):
        said.append(detokeniser.feed(token))
        if detokeniser.stopped:
            break
    return [*said, detokeniser.finish()], detokeniser


few_letters = st.text("abcé€😀", max_size=30).map(str.encode)
any_bytes = st.binary(max_size=30)
stop_words = st.lists(st.text("abcé€😀\ufffd", min_size=1, max_size=4), max_size=4).map(tuple)


@given(data=few_letters | any_bytes, cuts=st.lists(st.integers(0, 120), max_size=12), stop=stop_words)
def test_borders_of_tokens_make_no_difference(data: bytes, cuts: list[int], stop: tuple[str, ...]) -> None:
    borders = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(borders)]

    assert "".join(_run(pieces, stop)[0]) == _cut(data, stop)


@given(data=few_letters, stop=stop_words)
def test_each_piece_is_the_beginning_of_what_comes_out(data: bytes, stop: tuple[str, ...]) -> None:
    """A character once said is never taken back, although each token is a single byte."""
    whole = _cut(data, stop)
    said, _ = _run([data[i : i + 1] for i in range(len(data))], stop)

    for count in range(len(said) + 1):
        assert whole.startswith("".join(said[:count]))


def test_part_of_a_character_is_held_back() -> None:
    assert _run(["a€".encode()[:2], "€".encode()[1:2], "€".encode()[2:], b"b"])[0] == ["a", "", "€", "b", ""]


def test_part_of_a_character_at_the_end_is_shown_as_a_mark() -> None:
    assert _run([b"a", "€".encode()[:2]])[0] == ["a", "", "\ufffd"]


def test_what_may_be_a_stop_string_is_held_back_and_said_when_it_is_none() -> None:
    assert _run([b"one ST", b"O", b"R", b"E"], ("STOP",))[0] == ["one ", "", "STOR", "E", ""]


def test_a_stop_string_over_three_tokens_ends_the_text() -> None:
    said, detokeniser = _run([b"one S", b"TO", b"P two", b"three"], ("STOP",))

    assert said == ["one ", "", "", ""]
    assert detokeniser.stopped


def test_nothing_is_added_behind_a_stop_string() -> None:
    detokeniser = Detokeniser(Vocabulary([b"a.", b"b"], ()), (".",))

    assert (detokeniser.feed(0), detokeniser.feed(1), detokeniser.finish()) == ("a", "", "")


def test_text_that_is_held_comes_out_at_the_end() -> None:
    assert _run([b"one ST"], ("STOP",))[0] == ["one ", "ST"]


def test_a_copy_goes_its_own_way() -> None:
    vocabulary = Vocabulary([b"S\xe2\x82", b"\xac", b"TOP", b"S"], ())
    first = Detokeniser(vocabulary, ("STOP",))
    first.feed(0)
    second = first.copy()

    assert (first.feed(1), second.feed(2) + second.finish()) == ("S€", "S\ufffdTOP")
    first.feed(3)
    third = first.copy()
    assert (third.feed(2), third.stopped, first.stopped, first.finish()) == ("", True, False, "S")


def test_a_token_without_text_adds_nothing_and_interrupts_nothing() -> None:
    """Markers, and logits beyond the vocabulary, stand between two halves of a character."""
    detokeniser = Detokeniser(Vocabulary([b"\xc3", b"", b"\xa9"], (1,)))

    assert [detokeniser.feed(token) for token in (0, 1, 7, 2)] == ["", "", "", "é"]


def test_an_end_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="end token 2 is not one of the 2 tokens"):
        Vocabulary([b"a", b"b"], (2,))


def test_options_travel_as_they_are() -> None:
    options = GenerationOptions(
        max_tokens=5, temperature=0.5, seed=2**64 - 1, stop=("\n", "€"), stop_token_ids=(3,), logprobs=0
    )

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(options), type=GenerationOptions) == options
