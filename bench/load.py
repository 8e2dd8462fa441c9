"""Closed-loop load generator, one process: N unary calls in flight over one grpc.aio channel, nothing parsed.

Reads the request's bytes from a file. Prints one JSON line `begin` after the warm-up, one `end` after the window (so
that the parent can read the server's CPU clocks at both), and one with the result; its own CPU is counted apart.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import grpc.aio

CALL_LIMIT_S = 30.0
"""A call that takes longer is an error; far above anything measured here."""


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

    def ok(self, seconds: float) -> None:
        """One answer."""
        if self.open:
            self.latencies_s.append(seconds)

    def failed(self, code: str) -> None:
        """One status that is not OK; counted outside of the window, too."""
        self.errors[code] += 1


def percentile(values: list[float], share: float) -> float:
    """Nearest rank; `values` must be sorted and not empty."""
    return values[min(len(values) - 1, int(share * len(values)))]


async def _one_at_a_time(call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes], plan: Plan, tally: Tally) -> None:
    while True:
        started_s = time.perf_counter()
        try:
            answer = await call(plan.payload, timeout=CALL_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            tally.failed(error.code().name)
            await asyncio.sleep(0.01)  # a server that refuses at once must not turn this into a busy loop
            continue
        if not answer:
            tally.failed("EMPTY")
        tally.ok(time.perf_counter() - started_s)


def _say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


async def _run(plan: Plan) -> None:
    options = [("grpc.max_receive_message_length", 16 << 20), ("grpc.use_local_subchannel_pool", 1)]
    tally = Tally()
    async with grpc.aio.insecure_channel(plan.address, options=options) as channel:
        await channel.channel_ready()
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(plan.method)
        callers = [asyncio.create_task(_one_at_a_time(call, plan, tally)) for _ in range(plan.in_flight)]
        await asyncio.sleep(plan.warm_s)
        tally.open = True
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        _say(event="begin")
        await asyncio.sleep(plan.window_s)
        tally.open = False
        window_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
        _say(event="end")
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
    latencies = sorted(tally.latencies_s) or [float("nan")]
    _say(
        event="result",
        requests=len(tally.latencies_s),
        window_s=window_s,
        cpu_s=cpu_s,
        p50_ms=percentile(latencies, 0.50) * 1e3,
        p99_ms=percentile(latencies, 0.99) * 1e3,
        errors=dict(tally.errors),
    )


def main() -> None:
    """Parse the command line and run once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="host:port")
    parser.add_argument("--method", required=True, help="full method name, e.g. /headrace.v1.Inference/Predict")
    parser.add_argument("--payload", required=True, type=Path, help="file with the serialised request")
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--warm-s", type=float, default=0.5)
    parser.add_argument("--window-s", type=float, default=3.0)
    given = parser.parse_args()
    payload = given.payload.read_bytes()
    asyncio.run(_run(Plan(given.address, given.method, payload, given.in_flight, given.warm_s, given.window_s)))


if __name__ == "__main__":
    main()
