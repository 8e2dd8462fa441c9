"""A gateway as a worker sees it: real arena, real greeting, real socket; the test says what is sent."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from shared.arena import Arena
from shared.handover import Welcomer
from shared.messages import PROTOCOL_VERSION, FromWorker, Hello, Refused, ToWorker, Welcome, WorkerReady
from shared.runtime_dir import RuntimeDir
from shared.transport import Router

LIMIT_S = 30.0
"""A worker that imports torch on a busy machine starts in seconds."""

M = TypeVar("M")


class FakeGateway:
    """One gateway life. `received` keeps everything, in order."""

    def __init__(self, runtime: RuntimeDir, index: int = 0, arena_bytes: int = 1 << 20) -> None:
        self.generation = int.from_bytes(os.urandom(8), "little")
        self.arena = Arena.create(arena_bytes)
        self.endpoint = f"ipc://{runtime.private(self.generation, index)}/workers"
        self.router: Router[FromWorker, ToWorker] = Router(
            self.endpoint, FromWorker, generation=self.generation, high_water_mark=100
        )
        self.welcomer = Welcomer(runtime.gateway_socket(index), self.arena.fd, self._hello, self.lost_event)
        self.hellos: list[Hello] = []
        self.lost: list[bytes] = []
        self.received: list[Any] = []
        self.refuse_with: str | None = None
        self.identity = b""
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Listen."""
        self.router.start(asyncio.get_running_loop(), self._message)
        await self.welcomer.start()

    def send(self, message: ToWorker) -> None:
        """To the worker that said hello last; fails when it can't be reached."""
        assert self.router.send(self.identity, message), "the worker is not connected"

    async def next(self, kind: type[M], after: int = 0) -> M:
        """The first message of a kind from number `after` on; waits for it."""
        return (await self.many(kind, 1, after))[0]

    async def many(self, kind: type[M], count: int, after: int = 0) -> Sequence[M]:
        """The first `count` messages of a kind from number `after` on."""

        def found() -> list[M]:
            return [message for message in self.received[after:] if isinstance(message, kind)]

        await self.until(lambda: len(found()) >= count, f"{count} × {kind.__name__}")
        return found()[:count]

    async def until(self, condition: Any, what: str) -> None:  # noqa: ANN401 - a callable that gives a truth value
        """Wait until something that a message or a loss brings about is true."""
        try:
            async with asyncio.timeout(LIMIT_S):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"waited {LIMIT_S} s for {what}; received {self.received}") from None

    async def close(self) -> None:
        """As a gateway's death looks to a worker: the stream ends."""
        await _maybe(self.welcomer.close())
        self.router.close()
        self.arena.close()

    def lost_event(self, identity: bytes) -> None:
        """A worker's stream has ended."""
        self.lost.append(identity)
        self._changed.set()

    def _hello(self, hello: Hello, _pid: int) -> Welcome | Refused:
        self.hellos.append(hello)
        self._changed.set()
        if self.refuse_with is not None:
            return Refused(self.refuse_with)
        self.identity = f"{hello.worker}.{len(self.hellos)}".encode()
        return Welcome(PROTOCOL_VERSION, self.generation, self.endpoint, self.identity, self.arena.nbytes)

    def _message(self, _identity: bytes, message: FromWorker) -> None:
        self.received.append(message)
        self._changed.set()


@asynccontextmanager
async def gateway_in(folder: Path, index: int = 0) -> AsyncIterator[FakeGateway]:
    """A gateway life that has said nothing yet; wait for its WorkerReady before you send."""
    gateway = FakeGateway(RuntimeDir.open(folder), index)
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.close()


async def greeted(gateway: FakeGateway) -> WorkerReady:
    """The worker has connected."""
    return await gateway.next(WorkerReady)


async def _maybe(result: Any) -> None:  # noqa: ANN401 - None or something to await
    if result is not None:
        await result
