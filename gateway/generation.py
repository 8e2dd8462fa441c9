"""Who may generate text, and where: one version's waiting texts, and what its workers' caches have room for. Pure.

A text takes room for the longest that it may become (prompt and answer) for each of its sequences, from its first step
to its last piece: nothing that has begun is ever thrown out for want of memory. A worker's cache is as long as the
longest of its texts for every sequence in it, so what counts is sequences × longest.

What waits goes by priority, then by the earliest deadline. Nobody overtakes the first in line, however little he needs:
a text that needs much would wait for ever.
"""

from bisect import insort
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from shared.errors import InvalidInput, InvalidOption

ROUNDS = 4
"""So many times what runs may wait. What is behind that waits longer than callers do; the door's forecast refuses most
of it before."""
UNKNOWN_SEQUENCES = 8
"""Of a version that no worker has loaded yet: as many as the smallest worker is given, so that some may wait for it."""


class Limits(NamedTuple):
    """What one worker holds of one version."""

    sequences: int
    tokens: int
    """Sequences × the longest one."""


Rank: TypeAlias = tuple[int, float, int]


class Ticket:
    """One text from the door to its end."""

    __slots__ = ("alone", "answer_tokens", "began_s", "deadline_s", "number", "priority", "prompt_tokens", "rows")

    def __init__(self, number: int, rows: int, answer_tokens: int, priority: int, deadline_s: float) -> None:
        """`rows`: its sequences. `answer_tokens`: the most that it adds."""
        self.number = number
        self.rows = rows
        self.answer_tokens = answer_tokens
        self.priority = priority
        self.deadline_s = deadline_s
        self.prompt_tokens = 0
        """0: not known yet."""
        self.began_s = 0.0
        """When a worker got it."""
        self.alone = False
        """It was with a worker that died, and may have been the cause: it takes no other text with it."""

    @property
    def length(self) -> int:
        """Tokens of each of its sequences, at most."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def rank(self) -> Rank:
        """The smallest goes first."""
        return self.priority, self.deadline_s, self.number

    def fit_into(self, context: int, prompt_tokens: int) -> None:
        """Its prompt is known now. Raises InvalidInput when that leaves no room for an answer."""
        if not 1 <= prompt_tokens < context:
            raise InvalidInput(
                f"the prompt has {prompt_tokens} tokens; the model's context is {context} tokens, prompt and answer "
                "together"
            )
        self.prompt_tokens = prompt_tokens
        self.answer_tokens = min(self.answer_tokens, context - prompt_tokens)


class Room:
    """What is reserved of one worker's cache."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.is_open = True
        """Whether it takes more."""
        self.cap: int | None = None
        """Sequences that its memory was enough for; None: it never was not. One text that has more still runs alone."""
        self._held: dict[int, Ticket] = {}

    @property
    def sequences(self) -> int:
        """At a time."""
        return self.limits.sequences if self.cap is None else min(self.cap, self.limits.sequences)

    @property
    def rows(self) -> int:
        """Sequences that have a place."""
        return sum(ticket.rows for ticket in self._held.values())

    @property
    def tokens(self) -> int:
        """Reserved: sequences × the longest one."""
        return self._tokens_with(0, 0)

    def _tokens_with(self, rows: int, length: int) -> int:
        longest = max((ticket.length for ticket in self._held.values()), default=0)
        return (self.rows + rows) * max(longest, length)

    def could_ever_hold(self, ticket: Ticket) -> bool:
        """With nothing else in it."""
        return ticket.rows <= self.limits.sequences and ticket.rows * ticket.length <= self.limits.tokens

    def has_room(self, ticket: Ticket) -> bool:
        """Now."""
        if self._held and (ticket.alone or any(held.alone for held in self._held.values())):
            return False
        sequences = self.sequences if self._held else self.limits.sequences
        tokens = self._tokens_with(ticket.rows, ticket.length)
        return self.rows + ticket.rows <= sequences and tokens <= self.limits.tokens

    def take(self, ticket: Ticket) -> None:
        """Reserve."""
        self._held[ticket.number] = ticket

    def give_back(self, number: int) -> None:
        """The worker has sent its last piece; nothing happens for one that is not here."""
        self._held.pop(number, None)

    def held(self) -> list[Ticket]:
        """Whose places they are, in order of arrival."""
        return list(self._held.values())

    def __repr__(self) -> str:
        return f"<Room {self.rows}/{self.sequences} sequences, {self.tokens}/{self.limits.tokens} tokens>"


