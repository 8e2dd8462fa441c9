"""A discrete-event simulation of arrivals, batcher and one worker: thousands of requests in milliseconds, no clock.

It drives the batcher as `gateway/dispatch.py` does: `expired` and `next_batch` after each event, and again at `due`.
"""

import heapq
from collections.abc import Callable, Iterable
from random import Random
from typing import NamedTuple

from gateway.batcher import Batch, Batcher, QueuedItem, QueueKey

STAGE_LEAD_S = 0.0005
"""How long before the end of a running batch the next one is staged when it is not full."""
MAX_EVENTS_PER_ARRIVAL = 20
"""More than this means that `due` makes its driver spin."""


class Arrival(NamedTuple):
    """One request of one item; `patience_s` is its deadline from arrival on."""

    at_s: float
    rows: int = 1
    patience_s: float = 10.0
    key: QueueKey = QueueKey(0)
    alone: bool = False


class Served(NamedTuple):
    """An item that was run."""

    item: int
    arrived_s: float
    queued_s: float
    sent_s: float
    done_s: float
    deadline_s: float


class Run(NamedTuple):
    """A batch on the worker."""

    sent_s: float
    started_s: float
    done_s: float
    batch: Batch


class Ledger:
    """What became of every arrival."""

    def __init__(self) -> None:
        self.served: list[Served] = []
        self.expired: list[int] = []
        self.refused: list[int] = []
        self.runs: list[Run] = []
        self.wake_ups = 0
        self.idle_while_waiting_s = 0.0
        """Time in which the worker had nothing although items waited in the batcher."""

    def mean_rows(self) -> float:
        """Rows of a batch, on average."""
        return sum(run.batch.rows for run in self.runs) / len(self.runs)

    def queue_times(self) -> list[float]:
        """Seconds that each served item spent in the batcher, ascending."""
        return sorted(served.sent_s - served.queued_s for served in self.served)


class Simulation:
    """One worker with `staged` batches outstanding at most; a batch takes `cost(padded_rows)` seconds."""

    def __init__(
        self,
        batcher: Batcher,
        cost: Callable[[QueueKey, int], float],
        *,
        staged: int = 2,
        full_rows: int = 32,
        prepare_s: float = 0.0,
    ) -> None:
        self.batcher = batcher
        self.cost = cost
        self.staged = staged
        self.full_rows = full_rows
        self.prepare_s = prepare_s
        self.ledger = Ledger()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        self._outstanding = 0
        self._free_s = 0.0
        self._preparing: dict[int, int] = {}
        self._models: set[int] = set()
        self._arrived_s: dict[int, float] = {}
        self._wake_s = float("inf")
        self.on_done: Callable[[Run], None] = lambda _: None
        self.on_expired: Callable[[QueuedItem, float], None] = lambda *_: None
        self.door: Callable[[int, Arrival], bool] = lambda *_: True
        """Whether the item is let in."""

    def run(self, arrivals: Iterable[Arrival]) -> Ledger:
        """Play all arrivals to the end; each of them is then served, expired or refused."""
        for item, arrival in enumerate(arrivals):
            self.arrive(arrival, item)
        now_s = 0.0
        played = 0
        while self._events:
            at_s, _, event = heapq.heappop(self._events)
            if len(self.batcher) and not self._outstanding:
                self.ledger.idle_while_waiting_s += at_s - now_s
            now_s = at_s
            event(now_s)
            self._pump(now_s)
            played += 1
            if played > MAX_EVENTS_PER_ARRIVAL * (len(self._arrived_s) + 1):
                raise RuntimeError(f"the batcher makes its driver spin: {played} events, {self.batcher!r}")
        return self.ledger

    def arrive(self, arrival: Arrival, item: int) -> None:
        """Plan one arrival; also usable while running (a caller that sends its next request after an answer)."""
        self._arrived_s[item] = arrival.at_s
        self._models.add(arrival.key.model)

        def prepared(now_s: float) -> None:
            self._preparing[arrival.key.model] -= arrival.rows
            deadline_s = arrival.at_s + arrival.patience_s
            self.batcher.add(QueuedItem(item, arrival.key, arrival.rows, deadline_s, now_s, alone=arrival.alone))

        def arrived(now_s: float) -> None:
            if not self.door(item, arrival):
                self.ledger.refused.append(item)
                return
            self._preparing[arrival.key.model] = self._preparing.get(arrival.key.model, 0) + arrival.rows
            if self.prepare_s:
                self._at(now_s + self.prepare_s, prepared)
            else:
                prepared(now_s)

        self._at(arrival.at_s, arrived)

    def _pump(self, now_s: float) -> None:
        for late in self.batcher.expired(now_s):
            self.ledger.expired.append(late.item)
            self.on_expired(late, now_s)
        while self._has_room(now_s):
            batch = self.batcher.next_batch(
                now_s,
                worker_idle=self._outstanding == 0,
                expected_rows=lambda model: self._preparing.get(model, 0),
                start_s=max(now_s, self._free_s),
            )
            if batch is None:
                break
            self._send(batch, now_s)
        due_s = self.batcher.due(now_s)
        if due_s is not None and due_s != self._wake_s:
            self._wake_s = due_s
            self._at(due_s, self._woken)

    def _has_room(self, now_s: float) -> bool:
        """The second batch is staged when it is full and of the only model, or else just before the first one ends."""
        if not self._outstanding:
            return True
        full = len(self._models) == 1 and self.batcher.waiting_rows(next(iter(self._models))) >= self.full_rows
        return self._outstanding < self.staged and (full or now_s >= self._free_s - STAGE_LEAD_S)

    def _woken(self, now_s: float) -> None:
        self.ledger.wake_ups += 1
        if now_s >= self._wake_s:
            self._wake_s = float("inf")

    def _send(self, batch: Batch, now_s: float) -> None:
        self._outstanding += 1
        started_s = max(now_s, self._free_s)
        self._free_s = started_s + self.cost(batch.key, batch.padded_rows)
        run = Run(now_s, started_s, self._free_s, batch)
        self.ledger.runs.append(run)

        def done(done_s: float) -> None:
            self._outstanding -= 1
            for item in batch.items:
                arrived_s = self._arrived_s[item.item]
                self.ledger.served.append(Served(item.item, arrived_s, item.queued_s, now_s, done_s, item.deadline_s))
            self.batcher.ran(batch, run.done_s - run.started_s)
            self.on_done(run)

        self._at(self._free_s, done)
        self._at(max(now_s, self._free_s - STAGE_LEAD_S), lambda _: None)

    def _at(self, at_s: float, event: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (at_s, self._order, event))


def repeatable(seed: int) -> Random:
    """The same numbers every time."""
    return Random(seed)  # noqa: S311 - a load, not a secret


def poisson(seed: int, *, rate: float, seconds: float, patience_s: float = 10.0) -> list[Arrival]:
    """Independent callers: exponential gaps, `rate` a second."""
    random = repeatable(seed)
    arrivals = []
    at_s = random.expovariate(rate)
    while at_s < seconds:
        arrivals.append(Arrival(at_s, patience_s=patience_s))
        at_s += random.expovariate(rate)
    return arrivals


def bursts(size: int, *, every_s: float, seconds: float, patience_s: float = 10.0) -> list[Arrival]:
    """`size` requests at the same moment, again and again."""
    times = [number * every_s for number in range(int(seconds / every_s))]
    return [Arrival(at_s, patience_s=patience_s) for at_s in times for _ in range(size)]
