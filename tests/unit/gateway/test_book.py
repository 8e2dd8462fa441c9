import math

from hypothesis import given
from hypothesis import strategies as st

from gateway.book import WIDTH_S, Book
from gateway.request import PROOF_PRIORITY

ROWS = st.tuples(st.integers(1, 3), st.floats(0, 10), st.integers(1, 5))


def test_behind_comes_what_has_a_later_deadline_or_a_worse_priority_in_the_order_of_service() -> None:
    book = Book()
    book.add(2, 1.0, 10)
    book.add(2, 3.0, 20)
    book.add(1, 9.0, 30)
    book.add(3, 0.5, 40)
    assert [one.rows for one in book.behind(2, 2.0)] == [20, 40]
    assert [one.rows for one in book.behind(1, 2.0)] == [30, 10, 20, 40]
    assert book.behind(3, 1.0) == []
    assert book.first_priority == 1


def test_the_servers_own_proofs_are_no_callers_priority() -> None:
    book = Book()
    book.add(PROOF_PRIORITY, 1.0, 1)
    assert book.first_priority is None


def test_a_deadline_that_never_comes_is_after_all_others() -> None:
    book = Book()
    book.add(2, math.inf, 1)
    book.add(2, 1e6, 2)
    assert [one.rows for one in book.behind(2, 1.0)] == [2, 1]


@given(st.lists(ROWS, max_size=50))
def test_what_came_in_goes_out_again(rows: list[tuple[int, float, int]]) -> None:
    book = Book()
    for each in rows:
        book.add(*each)
    behind = book.behind(0, 0.0)
    assert sum(one.rows for one in behind) == sum(each[2] for each in rows)
    assert all(one.deadline_s <= 10 for one in behind)
    assert len(behind) <= 3 * (10 / WIDTH_S + 1)
    for each in reversed(rows):
        book.remove(*each)
    assert book.behind(0, 0.0) == []