class Places:
    """Of one version: who waits, and the rooms of the workers that have it, by the workers' identity."""

    def __init__(self) -> None:
        self.rooms: dict[bytes, Room] = {}
        self._coming: dict[int, Ticket] = {}
        self._line: list[tuple[Rank, Ticket]] = []

    # ------------------------------------------------------------ workers

    def open(self, worker: bytes, limits: Limits) -> None:
        """A worker has loaded the version, perhaps again."""
        room = self.rooms.setdefault(worker, Room(limits))
        room.limits, room.is_open = limits, True

    def cap(self, worker: bytes, rows: int | None) -> None:
        """So many sequences fit its memory; None: as many as it has said."""
        if worker in self.rooms:
            self.rooms[worker].cap = rows

    def close(self, worker: bytes) -> None:
        """It takes no more; what it has it may still finish."""
        room = self.rooms.get(worker)
        if room is not None:
            room.is_open = False
            self._sweep(worker)

    def close_all(self) -> None:
        """No worker takes more."""
        for worker in list(self.rooms):
            self.close(worker)

    def lost(self, worker: bytes) -> None:
        """It is dead, and what was reserved with it gone."""
        self.rooms.pop(worker, None)

    @property
    def is_open(self) -> bool:
        """Whether any worker takes texts."""
        return any(room.is_open for room in self.rooms.values())

    @property
    def sequences(self) -> int:
        """Of all workers that take texts; a guess while there is none."""
        return sum(room.sequences for room in self.rooms.values() if room.is_open) or UNKNOWN_SEQUENCES

    @property
    def slots(self) -> int:
        """Sequences that fit if all are as long as the longest that runs, or is first in line; at least 1."""
        known = [ticket.length for ticket in self.running()] + [ticket.length for _, ticket in self._line[:1]]
        longest = max(known, default=1)
        rooms = [room for room in self.rooms.values() if room.is_open]
        return max(sum(min(room.sequences, room.limits.tokens // longest) for room in rooms), 1) if rooms else 1

    @property
    def waiting_most(self) -> int:
        """How many texts may wait."""
        return ROUNDS * self.sequences

    # ------------------------------------------------------------ texts

    def come(self, ticket: Ticket) -> None:
        """It is past the door, and its prompt is not known yet."""
        self._coming[ticket.number] = ticket

    def wait(self, ticket: Ticket) -> None:
        """Its prompt is known, or it is to begin once more. Raises as `check`."""
        self.check(ticket)
        self._coming.pop(ticket.number, None)
        insort(self._line, (ticket.rank, ticket))

    def leave(self, ticket: Ticket) -> bool:
        """It waits no longer; False when it did not wait."""
        if self._coming.pop(ticket.number, None) is not None:
            return True
        place = next((place for place, (_, one) in enumerate(self._line) if one is ticket), None)
        if place is not None:
            del self._line[place]
        return place is not None

    def check(self, ticket: Ticket) -> None:
        """Could any worker ever hold it? Raises InvalidOption, InvalidInput; nothing while there is none to ask."""
        rooms = [room for room in self.rooms.values() if room.is_open]
        if not rooms or any(room.could_ever_hold(ticket) for room in rooms):
            return
        sequences, tokens = max(room.limits for room in rooms)
        if ticket.rows > sequences:
            raise InvalidOption(
                f"options.beams is {ticket.rows}; this model generates at most {sequences} sequences at a time"
            )
        each = f"{ticket.rows} sequences of " if ticket.rows > 1 else ""
        raise InvalidInput(
            f"the text may become {each}{ticket.length} tokens, prompt and options.max_tokens together; there is "
            f"memory for {tokens} tokens of this model in all"
        )

    def next(self) -> tuple[Ticket, bytes] | None:
        """The first in line and the worker with the most room for it; None while there is no room for that one.

        It is reserved there, and out of the line.
        """
        rooms = [(worker, room) for worker, room in self.rooms.items() if room.is_open]
        for place, (_, ticket) in enumerate(self._line):
            fitting = [(worker, room) for worker, room in rooms if room.has_room(ticket)]
            if fitting:
                worker, room = max(fitting, key=lambda found: _free(found[1]))
                room.take(ticket)
                del self._line[place]
                return ticket, worker
            if any(room.could_ever_hold(ticket) for _, room in rooms):
                return None
            # It waits for a worker that is lost, and is in nobody's way meanwhile.
        return None

    def ended(self, worker: bytes, number: int) -> None:
        """A worker is done with a text, or never got it: its room is free."""
        room = self.rooms.get(worker)
        if room is not None:
            room.give_back(number)
            self._sweep(worker)

    def _sweep(self, worker: bytes) -> None:
        room = self.rooms[worker]
        if not room.is_open and not room.held():
            del self.rooms[worker]

    # ------------------------------------------------------------ shown

    def waiting(self) -> int:
        """Texts that no worker has."""
        return len(self._line) + len(self._coming)

    def in_line(self) -> list[Ticket]:
        """Those of them whose prompt is known, in their order."""
        return [ticket for _, ticket in self._line]

    def ahead_of(self, priority: int, deadline_s: float) -> Iterator[Ticket]:
        """Who waits and would begin before a text that comes now."""
        for ticket in (*self._coming.values(), *self.in_line()):
            if (ticket.priority, ticket.deadline_s) <= (priority, deadline_s):
                yield ticket

    def running(self) -> list[Ticket]:
        """Those that workers have."""
        return [ticket for room in self.rooms.values() for ticket in room.held()]

    @property
    def is_idle(self) -> bool:
        """Nobody waits and nothing runs."""
        return not self.waiting() and not self.running()

    def __repr__(self) -> str:
        return f"<Places waiting={self.waiting()} rooms={list(self.rooms.values())}>"


def _free(room: Room) -> tuple[int, int]:
    return room.sequences - room.rows, room.limits.tokens - room.tokens
