"""An open loop of real calls for end-to-end tests: each one at its planned time, with what became of it.

Small on purpose; what measures is bench/load.py.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from headrace import AsyncClient, InferenceError
from headrace.client_results import Text

END_LIMIT_S = 20.0


class Answered(NamedTuple):
    """One call as its caller sees it."""

    planned_s: float
    """After the start."""
    ended_s: float
    outcome: str
    """`ok`, or the server's reason."""
    queued_ms: float
    """In the batcher and staged at the worker."""


class Sent:
    """All calls of one load, in order."""

    def __init__(self, calls: list[Answered]) -> None:
        self.calls = calls
        self.ok = [call for call in calls if call.outcome == "ok"]
        self.outcomes = Counter(call.outcome for call in calls)

    def queued_ms(self, part: float) -> float:
        """The queue time below which `part` of all answered calls stayed."""
        times = sorted(call.queued_ms for call in self.ok)
        return times[min(int(len(times) * part), len(times) - 1)]


def send(address: str, model: str, word: str, planned_s: Sequence[float], timeout_s: float) -> Sent:
    """Send all of them, and wait until the last one has ended."""

    async def main() -> Sent:
        loop = asyncio.get_running_loop()
        async with AsyncClient(address, max_attempts=1) as client, asyncio.timeout(planned_s[-1] + END_LIMIT_S):
            await client.predict([Text(word)], model=model, timeout_s=END_LIMIT_S)  # connected from now on
            calls: list[asyncio.Task[Answered]] = []
            start_s, all_sent = loop.time(), asyncio.Event()

            async def call(at_s: float) -> Answered:
                outcome, queued_ms = "ok", 0.0
                try:
                    answer = await client.predict([Text(word)], model=model, timeout_s=timeout_s)
                    queued_ms = answer.server_timing.batch_ms
                except InferenceError as error:
                    outcome = error.reason or error.code.name.lower()
                return Answered(at_s, loop.time() - start_s, outcome, queued_ms)

            def start(at_s: float) -> None:
                calls.append(loop.create_task(call(at_s)))

            for at_s in planned_s:
                loop.call_at(start_s + at_s, start, at_s)
            loop.call_at(start_s + planned_s[-1] + 0.001, all_sent.set)
            await all_sent.wait()
            return Sent(list(await asyncio.gather(*calls)))

    return asyncio.run(main())


def keep_sending(address: str, model: str, word: str, callers: int, seconds: float) -> int:
    """A closed loop for a while; returns the answers. Every call must be answered."""

    async def main() -> int:
        async with AsyncClient(address, max_attempts=1) as client:
            until_s, answered = time.monotonic() + seconds, 0

            async def caller() -> None:
                nonlocal answered
                while time.monotonic() < until_s:
                    await client.predict([Text(word)], model=model, timeout_s=END_LIMIT_S)
                    answered += 1

            await asyncio.gather(*(caller() for _ in range(callers)))
            return answered

    return asyncio.run(main())
