"""When would a text that comes now begin? Learned from texts that have ended. Pure policy of the gateway process.

Refused is what could not even begin within its deadline. One that begins too late to reach its `max_tokens` is not:
most texts end before that, and what has come until then is worth something to whoever reads along.
"""

from collections.abc import Iterable
from heapq import heapify, heapreplace
from typing import NamedTuple

from gateway.generation import ROUNDS, Places, Ticket
from shared.errors import DeadlineExceeded, Overloaded

MEMORY = 0.95
"""Weight of what was known before the newest text: about the last twenty count."""
RETRY_MS = (10, 2000)
PORTION_S, LEAST_PORTION = 0.1, 16
"""About so long a step of a worker reads prompts, or so many tokens of them (`workers.generation.stepper`)."""


class Ask(NamedTuple):
    """What stands at the door."""

    priority: int
    deadline_s: float
    texts: int
    """Of one request."""


class Pace:
    """Seconds for a token, and how much of what they may add texts do add."""

    def __init__(self) -> None:
        self.step_s = 0.0
        """Of one step of a full worker, as measured in warm-up."""
        self._seconds = self._tokens = self._allowed = 0.0
        self.prefill_s = 0.0
        """Of one token of a prompt, as measured in warm-up."""

    def seed(self, step_s: float, prefill_s_per_token: float) -> None:
        """From a worker's warm-up; what has been seen since counts for more."""
        self.step_s = max(0.0, step_s)
        self.prefill_s = max(0.0, prefill_s_per_token)

    def ended(self, ticket: Ticket, tokens: int, now_s: float) -> None:
        """A text came to its own end after so many tokens."""
        if tokens < 1:
            return
        self._seconds = self._seconds * MEMORY + max(0.0, now_s - ticket.began_s)
        self._tokens = self._tokens * MEMORY + tokens
        self._allowed = self._allowed * MEMORY + max(tokens, ticket.answer_tokens)

    @property
    def token_s(self) -> float:
        """From one token of a text to its next: other texts, models and gateways have their turns in between."""
        return self._seconds / self._tokens if self._tokens else self.step_s

    @property
    def share(self) -> float:
        """Of `max_tokens`; all of them until a text has shown otherwise."""
        return self._tokens / self._allowed if self._allowed else 1.0

    def takes_s(self, ticket: Ticket) -> float:
        """How long a worker should have this text."""
        return ticket.answer_tokens * self.share * self.token_s + ticket.prompt_tokens * self.prefill_s

    @property
    def beat_s(self) -> float:
        """How long one step of a worker may take, with its part of the prompts."""
        return max(self.step_s, self.token_s) + max(PORTION_S, LEAST_PORTION * self.prefill_s)

    def quiet_s(self, ticket: Ticket) -> float:
        """How long it may bring no piece: its prompt and a step, or of a beam search all of it."""
        if ticket.rows > 1:
            return self.takes_s(ticket)
        return ticket.prompt_tokens * self.prefill_s + self.token_s

    def begins_in_s(self, places: Places, ahead: Iterable[Ticket], now_s: float) -> float:
        """Seconds until a place is free for one more behind those `ahead`: each takes the first that becomes free."""
        busy: list[float] = []
        for ticket in places.running():
            left_s = ticket.began_s + self.takes_s(ticket) - now_s
            # One that is late already may end at any time: half of a usual text, as one that is half way.
            busy += [left_s if left_s > 0 else self.takes_s(ticket) / 2] * ticket.rows
        count = places.slots
        free_s = sorted(busy)[-count:] if len(busy) >= count else [0.0] * (count - len(busy)) + busy
        heapify(free_s)
        for ticket in ahead:
            takes_s = self.takes_s(ticket)
            for _ in range(min(ticket.rows, count)):
                heapreplace(free_s, free_s[0] + takes_s)
        return free_s[0]

    def check(self, places: Places, ask: Ask, now_s: float) -> None:
        """Let in what may begin in time.

        Raises:
            DeadlineExceeded: its time is over.
            Overloaded: too many wait, or it would not begin in time; carries when to come back.
        """
        budget_s = ask.deadline_s - now_s
        if budget_s <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        if places.is_idle:
            return  # a wrong forecast must be able to prove itself wrong; and one request of many texts is let in
        begins_s = self.begins_in_s(places, places.ahead_of(ask.priority, ask.deadline_s), now_s)
        if places.waiting() + ask.texts > places.waiting_most:
            raise Overloaded(
                f"{places.waiting()} texts wait to be begun; at most {places.waiting_most} may: {ROUNDS} times "
                "what runs (generation.max_sequences of model.yaml)",
                retry_after_ms=_retry_ms(begins_s),
            )
        if begins_s > budget_s:
            raise Overloaded(
                f"the text would begin in about {begins_s * 1e3:.0f} ms, the deadline leaves {budget_s * 1e3:.0f} ms",
                retry_after_ms=_retry_ms(begins_s - budget_s),
            )


def _retry_ms(wait_s: float) -> int:
    return min(max(round(wait_s * 1e3), RETRY_MS[0]), RETRY_MS[1])
