from gateway.inflight import InFlight
from shared.arena import Arena


def test_an_entry_leaves_once_by_its_answer() -> None:
    table: InFlight[str] = InFlight()
    table.add(1, "a", "p", (), 0.0)
    entry = table.answered(1)
    assert entry is not None
    assert (entry.job, entry.holder) == ("a", "p")
    assert table.answered(1) is None
    assert table.late == 1
    assert table.lost("p") == []
    assert len(table) == 0


def test_death_of_one_holder_takes_exactly_its_entries_oldest_first() -> None:
    table: InFlight[str] = InFlight()
    for number, (job, holder) in enumerate([("a", "p"), ("b", "q"), ("c", "p")]):
        table.add(number, job, holder, (), 0.0)
    assert [entry.job for entry in table.lost("p")] == ["a", "c"]
    assert repr(table) == "InFlight(q:[1])"


def test_the_oldest_entry_is_what_the_holder_works_on() -> None:
    table: InFlight[str] = InFlight()
    table.add(1, "a", "p", (), 0.0)
    table.add(2, "b", "p", (), 0.0)
    oldest = table.oldest("p")
    assert oldest is not None
    assert oldest.job == "a"
    table.answered(1)
    following = table.oldest("p")
    assert following is not None
    assert following.job == "b"
    assert table.oldest("nobody") is None
    assert table.count("p") == 1


def test_slots_are_quarantined_until_the_answer() -> None:
    arena = Arena.create(1 << 20)
    table: InFlight[str] = InFlight()
    slot = arena.lease(4096)
    assert slot is not None
    table.add(1, "a", "p", [slot], 0.0)
    slot.close()  # its request has gone
    assert arena.stats().quarantined_bytes == 4096
    table.answered(1)
    assert arena.stats().quarantined_bytes == arena.stats().leased_bytes == 0
    arena.close()


def test_slots_come_back_with_the_death_of_their_holder() -> None:
    arena = Arena.create(1 << 20)
    table: InFlight[str] = InFlight()
    slot = arena.lease(4096)
    assert slot is not None
    table.add(1, "a", "p", [slot], 0.0)
    slot.close()
    table.lost("p")
    assert arena.stats().free_bytes == arena.nbytes
    arena.close()
