"""Closed loop: N unary calls in flight over one grpc.aio channel, nothing parsed; the next one when one has ended."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc.aio

from bench.records import percentile
from bench.wire import connecting

CALL_LIMIT_S = 30.0
"""A call that takes longer is an error; far above anything measured here."""
Say = Callable[..., None]
"""Prints one line of JSON; called with its fields."""


class Plan(NamedTuple):
    """What one process does."""

    address: str
    method: str
    payload: bytes
    in_flight: int
    warm_s: float
    window_s: float


class Tally:
    """What came back inside the window."""

    def __init__(self) -> None:
        self.open = False
        self.latencies_s: list[float] = []
        self.errors: Counter[str] = Counter()
        self.samples: dict[str, str] = {}
        """By status: the text of the first."""

    def ok(self, seconds: float) -> None:
        """One answer."""
        if self.open:
            self.latencies_s.append(seconds)

    def failed(self, code: str, text: str) -> None:
        """One status that is not OK; counted outside of the window, too."""
        self.errors[code] += 1
        self.samples.setdefault(code, text)


async def _one_at_a_time(call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes], plan: Plan, tally: Tally) -> None:
    while True:
        started_s = time.perf_counter()
        try:
            answer = await call(plan.payload, timeout=CALL_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            tally.failed(error.code().name, error.details() or "")
            await asyncio.sleep(0.01)  # a server that refuses at once must not turn this into a busy loop
            continue
        if not answer:
            tally.failed("EMPTY", "an answer without a byte")
        tally.ok(time.perf_counter() - started_s)


async def run(plan: Plan, say: Say) -> dict[str, Any]:
    """Warm up, say `begin`, load for the window, say `end`; the result. Raises NotThere."""
    options = [("grpc.max_receive_message_length", 16 << 20), ("grpc.use_local_subchannel_pool", 1)]
    tally = Tally()
    async with grpc.aio.insecure_channel(plan.address, options=options) as channel:
        async with connecting(plan.address):
            await channel.channel_ready()
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(plan.method)
        callers = [asyncio.create_task(_one_at_a_time(call, plan, tally)) for _ in range(plan.in_flight)]
        await asyncio.sleep(plan.warm_s)
        tally.open = True
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        say(event="begin")
        await asyncio.sleep(plan.window_s)
        tally.open = False
        window_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
        say(event="end")
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
    latencies = sorted(tally.latencies_s)
    return {
        "requests": len(tally.latencies_s),
        "window_s": window_s,
        "cpu_s": cpu_s,
        "p50_ms": percentile(latencies, 0.50) * 1e3 if latencies else None,
        "p99_ms": percentile(latencies, 0.99) * 1e3 if latencies else None,
        "errors": dict(tally.errors),
        "samples": tally.samples,
    }
