"""Keys tell apart everything that an answer depends on; the store never holds more than its budget, nor too long."""

import tracemalloc
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cache import ENTRY_BYTES, Made, ResultCache, Store, digest_of, key_of
from shared.errors import InvalidInput
from shared.pipeline import Kind, RawInput
from shared.results import Classification, Detection, Detections, Embedding, Label, Result, Tensors, Text
from shared.tensors import RawTensor, Tensor

MADE = Made("photos", "a" * 16, "1" * 16, 1)
NAMES = st.text(max_size=4)
TENSORS = st.builds(
    RawTensor, NAMES, NAMES, st.lists(st.integers(0, 300), max_size=3).map(tuple), st.binary(max_size=4)
)
INPUTS = st.builds(
    RawInput,
    kind=st.sampled_from(["image", "text", "tensors"]),
    data=st.binary(max_size=4),
    tensors=st.lists(TENSORS, max_size=2).map(tuple),
)
MADES = st.builds(Made, NAMES, NAMES, NAMES, st.integers(0, 3))
QUESTIONS = st.tuples(MADES, st.lists(INPUTS, max_size=2), st.binary(max_size=3))


def key(made: Made = MADE, data: bytes = b"x", options: bytes = b"", kind: Kind = "image") -> bytes:
    return key_of(made, [digest_of(RawInput(kind=kind, data=data))], options)


@given(QUESTIONS, QUESTIONS)
def test_keys_are_equal_exactly_when_questions_are(
    one: tuple[Made, list[RawInput], bytes], other: tuple[Made, list[RawInput], bytes]
) -> None:
    keys = [key_of(made, [digest_of(raw) for raw in inputs], options) for made, inputs, options in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


def test_every_part_matters() -> None:
    keys = [
        key(),
        key(data=b"y"),
        key(kind="text"),
        key(options=b"o"),
        *(key(MADE._replace(**{field: value})) for field, value in zip(MADE._fields, ("z", "z", "z", 2), strict=True)),
        key_of(MADE, [digest_of(RawInput(kind="image", data=b"x"))] * 2, b""),
        key_of(MADE, [], b""),
        key_of(MADE, [digest_of(RawInput(kind="image", data=b"x"))], b"", partial=True),
    ]
    assert all(one != other for one, other in combinations(keys, 2))


def test_bytes_can_not_move_from_one_part_to_the_next() -> None:
    def tensors(*parts: tuple[str, str, tuple[int, ...], bytes]) -> bytes:
        return digest_of(RawInput(kind="tensors", tensors=tuple(RawTensor(*part) for part in parts)))

    digests = [
        tensors(("ab", "c", (1, 2), b"xy")),
        tensors(("a", "bc", (1, 2), b"xy")),
        tensors(("ab", "c", (2, 1), b"xy")),
        tensors(("ab", "c", (1, 2, 1), b"xy")),
        tensors(("ab", "c", (1, 2), b"x"), ("y", "", (), b"")),
        tensors(("ab", "c", (1,), b"x"), ("ab", "c", (1,), b"y")),
        tensors(("ab", "c", (1,), b"y"), ("ab", "c", (1,), b"x")),
    ]
    assert len(set(digests)) == len(digests)


def test_a_view_has_the_key_of_its_bytes() -> None:
    buffer = memoryview(b"..photo..")[2:7]
    assert digest_of(RawInput(kind="image", data=buffer)) == digest_of(RawInput(kind="image", data=b"photo"))
    assert digest_of(RawInput(kind="text", data="\ud800".encode(errors="surrogatepass")))


LABEL = Label(3, "cat", 0.5)
RESULTS: list[Result] = [
    Classification([LABEL]),
    Detections([Detection(LABEL, 1.0, 2.0, 3.0, 4.0)], 640, 480),
    Embedding([0.1, float("inf")]),
    Tensors([Tensor("x", "UINT8", (1, 2), b"\x00\xff")]),
    Text("straße"),
]


def test_all_results_come_back_as_copies() -> None:
    cache = ResultCache(100_000, 60.0)
    cache.put(b"k", RESULTS, 0.0)
    found = cache.get(b"k", 1.0)
    assert found == RESULTS
    assert found is not None
    assert isinstance(found[0], Classification)
    found[0].labels.clear()
    assert cache.get(b"k", 1.0) == RESULTS
    assert (cache.store.hits, cache.store.misses) == (2, 0)


def test_answers_with_failures_are_not_kept() -> None:
    cache = ResultCache(100_000, 60.0)
    cache.put(b"k", [Text("fine"), InvalidInput("inputs[1] is no image")], 0.0)
    assert cache.get(b"k", 0.0) is None
    assert (len(cache.store), cache.store.nbytes, cache.store.misses) == (0, 0, 1)


def test_what_is_too_old_is_gone_however_often_it_was_used() -> None:
    store: Store[str] = Store(10_000, 10.0)
    store.put(b"k", "kept", 10, 100.0)
    assert [store.get(b"k", now) for now in (100.0, 105.0, 109.9, 110.0)] == ["kept"] * 3 + [None]
    assert (len(store), store.nbytes, store.evictions) == (0, 0, 0)
    store.put(b"k", "again", 10, 200.0)
    store.put(b"k", "newer", 10, 205.0)
    assert store.get(b"k", 212.0) == "newer"
    assert store.nbytes == 10 + ENTRY_BYTES


def test_what_was_used_last_stays() -> None:
    store: Store[int] = Store(4 * (100 + ENTRY_BYTES), 60.0)
    for number in range(4):
        store.put(bytes([number]), number, 100, 0.0)
    assert store.get(b"\0", 1.0) == 0
    store.put(b"\4", 4, 100, 2.0)
    assert [store.get(bytes([number]), 3.0) for number in range(5)] == [0, None, 2, 3, 4]
    assert store.evictions == 1


def test_one_large_answer_does_not_push_out_all_others() -> None:
    store: Store[int] = Store(100_000, 60.0)
    store.put(b"a", 1, 100, 0.0)
    store.put(b"b", 2, 90_000, 0.0)
    assert (store.get(b"a", 0.0), store.get(b"b", 0.0)) == (1, None)
    store.put(b"a", 3, 90_000, 0.0)  # what is not kept must not leave the old one behind
    assert store.get(b"a", 0.0) is None


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3000), st.floats(0, 30)), max_size=100))
def test_the_budget_is_never_exceeded(puts: list[tuple[int, int, float]]) -> None:
    store: Store[int] = Store(5000, 10.0)
    now_s, sizes = 0.0, {}
    for number, nbytes, later_s in puts:
        now_s += later_s
        store.put(bytes([number]), nbytes, nbytes, now_s)
        sizes[bytes([number])] = nbytes + ENTRY_BYTES
        assert store.nbytes <= 5000
        assert store.nbytes == sum(size for kept, size in sizes.items() if kept in store._entries)


@pytest.mark.parametrize("budget", [0, 1])
def test_without_room_nothing_is_kept(budget: int) -> None:
    cache = ResultCache(budget, 60.0)
    cache.put(b"k", RESULTS, 0.0)
    assert cache.get(b"k", 0.0) is None


def test_an_entry_takes_no_more_than_is_counted() -> None:
    cache, answer = ResultCache(100_000_000, 60.0), [Classification([LABEL])]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(5000):
            cache.put(number.to_bytes(32, "little"), answer, float(number) / 1000)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(cache.store) == 5000
    assert 0.5 * cache.store.nbytes < taken <= cache.store.nbytes
