import pytest

from gateway.openings import Openings

A, B, C = b"pool-0.1", b"pool-1.1", b"pool-2.1"


@pytest.fixture
def three() -> Openings:
    """Three processes at work, with model 1."""
    openings = Openings()
    for process in (A, B, C):
        openings.came(process, [1])
    for process, model in openings.due():
        openings.built(process, model)
    assert openings.open() == [1]
    return openings


def test_at_the_start_all_build_everything_at_once() -> None:
    openings = Openings()
    openings.came(A, [1, 2])
    openings.came(B, [1, 2])
    assert openings.due() == [(A, 1), (A, 2), (B, 1), (B, 2)]
    assert openings.due() == []
    openings.built(A, 1)
    assert openings.open() == [1], "the other one takes no jobs yet"
    assert openings.open() == []


def test_later_one_after_another_and_open_when_the_last_one_was_asked(three: Openings) -> None:
    three.wanted(2)
    for process in (A, B, C):
        assert three.open() == []
        assert (three.due(), three.due()) == ([(process, 2)], [])
        if process != C:
            three.built(process, 2)
    assert three.open() == [2], "the last one takes no job before it has built it"
    three.built(C, 2)
    assert three.due() == []


def test_one_that_comes_meanwhile_need_not_wait(three: Openings) -> None:
    three.wanted(2)
    assert three.due() == [(A, 2)]
    three.came(b"pool-0.2", [1, 2])
    assert three.due() == [(b"pool-0.2", 1), (b"pool-0.2", 2)]
    three.built(A, 2)
    assert three.due() == [(B, 2)], "and does not keep the others waiting"


def test_one_that_dies_while_it_builds_lets_the_next_one(three: Openings) -> None:
    three.wanted(2)
    assert three.due() == [(A, 2)]
    three.left(A)
    assert three.due() == [(B, 2)]
    three.built(A, 2)  # on its way when it was told to leave
    three.built(B, 2)
    assert (three.due(), three.open()) == ([(C, 2)], [2])


def test_the_last_one_to_be_asked_may_leave(three: Openings) -> None:
    three.wanted(2)
    for process in (A, B):
        assert three.due() == [(process, 2)]
        three.built(process, 2)
        assert three.open() == []
    three.left(C)
    assert three.open() == [2]


def test_a_refusal_lets_the_next_one_too(three: Openings) -> None:
    three.wanted(2)
    assert three.due() == [(A, 2)]
    three.refused(A, 2)
    assert three.due() == [(B, 2)]
    assert three.open() == []


def test_what_is_closed_is_asked_of_nobody(three: Openings) -> None:
    three.wanted(2)
    three.wanted(3)
    assert three.due() == [(A, 2), (A, 3)]
    three.built(A, 2)
    three.closed(2)
    three.built(A, 3)
    assert three.due() == [(B, 3)]
    three.closed(3)
    assert (three.due(), three.open()) == ([], [])
