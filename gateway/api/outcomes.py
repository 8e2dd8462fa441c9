"""Counts every call's end exactly once, by method and reason, so that client and server ledgers can be compared."""

import asyncio
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shared.errors import Code

OK = "ok"


class Outcomes(Collector):
    """Plain dictionary counts on the hot path; formatted only when `/metrics` is read. Event loop only.

    The reasons are a closed set (`ok` and the words of `shared.errors.Code`), the methods those we register: nothing
    that a caller sends becomes a label.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = {}
        self.in_flight = 0
        self.refused_unread: Callable[[Code], None] = lambda _reason: None
        """Told of a call that was refused before its message was read: dropped at the door, of an unknown model."""
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"<Outcomes in_flight={self.in_flight} {self.counts}>"

    def started(self) -> None:
        """A call of a counted method has arrived."""
        self.in_flight += 1

    def ended(self, method: str, reason: str) -> None:
        """That call's only end."""
        key = (method, reason)
        self.counts[key] = self.counts.get(key, 0) + 1
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    def answered(self, method: str, reason: str) -> None:
        """One answer inside a stream; the stream itself is the call in flight."""
        key = (method, reason)
        self.counts[key] = self.counts.get(key, 0) + 1

    async def wait_idle(self, limit_s: float) -> bool:
        """Wait until no call is in flight, at most `limit_s` seconds. False when the limit passed first."""
        if self.in_flight:
            self._idle.clear()
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def collect(self) -> Iterator[Metric]:
        """Prometheus form; register the object itself with a registry."""
        calls = CounterMetricFamily("headrace_calls", "Ended calls and stream answers.", labels=("method", "reason"))
        for (method, reason), count in sorted(self.counts.items()):
            calls.add_metric((method, reason), count)
        yield calls
        yield GaugeMetricFamily("headrace_calls_in_flight", "Calls that have not ended.", self.in_flight)
