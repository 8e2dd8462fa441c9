import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.generation import Limits, Places, Room, Ticket
from shared.errors import InvalidInput, InvalidOption

ONE, TWO = b"worker-0.1", b"worker-1.1"


def ticket(number: int, *, rows: int = 1, prompt: int = 2, answer: int = 8, deadline_s: float = 10.0) -> Ticket:
    made = Ticket(number, rows, answer, 100, deadline_s)
    made.prompt_tokens = prompt
    return made


def places(sequences: int = 4, tokens: int = 40) -> Places:
    made = Places()
    made.open(ONE, Limits(sequences, tokens))
    return made


def begun(made: Places) -> list[int]:
    found = []
    while (one := made.next()) is not None:
        found.append(one[0].number)
    return found


def test_all_begin_that_have_room() -> None:
    made = places()
    for number in range(1, 7):
        made.wait(ticket(number))
    assert begun(made) == [1, 2, 3, 4]
    assert made.waiting() == 2
    made.ended(ONE, 2)
    assert begun(made) == [5]


def test_the_longest_counts_for_every_sequence() -> None:
    made = places(sequences=4, tokens=40)
    made.wait(ticket(1, answer=18))  # of 20 tokens: two of these are all
    made.wait(ticket(2))
    made.wait(ticket(3))
    assert begun(made) == [1, 2]
    made.ended(ONE, 1)
    assert begun(made) == [3]


def test_a_beam_search_needs_room_for_each_beam() -> None:
    made = places(sequences=4, tokens=40)
    made.wait(ticket(1, rows=3))
    made.wait(ticket(2, rows=2))
    made.wait(ticket(3))
    assert begun(made) == [1]  # the second one does not fit, and nobody overtakes it
    made.ended(ONE, 1)
    assert begun(made) == [2, 3]


def test_the_order_is_priority_then_deadline_then_arrival() -> None:
    made = places(sequences=1)
    for number, priority, deadline_s in ((1, 100, 5.0), (2, 100, 3.0), (3, 1, 9.0), (4, 100, 3.0)):
        one = ticket(number, deadline_s=deadline_s)
        one.priority = priority
        made.wait(one)
    order = []
    while made.waiting():
        order += begun(made)
        made.ended(ONE, order[-1])
    assert order == [3, 2, 4, 1]


def test_the_worker_with_the_most_room() -> None:
    made = places(sequences=2)
    made.open(TWO, Limits(4, 80))
    made.wait(ticket(1))
    assert made.next() is not None
    assert [ticket.number for ticket in made.rooms[TWO].held()] == [1]


def test_a_suspect_shares_no_worker() -> None:
    made = places()
    suspect = ticket(2)
    suspect.alone = True
    made.wait(ticket(1))
    assert begun(made) == [1]
    made.wait(suspect)
    assert begun(made) == []
    made.ended(ONE, 1)
    assert begun(made) == [2]
    made.wait(ticket(3))
    assert begun(made) == []
    suspect.alone = False  # its prompt has gone through
    assert begun(made) == [3]


def test_what_no_worker_could_ever_hold_is_told_so() -> None:
    made = places(sequences=4, tokens=40)
    with pytest.raises(InvalidOption, match=r"options\.beams is 5"):
        made.wait(ticket(1, rows=5))
    with pytest.raises(InvalidInput, match=r"may become 41 tokens.*memory for 40 tokens"):
        made.wait(ticket(2, prompt=1, answer=40))
    assert made.waiting() == 0
    Places().wait(ticket(3, rows=16))  # nobody knows yet


@pytest.mark.parametrize("prompt", [0, 8, 9])
def test_a_prompt_that_leaves_no_room_for_an_answer(prompt: int) -> None:
    with pytest.raises(InvalidInput, match=f"the prompt has {prompt} tokens; the model's context is 8 tokens"):
        Ticket(1, 1, 5, 100, 1.0).fit_into(8, prompt)


def test_an_answer_is_cut_to_the_context() -> None:
    made = Ticket(1, 1, 5, 100, 1.0)
    made.fit_into(8, 6)
    assert (made.answer_tokens, made.length) == (2, 8)


def test_a_closed_worker_takes_no_more_and_goes_with_its_last_text() -> None:
    made = places()
    made.wait(ticket(1))
    assert begun(made) == [1]
    made.close(ONE)
    made.wait(ticket(2))
    assert begun(made) == []
    assert list(made.rooms) == [ONE]
    made.ended(ONE, 1)
    assert not made.rooms
    assert not made.is_open


