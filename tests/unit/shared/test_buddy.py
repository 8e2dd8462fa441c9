import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.buddy import MIN_BLOCK, Buddy, order_of

PAGES = 64


@pytest.mark.parametrize(
    ("nbytes", "order"), [(0, 0), (1, 0), (4096, 0), (4097, 1), (8192, 1), (8193, 2), (150_528, 6), (1 << 28, 16)]
)
def test_order_is_the_smallest_that_fits(nbytes: int, order: int) -> None:
    assert order_of(nbytes) == order


@pytest.mark.parametrize("nbytes", [0, 1, 2048, 3 * MIN_BLOCK])
def test_only_powers_of_two(nbytes: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Buddy(nbytes)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.integers(0, 1000)), max_size=300))
def test_blocks_never_overlap_and_everything_merges_back(steps: list[tuple[bool, int, int]]) -> None:
    buddy = Buddy(PAGES * MIN_BLOCK)
    held: list[tuple[int, int]] = []
    pages: set[int] = set()
    for take, wanted, pick in steps:
        if take:
            offset = buddy.take(wanted)
            if offset is None:
                assert not _aligned_room(pages, wanted)
                continue
            block = set(range(offset // MIN_BLOCK, offset // MIN_BLOCK + (1 << wanted)))
            assert offset % (MIN_BLOCK << wanted) == 0
            assert max(block) < PAGES
            assert not block & pages
            pages |= block
            held.append((wanted, offset))
        elif held:
            order, offset = held.pop(pick % len(held))
            buddy.give(order, offset)
            pages -= set(range(offset // MIN_BLOCK, offset // MIN_BLOCK + (1 << order)))
    for order, offset in held:
        buddy.give(order, offset)
    assert buddy.largest_free() == PAGES * MIN_BLOCK
    assert buddy.take(buddy.top) == 0


def _aligned_room(pages: set[int], order: int) -> bool:
    """Whether a block of this order could exist at all: what a refusal has to disprove."""
    size = 1 << order
    return any(not pages & set(range(start, start + size)) for start in range(0, PAGES - size + 1, size))


def test_freed_blocks_that_wait_unmerged_never_cause_a_refusal() -> None:
    buddy = Buddy(4 * MIN_BLOCK)
    offsets = [buddy.take(0) for _ in range(4)]
    assert sorted(offset for offset in offsets if offset is not None) == [0, 4096, 8192, 12288]
    assert buddy.take(0) is None
    for offset in offsets:
        assert offset is not None
        buddy.give(0, offset)
    assert buddy.take(2) == 0
