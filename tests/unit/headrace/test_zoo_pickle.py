"""Writes pickles only to have them read without being run, or refused."""

import collections
import contextlib
import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import zoo_pickle
from headrace.zoo_pickle import dictionary_in
from shared.errors import ExitCode, StartupError


class Tokenizer:
    """As Keras's: nothing but attributes."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


KIND = (__name__, "Tokenizer")


def _dumped(value: object, protocol: int = 4) -> bytes:
    return pickle.dumps(value, protocol)


@pytest.mark.parametrize("protocol", [4, 5])
def test_attributes_come_out_as_plain_data(protocol: int) -> None:
    counts: collections.defaultdict[str, int] = collections.defaultdict(int, {"the": 3})
    words = collections.OrderedDict([("the", 70_000), ("a" * 300, 2)])
    subject = Tokenizer(word_counts=words, docs=counts, filters='!"\t\n', lower=True, oov=None, number=20_000, none={})
    found = dictionary_in(_dumped(subject, protocol), KIND)
    expected = {**subject.__dict__, "word_counts": dict(words), "docs": dict(counts)}
    assert found == expected
    assert type(found["word_counts"]) is dict


@given(st.dictionaries(st.text(max_size=5), st.integers(0, 2**31 - 1), max_size=2000))
def test_every_dictionary_of_words_comes_back(words: dict[str, int]) -> None:
    assert dictionary_in(_dumped(Tokenizer(word_index=words)), KIND) == {"word_index": words}


class _Runs:
    def __init__(self, call: Any, *arguments: object) -> None:  # noqa: ANN401 - whatever is to be called
        self._made = (call, arguments)

    def __reduce__(self) -> Any:  # noqa: ANN401 - pickle's protocol
        return self._made


@pytest.mark.parametrize(
    "call", [(os.system, "touch canary"), (Path.touch, Path("canary")), (exec, "open('canary', 'w')")]
)
def test_code_is_refused_and_never_runs(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401 - see above
    monkeypatch.chdir(tmp_path)
    for value in (_Runs(*call), Tokenizer(inside=_Runs(*call))):
        with pytest.raises(StartupError, match=r"the pickle .*: it is not read") as caught:
            dictionary_in(_dumped(value), KIND)
        assert caught.value.exit_code == ExitCode.MODEL_LOAD
    assert list(tmp_path.iterdir()) == []


def test_another_class_is_refused_by_name() -> None:
    with pytest.raises(StartupError, match=r"wants to call .*Tokenizer"):
        dictionary_in(_dumped(Tokenizer(a=1)), ("keras", "Tokenizer"))


def test_a_name_alone_is_no_object() -> None:
    with pytest.raises(StartupError, match="is no single object"):
        dictionary_in(_dumped(Tokenizer), KIND)


@pytest.mark.parametrize("value", [[1, 2], {1: 2.5}, "text", b"bytes", {1, 2}, Tokenizer(listed=[1]), 2**70])
def test_what_is_no_dictionary_of_strings_and_numbers_is_refused(value: object) -> None:
    with pytest.raises(StartupError, match="it is not read"):
        dictionary_in(_dumped(value), KIND)


def test_damage_is_a_sentence() -> None:
    whole = _dumped(Tokenizer(word_index={"the": 1, "of": 2}))
    for cut in range(len(whole) - 1):
        with pytest.raises(StartupError, match="it is not read"):
            dictionary_in(whole[:cut], KIND)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    with contextlib.suppress(StartupError):
        dictionary_in(raw, KIND)


def test_steps_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = _dumped(Tokenizer(word_index={str(n): n for n in range(50)}))
    monkeypatch.setattr(zoo_pickle, "MAX_STEPS", len(list(pickletools.genops(raw))) - 1)
    with pytest.raises(StartupError, match=r"has more than \d+ steps"):
        dictionary_in(raw, KIND)
