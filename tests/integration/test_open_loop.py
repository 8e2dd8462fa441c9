"""The load generator's open loop against a gRPC server in the same process, and so on the same event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from bench.arrivals import Phase
from bench.open_loop import Load, Sender

Context = grpc.aio.ServicerContext[bytes, bytes]
METHOD = "/test.Load/Call"
DEADLINE_S = 0.2


@asynccontextmanager
async def _server(answer: Callable[[bytes, Context], Awaitable[bytes]]) -> AsyncIterator[str]:
    server = grpc.aio.server()
    handlers = {"Call": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Load", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


def _load(address: str, *phases: Phase, channels: int = 1, stages: bool = False) -> Load:
    requests, weights = {"short": b"s", "long": b"l" * 100}, {"short": 1.0, "long": 1.0}
    return Load(address, METHOD, requests, weights, phases, DEADLINE_S, channels, stages=stages)


async def test_each_call_is_sent_and_counted_by_phase_and_size() -> None:
    seen: list[bytes] = []
    said: list[dict[str, object]] = []

    async def answer(request: bytes, context: Context) -> bytes:
        seen.append(request)
        context.set_trailing_metadata((("server-timing", "batch;dur=4.5, run;dur=1.0"),))
        return request

    async with _server(answer) as address:
        phases = Phase("poisson", 200, 0.2, name="first"), Phase("bursts", 100, 0.2, burst=10)
        sender = Sender(_load(address, *phases, channels=2, stages=True))
        result = await sender.run(lambda **fields: said.append(fields))
    assert result["total"]["outcomes"] == {"ok": len(seen)}
    assert [phase["name"] for phase in result["phases"]] == ["first", "bursts 100/s"]
    assert result["phases"][1]["planned"] == 20
    assert result["phases"][1]["stages_ms"]["batch"]["p99"] == 4.5
    assert result["sizes"]["short"]["planned"] == seen.count(b"s")
    assert [event["event"] for event in said] == ["phase", "phase", "end"]


async def test_a_refusal_has_the_servers_word_and_an_unanswered_call_the_clients() -> None:
    async def answer(request: bytes, context: Context) -> bytes:
        if len(request) == 1:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("error-reason", "overloaded"),))
        await never
        return b""

    never: Awaitable[None] = asyncio.get_running_loop().create_future()
    async with _server(answer) as address:
        result = await Sender(_load(address, Phase("constant", 100, 0.3))).run(lambda **_: None)
    sizes = result["sizes"]
    assert sizes["short"]["outcomes"] == {"overloaded": sizes["short"]["planned"]}
    assert sizes["long"]["outcomes"] == {"expired": sizes["long"]["planned"]}
    assert 0 < sizes["short"]["refused_ms"]["p50"] < 100
    assert sizes["long"]["ok_ms"] == {}


async def test_what_a_standstill_delays_counts_from_its_planned_time() -> None:
    async def answer(request: bytes, _context: Context) -> bytes:
        if not stalled.is_set():
            stalled.wait(2 * DEADLINE_S)  # the generator stands still, too: it shares the loop
            stalled.set()
        return request

    stalled = threading.Event()
    async with _server(answer) as address:
        result = await Sender(_load(address, Phase("constant", 100, 0.6))).run(lambda **_: None)
    outcomes = result["total"]["outcomes"]
    assert outcomes["not_sent"] >= 10  # planned in the first half of the standstill, dead when it ends
    assert result["total"]["planned"] == sum(outcomes.values()) == 60
    assert result["total"]["ok_ms"]["max"] > 100  # planned in its second half, sent at its end
    assert result["total"]["sent_after_plan_ms"]["max"] > 100


async def test_an_empty_plan_ends_at_once() -> None:
    async def answer(request: bytes, _context: Context) -> bytes:
        return request

    async with _server(answer) as address:
        result = await Sender(_load(address, Phase("constant", 0, 0.05))).run(lambda **_: None)
    assert result["total"]["planned"] == 0