def test_who_leaves_makes_way() -> None:
    made = places(sequences=2)
    large, small = ticket(1, rows=2), ticket(2)
    first = ticket(0)
    made.wait(first)
    assert begun(made) == [0]
    made.wait(large)
    made.wait(small)
    assert begun(made) == []
    assert made.leave(large)
    assert not made.leave(large)
    assert begun(made) == [2]


def test_what_only_a_lost_worker_could_hold_is_in_nobodys_way() -> None:
    made = places(sequences=2)
    made.open(TWO, Limits(8, 400))
    made.wait(ticket(1, rows=8))
    made.wait(ticket(2))
    made.lost(TWO)
    assert begun(made) == [2]
    made.open(TWO, Limits(8, 400))
    assert begun(made) == [1]


def test_the_slots_are_as_many_as_the_longest_leaves() -> None:
    made = places(sequences=8, tokens=40)
    assert made.slots == 8
    made.wait(ticket(1, answer=18))
    assert made.slots == 2
    assert Places().slots == 1


def test_the_line_is_bounded_by_what_can_run() -> None:
    assert places(sequences=3).waiting_most == 12
    assert Places().waiting_most == 32


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 30)), max_size=30))
def test_a_room_is_never_fuller_than_its_limits(texts: list[tuple[int, int]]) -> None:
    room = Room(Limits(6, 100))
    for number, (rows, answer) in enumerate(texts):
        one = ticket(number, rows=rows, answer=answer)
        if room.has_room(one):
            room.take(one)
    assert room.rows <= 6
    assert room.tokens <= 100


class Everything(RuleBasedStateMachine):
    """Texts come, begin, end and leave, and workers come and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.places = Places()
        self.next = 0
        self.coming: list[Ticket] = []
        self.waiting: list[Ticket] = []
        self.running: dict[int, tuple[Ticket, bytes]] = {}
        self.workers = 0

    @rule(sequences=st.integers(1, 5), tokens=st.integers(20, 120))
    def worker_comes(self, sequences: int, tokens: int) -> None:
        self.workers += 1
        self.places.open(str(self.workers).encode(), Limits(sequences, tokens))
        for one in list(self.waiting):
            try:
                self.places.check(one)
            except (InvalidInput, InvalidOption):
                self.places.leave(one)
                self.waiting.remove(one)

    @precondition(lambda self: self.places.rooms)
    @rule(data=st.data(), dies=st.booleans())
    def worker_goes(self, data: st.DataObject, dies: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.places.rooms)))
        if not dies:
            self.places.close(worker)
            return
        self.places.lost(worker)
        self.running = {number: one for number, one in self.running.items() if one[1] != worker}

    @rule(rows=st.integers(1, 4), answer=st.integers(1, 20), deadline_s=st.floats(0, 9), alone=st.booleans())
    def text_comes(self, rows: int, answer: int, deadline_s: float, alone: bool) -> None:
        self.next += 1
        one = Ticket(self.next, rows, answer, 100, deadline_s)
        one.alone = alone
        self.places.come(one)
        self.coming.append(one)

    @precondition(lambda self: self.coming)
    @rule(data=st.data(), prompt=st.integers(1, 20))
    def text_is_prepared(self, data: st.DataObject, prompt: int) -> None:
        one = data.draw(st.sampled_from(self.coming))
        self.coming.remove(one)
        one.prompt_tokens = prompt
        try:
            self.places.wait(one)
        except (InvalidInput, InvalidOption):
            assert self.places.leave(one)
        else:
            self.waiting.append(one)

    @precondition(lambda self: self.waiting or self.coming)
    @rule(data=st.data())
    def caller_leaves(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.waiting + self.coming))
        assert self.places.leave(one)
        (self.waiting if one in self.waiting else self.coming).remove(one)

    @rule()
    def begin(self) -> None:
        while (found := self.places.next()) is not None:
            one, worker = found
            rooms = [room for room in self.places.rooms.values() if room.is_open]
            able = [each for each in self.waiting if any(room.could_ever_hold(each) for room in rooms)]
            assert one is min(able, key=lambda each: each.rank)
            self.waiting.remove(one)
            self.running[one.number] = one, worker

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def text_ends(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.running)))
        _, worker = self.running.pop(number)
        self.places.ended(worker, number)

    @invariant()
    def no_room_is_over_its_limits(self) -> None:
        for room in self.places.rooms.values():
            assert room.rows <= room.limits.sequences
            assert room.tokens <= room.limits.tokens

    @invariant()
    def nothing_is_lost_and_nothing_is_kept(self) -> None:
        assert sorted(one.number for one in self.places.running()) == sorted(self.running)
        assert self.places.waiting() == len(self.waiting) + len(self.coming)
        assert self.places.is_idle == (not self.running and not self.waiting and not self.coming)


TestEverything = Everything.TestCase
TestEverything.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
