import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from workers.generation.capacity import Capacity, portions, tokens_of


@given(
    sequences=st.integers(1, 64),
    tokens=st.integers(16, 4096),
    context=st.integers(2, 1024),
    rows=st.integers(1, 64),
    longest=st.integers(1, 1024),
)
def test_room_is_enough_and_never_more_than_there_may_be(
    sequences: int, tokens: int, context: int, rows: int, longest: int
) -> None:
    capacity = Capacity(sequences, tokens, context)
    assume(capacity.holds(rows, longest))
    wide, long = capacity.room(rows, longest)
    assert wide >= rows
    assert long >= longest
    assert capacity.holds(wide, long)


def test_room_grows_in_powers_of_two() -> None:
    capacity = Capacity(16, 100_000, 2048)
    assert [capacity.room(rows, longest) for rows, longest in [(1, 3), (3, 65), (5, 100), (16, 1500)]] == [
        (1, 64),
        (4, 128),
        (8, 128),
        (16, 2048),
    ]


@pytest.mark.parametrize(
    ("rows", "longest", "holds"),
    [(4, 100, True), (5, 20, False), (4, 101, False), (1, 128, True), (1, 129, False)],
)
def test_what_is_held(rows: int, longest: int, holds: bool) -> None:
    assert Capacity(4, 400, 128).holds(rows, longest) is holds


@pytest.mark.parametrize(
    ("wanted", "budget_bytes", "expected"),
    [
        (700, 1, 700),
        (None, None, 16 * 512),
        (None, 10**9, 16 * 512),
        (None, 4 * 1000 * 10, 1000),
        (None, 10, 512),
    ],
)
def test_tokens_of_a_cache(wanted: int | None, budget_bytes: int | None, expected: int) -> None:
    assert tokens_of(wanted, 16, 512, 10, budget_bytes) == expected


@pytest.mark.parametrize(
    ("unread", "expected"),
    [
        ([5], [5]),
        ([50], [12]),
        ([3, 3, 3], [3, 3, 3]),
        ([3, 50], [3, 6]),
        ([50, 3], [12]),
        ([4, 4, 4, 4], [4, 4, 4]),
        ([1] * 20, [1] * 12),
        ([3, 7, 3], [3, 6]),
    ],
)
def test_portions_of_prompts(unread: list[int], expected: list[int]) -> None:
    assert portions(unread, 12) == expected


@given(unread=st.lists(st.integers(1, 100), min_size=1), budget=st.integers(1, 64))
def test_portions_keep_the_order_and_the_bound_and_get_on(unread: list[int], budget: int) -> None:
    counts = portions(unread, budget)
    assert counts[:-1] == unread[: len(counts) - 1], "all but the last one are read through"
    assert 1 <= counts[-1] <= unread[len(counts) - 1]
    assert len(counts) * max(counts) <= budget
