"""A flow and a server state without processes, with the names of `gateway/flow.py` and `gateway/readiness.py`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from gateway.api.server import RunningGrpc, start_grpc
from gateway.request import Answer, Part, Request, Write
from gateway.state import ModelState
from shared.errors import HeadraceError
from shared.results import Classification, FinishReason, Label, Text, TextEnd, Token
from shared.results import Result as FlowResult
from shared.settings import Settings

VERSION = "0123456789abcdef"


def classification(top_k: int = 1) -> Classification:
    return Classification(labels=[Label(index=n, name=f"label {n}", score=0.5 / (n + 1)) for n in range(top_k)])


class Flow:
    """Answers at once, or waits for `gate`; `fail` is raised instead of an answer."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.cancelled = 0
        self.running = 0
        self.peak = 0
        self.fail: BaseException | None = None
        self.gate: asyncio.Event | None = None
        self.steps: asyncio.Queue[None] | None = None
        """Of texts that grow: one for each letter."""
        self.results: list[FlowResult | HeadraceError] | None = None
        self.delay_s: Callable[[Request], float] = lambda _: 0.0
        self._changed = asyncio.Condition()

    async def answer(self, request: Request) -> Answer:
        self.requests.append(request)
        self.running += 1
        self.peak = max(self.peak, self.running)
        await self._tell()
        try:
            return await self._answer(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
            await asyncio.shield(self._tell())

    async def _answer(self, request: Request) -> Answer:
        if self.gate is not None:
            await self.gate.wait()
        if delay_s := self.delay_s(request):
            await asyncio.sleep(delay_s)  # the latency that the test asked for
        if self.fail is not None:
            raise self.fail
        request.times.run_s = 0.002
        request.times.batch_rows = len(request.inputs)
        request.times.version = VERSION
        if request.write is not None:
            return await self._written(request, request.write)
        results = self.results
        if results is None:
            results = [classification(request.options.get("top_k", 5)) for _ in request.inputs]
        return Answer(model=request.model or "fake", version=VERSION, results=results)

    async def _written(self, request: Request, write: Write) -> Answer:
        """The prompt in capitals, a letter at a time; `steps` lets the test say when the next one comes."""
        text, end = bytes(request.inputs[0].data).decode().upper(), None
        for place, letter in enumerate(text, 1):
            if self.steps is not None:
                await self.steps.get()
            if place == len(text):
                end = TextEnd(FinishReason.LENGTH, len(text), len(text))
            told = [Token(ord(letter), letter.encode(), -0.5)] if "logprobs" in request.options else []
            await write(Part(request.model or "fake", VERSION, letter, told, end))
            request.times.first_s, request.times.tokens = 0.001, place
        return Answer(request.model or "fake", VERSION, [Text(text, end)])

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, wanted: Callable[["Flow"], bool], what: str, limit_s: float = 5.0) -> None:
        """Wait for a state of the fake; the failure says what was awaited."""
        try:
            async with asyncio.timeout(limit_s), self._changed:
                await self._changed.wait_for(lambda: wanted(self))
        except TimeoutError:
            raise AssertionError(
                f"waited {limit_s} s for {what}: {len(self.requests)} requests, {self.running} running, "
                f"{self.cancelled} cancelled"
            ) from None


class State:
    """A server state that a test sets."""

    def __init__(self, *names: str) -> None:
        self.known = [ModelState(name=name, version=VERSION, phase="ready") for name in names or ("fake",)]
        self.reason: str | None = None
        self._subscribers: list[Callable[[], None]] = []

    def models(self) -> list[ModelState]:
        return self.known

    def not_ready_reason(self) -> str | None:
        return self.reason

    def debug(self) -> dict[str, Any]:
        return {"models": [model.name for model in self.known], "queue": {"fake": 0}}

    def subscribe(self, changed: Callable[[], None]) -> None:
        self._subscribers.append(changed)

    def set_reason(self, reason: str | None) -> None:
        self.reason = reason
        for model in self.known:
            model.phase = "ready" if reason is None else "loading"
        for changed in self._subscribers:
            changed()


def settings(**groups: dict[str, Any]) -> Settings:
    """Settings with free ports; `gateway={"drain_ms": 5}` and the like."""
    free = {"grpc_address": "127.0.0.1:0", "http_address": "127.0.0.1:0"}
    gateway = free | groups.pop("gateway", {})
    return Settings.model_validate({"gateway": gateway, **groups})


@contextlib.asynccontextmanager
async def serving(flow: Flow, state: State, chosen: Settings | None = None) -> AsyncIterator[RunningGrpc]:
    """A real gRPC server over the fakes, on a free port of this process's event loop."""
    running = await start_grpc(chosen or settings(), flow, state)
    try:
        yield running
    finally:
        await running.stop(0.0)
