import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from gateway.api.health import Health
from gateway.api.interceptors import Edge
from gateway.api.outcomes import Outcomes
from tests.support.fake_context import Context
from tests.support.fake_flow import State, settings

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
SERVICE = "headrace.v1.Inference"


def health(state: State) -> Health:
    return Health(Edge(settings().gateway, Outcomes()), state, (SERVICE,))


def asked(service: str) -> bytes:
    return bytes(health_pb2.HealthCheckRequest(service=service).SerializeToString())


async def checked(served: Health, service: str) -> int:
    check: Any = served.handlers()["Check"]
    return int(health_pb2.HealthCheckResponse.FromString(await check.unary_unary(asked(service), Context())).status)


class Watcher:
    """Collects what a watch is told."""

    def __init__(self, served: Health, service: str) -> None:
        self.context = Context()
        watch: Any = served.handlers()["Watch"]
        self._told = watch.unary_stream(asked(service), self.context)

    async def next(self) -> int:
        async with asyncio.timeout(5):
            return int(health_pb2.HealthCheckResponse.FromString(await anext(self._told)).status)

    async def ended(self) -> bool:
        async with asyncio.timeout(5):
            return await anext(self._told, None) is None


@pytest.mark.parametrize("service", ["", SERVICE, "a", "b"])
async def test_serving_only_while_a_request_can_be_answered(service: str) -> None:
    state = State("a", "b")
    served = health(state)

    assert await checked(served, service) == SERVING
    state.set_reason("no worker has said hello")
    assert await checked(served, service) == NOT_SERVING


async def test_one_model_may_serve_while_another_does_not() -> None:
    state = State("a", "b")
    served = health(state)
    state.known[1].phase = "failed"
    state.reason = "model b: its weights are broken"

    assert [await checked(served, name) for name in ("", "a", "b")] == [NOT_SERVING, SERVING, NOT_SERVING]


async def test_an_unknown_service_is_not_found() -> None:
    served, context = health(State()), Context()
    check: Any = served.handlers()["Check"]

    with pytest.raises(grpc.aio.AbortError):
        await check.unary_unary(asked("../etc"), context)

    assert context.code is grpc.StatusCode.NOT_FOUND


async def test_a_watch_tells_changes_and_only_changes() -> None:
    state = State()
    served = health(state)
    watcher = Watcher(served, "")

    assert await watcher.next() == SERVING
    served.notify()
    state.set_reason("the worker has died")
    assert await watcher.next() == NOT_SERVING
    state.set_reason(None)
    assert await watcher.next() == SERVING


async def test_a_watch_of_an_unknown_service_waits_for_it() -> None:
    state = State("a")
    served = health(state)
    watcher = Watcher(served, "b")

    assert await watcher.next() == UNKNOWN
    state.known = State("a", "b").known
    served.notify()
    assert await watcher.next() == SERVING


async def test_stopping_says_not_serving_for_good_and_then_ends_the_watch() -> None:
    state = State("a")
    served = health(state)
    watcher = Watcher(served, "a")
    assert await watcher.next() == SERVING

    served.stop_serving()
    assert await watcher.next() == NOT_SERVING
    state.set_reason(None)
    assert [await checked(served, name) for name in ("", "a")] == [NOT_SERVING, NOT_SERVING]

    served.close()
    assert await watcher.ended()


async def test_a_malformed_watch_is_the_callers_fault() -> None:
    served, context = health(State()), Context()
    watch: Any = served.handlers()["Watch"]

    with pytest.raises(grpc.aio.AbortError):
        await anext(watch.unary_stream(b"\xff\xff", context))

    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
