from workers.turns import Turns


def order(turns: "Turns[str]", costs: dict[str, float], count: int) -> str:
    """Who gets the next turns when these always have something to run, at so many seconds each."""
    taken = ""
    for _ in range(count):
        who = turns.next(list(costs))
        turns.took(who)
        turns.charge(who, costs[who])
        taken += who
    return taken


def test_equal_batches_alternate() -> None:
    assert order(Turns(), {"a": 1.0, "b": 1.0}, 6) == "ababab"
    assert order(Turns(), {"a": 1.0, "b": 1.0, "c": 1.0}, 6) == "abcabc"


def test_time_counts_and_not_batches() -> None:
    assert sorted(order(Turns(), {"a": 1.0, "b": 0.25}, 25)).count("a") == 5


def test_batches_that_cost_nothing_alternate_too() -> None:
    assert order(Turns(), {"a": 0.0, "b": 0.0}, 4) == "abab"


def test_who_was_quiet_has_saved_nothing() -> None:
    turns: Turns[str] = Turns()
    order(turns, {"a": 1.0}, 100)
    assert order(turns, {"a": 1.0, "b": 1.0}, 6).count("b") == 3


def test_a_turn_that_was_not_taken_changes_nothing() -> None:
    turns: Turns[str] = Turns()
    order(turns, {"a": 1.0, "b": 1.0}, 3)
    assert [turns.next(["a", "b"]) for _ in range(5)] == ["b"] * 5


def test_only_those_who_have_had_more_are_remembered() -> None:
    turns: Turns[str] = Turns()
    order(turns, {"a": 1.0, "b": 4.0}, 2)
    turns.next(["a", "c"])
    turns.took("a")
    turns.tidy(["a", "c"])
    assert repr(turns) == "<Turns [4.0, 0.0, 1.0]>"
    turns.tidy([])
    assert repr(turns) == "<Turns [4.0]>"
    assert order(turns, {"a": 1.0, "b": 1.0, "c": 1.0}, 6).count("b") == 0


def test_time_without_turns_makes_up_for_what_was_had_before() -> None:
    turns: Turns[str] = Turns()
    order(turns, {"a": 1.0, "b": 100.0}, 2)
    turns.passed(97.0)
    assert order(turns, {"a": 1.0, "b": 1.0}, 6) == "aaabab"


def test_parties_that_cost_nothing_alternate_though_they_are_tidied() -> None:
    turns: Turns[str] = Turns()
    taken = ""
    for _ in range(6):
        turns.tidy(["a", "b"])
        taken += order(turns, {"a": 0.0, "b": 0.0}, 1)
    assert taken == "ababab"


def test_who_has_left_is_forgotten_and_may_come_again() -> None:
    turns: Turns[str] = Turns()
    order(turns, {"a": 1.0, "b": 1.0}, 4)
    turns.forget("a")
    turns.charge("a", 5.0)
    turns.forget("nobody")
    assert repr(turns) == "<Turns [2.0]>"
    assert order(turns, {"a": 1.0, "b": 1.0}, 4).count("a") == 2
