"""Loads on the virtual server, and what came of them."""

import asyncio
from collections.abc import Callable

from tests.support import virtual_time
from tests.support.simulation import Arrival
from tests.support.virtual_server import Call, VirtualServer

REPLY_S = 0.001
"""From the gateway's answer until its caller has it."""
Span = tuple[float, float]


def play(make: Callable[[], VirtualServer], arrivals: list[Arrival]) -> "Book":
    """Open loop: each call starts at its time, whatever became of the others."""

    async def main() -> Book:
        server, loop = make(), asyncio.get_running_loop()
        start_s, calls = loop.time(), []

        def start(number: int, arrival: Arrival) -> None:
            model = arrival.key.model or 1
            calls.append(loop.create_task(server.call(number, arrival.patience_s, model=model)))

        for number, arrival in enumerate(arrivals):
            loop.call_at(start_s + arrival.at_s, start, number, arrival)
        last_s = start_s + max(arrival.at_s for arrival in arrivals)
        loop.call_at(last_s, (all_came := asyncio.Event()).set)
        await all_came.wait()
        return await _closed(server, calls, start_s)

    return virtual_time.run(main)


def closed_loop(make: Callable[[], VirtualServer], callers: int, each: int, patience_s: float = 10.0) -> "Book":
    """Callers that send their next request when the last one is answered."""

    async def main() -> Book:
        server, loop = make(), asyncio.get_running_loop()

        async def caller(first: int) -> None:
            for number in range(first, first + each):
                await server.call(number, patience_s)

        start_s = loop.time()
        return await _closed(server, [loop.create_task(caller(number * each)) for number in range(callers)], start_s)

    return virtual_time.run(main)


async def _closed(server: VirtualServer, calls: "list[asyncio.Task[None]]", start_s: float) -> "Book":
    await asyncio.gather(*calls)
    await asyncio.sleep(10.0)  # of virtual time: what was given up comes back from pool and workers
    try:
        assert server.wrong == []
        assert server.at_rest()
        return Book(server, start_s)
    finally:
        server.close()


class Book:
    """What came of a load, counted from its callers and from what the workers computed; times from its start on."""

    def __init__(self, server: VirtualServer, start_s: float) -> None:
        self.server = server
        self.start_s = start_s
        self.calls: list[Call] = sorted(server.calls)
        self.answered = [call for call in self.calls if call.outcome == "ok"]
        self.in_time = [call for call in self.answered if call.ended_s + REPLY_S <= call.deadline_s]
        self.refused = [call for call in self.calls if call.outcome != "ok" and call.ended_s == call.arrived_s]
        expired = [c for c in self.calls if c.outcome == "deadline_exceeded" and c.ended_s > c.arrived_s]
        self.late = len(expired) + len(self.answered) - len(self.in_time)
        """Admitted, and not answered in time."""
        self.ran = server.router.ran
        self.rows_for_nobody = sum(ran.rows for ran in self.ran) - len(self.in_time)

    def goodput(self, first_s: float, last_s: float) -> float:
        """Answers in time per second that were given in this while."""
        answered = sum(first_s <= call.ended_s - self.start_s < last_s for call in self.in_time)
        return answered / (last_s - first_s)

    def idle_share(self) -> float:
        """Of the time in which any caller waited for an answer, the part in which no worker computed."""
        waiting = _union([(call.arrived_s, call.ended_s) for call in self.answered])
        busy = _union([(ran.started_s, ran.done_s) for ran in self.ran])
        waited_s = _length(waiting)
        return (_length(_union(waiting + busy)) - _length(busy)) / waited_s

    def queue_times(self) -> list[float]:
        """Seconds in the batcher and staged, ascending."""
        return sorted(call.queued_s for call in self.answered)


def _union(spans: list[Span]) -> list[Span]:
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _length(spans: list[Span]) -> float:
    return sum(end - start for start, end in spans)
