"""The real HTTP server over a flow without processes, beside `open_inference_parts.Stack`, which is what it serves."""

import contextlib
from collections.abc import AsyncIterator

import httpx
from prometheus_client import CollectorRegistry

from gateway.api.http import RestParts, RunningHttp, start_http
from gateway.api.outcomes import Outcomes
from gateway.state import Phase
from shared.settings import Settings
from tests.support.open_inference_parts import Stack, declared, tensor_model


class HttpSite:
    """A running server, what stands behind it, and a client."""

    def __init__(self, running: RunningHttp, stack: Stack, outcomes: Outcomes, client: httpx.AsyncClient) -> None:
        self.address = running.address
        self.stop = running.stop
        self.stack = stack
        self.flow = stack.flow
        self.outcomes = outcomes
        self.client = client

    def reset(self) -> None:
        """As it was when it started, for the next test."""
        flow = self.flow
        flow.requests.clear()
        flow.cancelled, flow.fail, flow.gate = 0, None, None
        self.outcomes.counts.clear()
        self.stack.state.set_reason(None)

    def phase(self, name: str, phase: Phase) -> None:
        """Put one model into a phase."""
        for model in self.stack.models.served:
            if model.name == name:
                model.state.phase, model.state.reason = phase, "a test said so"


@contextlib.asynccontextmanager
async def serving_http(chosen: Settings | None = None) -> AsyncIterator[HttpSite]:
    """The server on a free port of this process's event loop; its models are the stack's, and `half` (FP16 [2])."""
    stack, outcomes = Stack(chosen), Outcomes()
    stack.models.served.append(
        tensor_model("half", [declared("INPUT0", "FP16", 2)], [declared("OUTPUT0", "FP16", 2)]),
    )
    parts = RestParts(stack.flow, stack.parts, outcomes)
    running = await start_http(stack.settings, stack.state, CollectorRegistry(), parts)
    try:
        async with httpx.AsyncClient(base_url=f"http://{running.address}", timeout=10) as client:
            yield HttpSite(running, stack, outcomes, client)
    finally:
        await running.stop()
