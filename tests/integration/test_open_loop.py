"""The load generator's open loop against a gRPC server in the same process, and so on the same event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from bench import closed_loop
from bench.arrivals import Phase
from bench.open_loop import WIRES, Load, Sender

Context = grpc.aio.ServicerContext[bytes, bytes]
METHOD = "/test.Load/Call"
DEADLINE_S = 0.3


@asynccontextmanager
async def _server(
    answer: Callable[[bytes, Context], Awaitable[bytes]], *options: tuple[str, int]
) -> AsyncIterator[str]:
    server = grpc.aio.server(options=options)
    handlers = {"Call": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Load", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


def _load(address: str, *phases: Phase, channels: int = 1, stages: bool = False, wire: str = "grpc") -> Load:
    requests, weights = {"short": b"s", "long": b"l" * 100}, {"short": 1.0, "long": 1.0}
    return Load(address, METHOD, requests, weights, phases, DEADLINE_S, channels, stages=stages, wire=wire)


@pytest.mark.parametrize("wire", WIRES)
async def test_each_call_is_sent_and_counted_by_phase_and_size(wire: str) -> None:
    seen: list[bytes] = []
    said: list[dict[str, object]] = []

    async def answer(request: bytes, context: Context) -> bytes:
        seen.append(request)
        context.set_trailing_metadata((("server-timing", "batch;dur=4.5, run;dur=1.0"),))
        return request

    async with _server(answer) as address:
        phases = Phase("poisson", 200, 0.2, name="first"), Phase("bursts", 100, 0.2, burst=10)
        load = _load(address, *phases, channels=2, stages=True, wire=wire)
        sender = Sender(load._replace(deadline_s=5.0))
        result = await sender.run(lambda **fields: said.append(fields))
    assert result["total"]["outcomes"] == {"ok": len(seen)}
    assert [phase["name"] for phase in result["phases"]] == ["first", "bursts 100/s"]
    assert result["phases"][1]["planned"] == 20
    assert result["phases"][1]["stages_ms"]["batch"]["p99"] == 4.5
    assert result["sizes"]["short"]["planned"] == seen.count(b"s")
    assert [event["event"] for event in said] == ["phase", "phase", "end"]


@pytest.mark.parametrize("wire", WIRES)
async def test_a_refusal_has_the_servers_word_and_an_unanswered_call_the_clients(wire: str) -> None:
    async def answer(request: bytes, context: Context) -> bytes:
        if len(request) == 1:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("error-reason", "overloaded"),))
        await never
        return b""

    never: Awaitable[None] = asyncio.get_running_loop().create_future()
    async with _server(answer) as address:
        result = await Sender(_load(address, Phase("constant", 100, 0.3), wire=wire)).run(lambda **_: None)
    sizes = result["sizes"]
    assert set(sizes["short"]["outcomes"]) <= {"overloaded", "expired"}  # the latter where the machine stands still
    assert sizes["short"]["outcomes"]["overloaded"] > 0
    assert sizes["long"]["outcomes"] == {"expired": sizes["long"]["planned"]}
    assert 0 < sizes["short"]["refused_ms"]["p50"] < DEADLINE_S * 1e3
    assert sizes["long"]["ok_ms"] == {}
    assert result["samples"]["overloaded"] == "full"
    assert "eadline" in result["samples"]["expired"]


async def test_a_closed_loop_that_is_refused_has_no_percentiles_and_says_why() -> None:
    async def answer(_request: bytes, context: Context) -> bytes:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "16 elements are wanted")
        return b""

    async with _server(answer) as address:
        result = await closed_loop.run(closed_loop.Plan(address, METHOD, b"x", 2, 0.0, 0.05), lambda **_: None)
    assert set(result["errors"]) == {"INVALID_ARGUMENT"}
    assert result["samples"] == {"INVALID_ARGUMENT": "16 elements are wanted"}
    assert (result["requests"], result["p50_ms"], result["p99_ms"]) == (0, None, None)


@pytest.mark.parametrize("wire", WIRES)
async def test_what_a_standstill_delays_counts_from_its_planned_time(wire: str) -> None:
    async def answer(request: bytes, _context: Context) -> bytes:
        if not stalled.is_set():
            stalled.wait(2 * DEADLINE_S)  # the generator stands still, too: it shares the loop
            stalled.set()
        return request

    stalled = threading.Event()
    async with _server(answer) as address:
        result = await Sender(_load(address, Phase("constant", 100, 3 * DEADLINE_S), wire=wire)).run(lambda **_: None)
    outcomes = result["total"]["outcomes"]
    assert outcomes["not_sent"] >= 10  # planned in the first half of the standstill, dead when it ends
    assert result["total"]["planned"] == sum(outcomes.values()) == 90
    assert result["total"]["ok_ms"]["max"] > 100  # planned in its second half, sent at its end
    assert result["total"]["sent_after_plan_ms"]["max"] > 100


async def test_bare_frames_carry_large_messages_through_small_windows_and_few_streams() -> None:
    active, most = 0, 0

    async def answer(request: bytes, _context: Context) -> bytes:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await asyncio.sleep(0)
        active -= 1
        assert request == large
        return request

    large = bytes(range(256)) * 2400  # ten times the window a stream begins with
    options = [("grpc.max_concurrent_streams", 3), ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384)]
    async with _server(answer, *options) as address:
        load = _load(address, Phase("bursts", 100, 0.2, burst=20), wire="http2")
        result = await Sender(load._replace(payloads={"long": large}, weights={"long": 1.0}, deadline_s=5.0)).run(
            lambda **_: None
        )
    assert result["total"]["outcomes"] == {"ok": 20}
    assert 1 <= most <= 3


async def test_what_waits_for_a_stream_expires_in_the_client() -> None:
    seen = 0

    async def answer(request: bytes, _context: Context) -> bytes:
        nonlocal seen
        seen += 1
        await asyncio.get_running_loop().create_future()
        return request

    async with _server(answer, ("grpc.max_concurrent_streams", 2)) as address:
        result = await Sender(_load(address, Phase("bursts", 100, 0.1, burst=10), wire="http2")).run(lambda **_: None)
    assert result["total"]["outcomes"] == {"expired": 10}
    # All expire at once; on a busy machine one more may be let in as the first two end.
    assert 2 <= seen <= 4, "the others waited in the client"


async def test_an_empty_plan_ends_at_once() -> None:
    async def answer(request: bytes, _context: Context) -> bytes:
        return request

    async with _server(answer) as address:
        result = await Sender(_load(address, Phase("constant", 0, 0.05))).run(lambda **_: None)
    assert result["total"]["planned"] == 0
