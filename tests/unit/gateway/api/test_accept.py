import asyncio
from collections import Counter
from typing import Any

import grpc

from gateway.api.accept import Acceptor

METHODS = ("/a.B/One", "/a.B/Two")


class Core:
    """gRPC's core, of which a test sees how many calls were asked for; none ever comes."""

    def __init__(self) -> None:
        self.asked: Counter[bytes] = Counter()
        self.never = asyncio.Event()

    def is_running(self) -> bool:
        return not self.never.is_set()

    async def _request_registered_call(self, name: bytes) -> None:
        self.asked[name] += 1
        await self.never.wait()
        raise ValueError("the server has stopped")


class Server:
    """What the acceptor needs of a grpc.aio server."""

    def __init__(self) -> None:
        self._server = Core()
        self.registered: list[str] = []

    def add_registered_method_handlers(self, service: str, methods: dict[str, Any]) -> None:
        self.registered += [f"/{service}/{method}" for method in methods]


async def test_some_calls_of_each_method_are_asked_for_at_a_time_and_the_rest_stays_in_core() -> None:
    """One at a time, callers wait unseen while the loop is idle; too many, and a turn of it belongs to new ones."""

    async def handle(raw: bytes, _context: object) -> bytes:
        return raw

    async def gate(_method: str, _context: object) -> None:
        return

    server = Server()
    handlers = dict.fromkeys(METHODS, grpc.unary_unary_rpc_method_handler(handle))
    acceptor = Acceptor(server, handlers, gate)  # type: ignore[arg-type]  # a fake with the port's names
    assert acceptor.start()
    await asyncio.sleep(0)
    assert sorted(server.registered) == sorted(METHODS)
    for method in METHODS:
        assert 8 <= server._server.asked[method.encode()] <= 32
    server._server.never.set()
    async with asyncio.timeout(5.0):
        await asyncio.gather(*acceptor._tasks)
