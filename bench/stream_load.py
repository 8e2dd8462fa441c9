"""Closed loop over one bidirectional stream, one process: N messages in flight, the next one when an answer comes.

The counterpart of `bench.load`'s closed loop: the same arguments and the same three lines of JSON. An answer that says
that its request failed is an error; nothing else in it is looked at.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio

from bench.closed_loop import Plan
from bench.records import percentile
from protos.headrace.v1 import inference_pb2 as native
from protos.inference import grpc_service_pb2 as oip

_FAILED: dict[str, Callable[[bytes], bool]] = {
    "PredictStream": lambda answer: native.PredictStreamResponse.FromString(answer).HasField("error"),
    "ModelStreamInfer": lambda answer: bool(oip.ModelStreamInferResponse.FromString(answer).error_message),
}
"""By method; others answer with no error of their own."""


def main() -> None:
    """Parse the command line and run once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True, help="host:port")
    parser.add_argument("--method", required=True, help="full method name, e.g. /headrace.v1.Inference/PredictStream")
    parser.add_argument("--payload", required=True, type=Path, help="file with one serialised message")
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--warm-s", type=float, default=0.5)
    parser.add_argument("--window-s", type=float, default=3.0)
    given = parser.parse_args()
    payload = given.payload.read_bytes()
    asyncio.run(_run(Plan(given.address, given.method, payload, given.in_flight, given.warm_s, given.window_s)))


def _say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


async def _run(plan: Plan) -> None:
    failed = _FAILED.get(plan.method.rpartition("/")[2])
    errors: Counter[str] = Counter()
    latencies: list[float] = []
    sent: deque[float] = deque()
    async with grpc.aio.insecure_channel(plan.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        await channel.channel_ready()
        begin: Callable[[], Any] = channel.stream_stream(plan.method)
        call = begin()
        places = asyncio.Semaphore(plan.in_flight)

        async def write() -> None:
            while True:
                await places.acquire()
                sent.append(time.perf_counter())
                await call.write(plan.payload)

        async def read() -> None:
            while True:
                answer = await call.read()
                latencies.append(time.perf_counter() - sent.popleft())
                places.release()
                if failed is not None and failed(answer):
                    errors["ANSWER"] += 1

        tasks = [asyncio.create_task(write()), asyncio.create_task(read())]
        await asyncio.wait(tasks, timeout=plan.warm_s, return_when=asyncio.FIRST_EXCEPTION)
        first, started_s, started_cpu_s = len(latencies), time.perf_counter(), time.process_time()
        _say(event="begin")
        ended, _ = await asyncio.wait(tasks, timeout=plan.window_s, return_when=asyncio.FIRST_EXCEPTION)
        last, window_s, cpu_s = len(latencies), time.perf_counter() - started_s, time.process_time() - started_cpu_s
        _say(event="end")
        if ended:  # the stream broke
            errors["STREAM"] += 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        call.cancel()
    counted = sorted(latencies[first:last]) or [float("nan")]
    _say(
        event="result",
        requests=last - first,
        window_s=window_s,
        cpu_s=cpu_s,
        p50_ms=percentile(counted, 0.50) * 1e3,
        p99_ms=percentile(counted, 0.99) * 1e3,
        errors=dict(errors),
    )


if __name__ == "__main__":
    main()
