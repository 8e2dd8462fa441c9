import pytest

from workers.loaded import Key
from workers.memory import Held, Room, next_to_go, room_for

MB = 1_000_000


def key(name: str) -> Key:
    return Key(name, "0" * 16)


def held(name: str, megabytes: int, last_s: float = 0.0, **state: float) -> Held:
    return Held(key(name), megabytes * MB, last_s, **state)  # type: ignore[arg-type]  # flags and a time


def room(megabytes: int, *others: Held, now_s: float = 100.0, budget: int = 100) -> Room:
    return room_for(key("new"), megabytes * MB, others, budget * MB, now_s)


def test_what_fits_needs_nobody_to_go() -> None:
    assert room(100) == Room()
    assert room(40, held("a", 60)) == Room()
    assert room(40, held("a", 60, busy=True, pinned=True)) == Room()


def test_the_longest_idle_goes_first() -> None:
    others = [held("a", 30, 3.0), held("b", 30, 1.0), held("c", 30, 2.0)]
    assert room(40, *others).evict == [key("b")]
    assert room(41, *others).evict == [key("b"), key("c")]


def test_nobody_goes_without_need() -> None:
    others = [held("small", 10, 1.0), held("empty", 0, 2.0), held("large", 60, 3.0), held("last", 30, 4.0)]
    assert room(50, *others).evict == [key("large")], "the small one alone would not do, and is not needed beside it"
    assert room(70, *others).evict == [key("small"), key("large")]


def test_pinned_ones_and_those_in_use_never_go() -> None:
    others = [held("pinned", 40, 1.0, pinned=True), held("busy", 30, 2.0, busy=True), held("idle", 30, 3.0)]
    assert room(30, *others).evict == [key("idle")]
    assert room(31, *others) == Room(wait=True)


def test_one_that_has_just_come_stays_for_a_while() -> None:
    others = [held("fresh", 50, 1.0, kept_until_s=105.0), held("fresher", 40, 2.0, kept_until_s=106.0)]
    assert room(50, *others) == Room(wait=True, until_s=105.0)
    assert room(50, *others, now_s=105.0).evict == [key("fresh")]


def test_what_can_never_fit_is_refused_in_one_sentence() -> None:
    assert room(101).refusal == "model new needs 101 MB, and worker.memory_budget_bytes is 100 MB: raise it"
    others = [held("a", 40, pinned=True), held("b", 30, pinned=True, busy=True), held("c", 30)]
    assert room(31, *others).refusal == (
        "model new needs 31.0 MB, and worker.memory_budget_bytes is 100 MB, of which a (40.0 MB), b (30.0 MB) may not "
        "be given up: raise it, or set `load: on_demand` in their model.yaml"
    )
    assert (
        room(31, *others).told
        == "there is no room for model new now (worker.memory_budget_bytes; the log has the details)"
    )
    assert room(101, *others).told == room(101).told == room(101).refusal, "its own size is no secret"
    assert room(30, *others).evict == [key("c")]


def test_a_sentence_names_a_few_and_counts_the_rest() -> None:
    refusal = room(1, *(held(f"m{number}", 10, pinned=True) for number in range(10))).refusal
    assert "m7 (10.0 MB) and 2 more may not be given up" in refusal


def test_a_version_is_not_in_its_own_way() -> None:
    assert room_for(key("a"), 60 * MB, [held("a", 60, pinned=True)], 100 * MB, 0.0).refusal == ""


@pytest.mark.parametrize(("megabytes", "names"), [(10, []), (40, ["busy"]), (50, ["busy", "idle"]), (90, [])])
def test_who_goes_next_may_be_in_use_but_neither_pinned_nor_fresh(megabytes: int, names: list[str]) -> None:
    others = [
        held("pinned", 20, 0.0, pinned=True),
        held("busy", 30, 1.0, busy=True),
        held("idle", 30, 2.0),
        held("fresh", 10, 3.0, kept_until_s=101.0, busy=True),
    ]
    gone = next_to_go(megabytes * MB, others, 100 * MB, 100.0)
    assert [each.name for each in gone] == names
