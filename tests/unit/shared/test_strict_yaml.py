import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shared.strict_yaml import MAX_BYTES, YamlError, parse, read

BILLION_LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}, *{old}, *{old}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
)


def test_plain_values_and_the_line_of_every_key() -> None:
    document = parse("a: 1\nb:\n  c: [1, two]\n  d: {e: true}\nf: ~\n", "x.yaml")
    assert document.data == {"a": 1, "b": {"c": [1, "two"], "d": {"e": True}}, "f": None}
    assert document.where(("b", "d", "e")) == "x.yaml:4"
    assert document.where(("b", "c", 1)) == "x.yaml:3"
    assert document.where(("b", "nothing")) == "x.yaml:2"
    assert document.where(("nothing",)) == "x.yaml"
    assert document.has(("b", "c"))
    assert not document.has(("c",))


@pytest.mark.parametrize("text", ["", "# only words\n", "---\n", "~\n"])
def test_an_empty_file_is_an_empty_mapping(text: str) -> None:
    assert parse(text, "x.yaml").data == {}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "a is given twice (first on line 1)"),
        ("x:\n  a: 1\n  a: 3\n", 3, "x.a is given twice (first on line 2)"),
        ("a:\n\tb: 1\n", 2, "holds a tab"),
        ("\ta: 1\n", 1, "holds a tab"),
        ("a: !!python/object/apply:os.system ['true']\n", 1, "tag !!python/object/apply:os.system is not allowed"),
        ("!!python/object/apply:os.system ['true']\n", 1, "is not allowed"),
        ("a: 1\nb: !secret x\n", 2, "tag !secret is not allowed"),
        ("a: !!binary aGk=\n", 1, "tag !!binary is not allowed"),
        ("a: !!set {x}\n", 1, "is not allowed"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", 3, "merge keys"),
        ("? [a]\n: 1\n", 1, "a key must be text"),
        ("- a\n- b\n", 1, "must be a mapping"),
        ("just words\n", 1, "must be a mapping"),
        ("a: 1\n---\nb: 2\n", 2, "second document"),
        ("a: 010\n", 1, "010 would not be the decimal number it looks like"),
        ("a: 1\nb: 1:30\n", 2, "1:30 would not be"),
        ("a: [1\nb: 2\n", 2, "is not valid YAML"),
        ("a: *nowhere\n", 1, "is not valid YAML"),
        ("a: 1\nb: \x07\n", 2, "character"),
        ("a: &a [*a]\n", 1, "expand"),
        ("a: " + "[" * 200 + "]" * 200, 1, "nest"),
        (BILLION_LAUGHS, 7, "expand"),
        ("a: &a x\nb: [" + "*a, " * 40 + "]\n", 2, "aliases"),
        ("a: [" + "1," * 50_000 + "]", 1, "holds more than"),
    ],
)
def test_refusals_name_file_and_line(text: str, line: int, words: str) -> None:
    with pytest.raises(YamlError) as caught:
        parse(text, "x.yaml")
    assert caught.value.text.startswith(f"x.yaml:{line}: ")
    assert words in caught.value.text


def test_a_billion_laughs_cost_no_time() -> None:
    started = time.monotonic()
    with pytest.raises(YamlError):
        parse(BILLION_LAUGHS, "x.yaml")
    assert time.monotonic() - started < 2, "RELIABILITY S17 asks for two seconds"


def test_dates_stay_text_and_old_booleans_are_yaml_ones() -> None:
    assert parse("a: 2024-01-02\nb: '007'\nc: 1_000\n", "x").data == {"a": "2024-01-02", "b": "007", "c": 1000}


def test_a_file_that_is_missing_large_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(YamlError, match="can't be read"):
        read(tmp_path / "none.yaml")
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(YamlError, match="larger than"):
        read(large)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(YamlError, match=r"binary.yaml:2: is not UTF-8"):
        read(binary)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8", categories=("L", "N", "Zs"))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text("abcdef", min_size=1), _VALUES, max_size=4))
def test_reads_back_what_a_yaml_writer_wrote(data: dict[str, object]) -> None:
    assert parse(yaml.safe_dump(data, allow_unicode=True), "x").data == data


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    refusal = ""
    try:
        parse(text, "x")
    except YamlError as error:
        refusal = error.text
    assert refusal == "" or refusal.startswith("x:")
