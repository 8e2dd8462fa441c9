"""Calls accepted several at a time, and refused before they are read, over real sockets."""

import asyncio
import gc
from collections import Counter

import grpc
import pytest

from gateway.api import accept
from gateway.api.interceptors import Edge
from gateway.api.outcomes import Outcomes
from gateway.api.server import start_grpc
from protos.headrace.v1 import inference_pb2 as pb
from protos.headrace.v1 import inference_pb2_grpc as pb_grpc
from shared.errors import HeadraceError, Overloaded
from tests.support.fake_flow import Flow, State, settings

ONE = pb.PredictRequest(inputs=[pb.Input(image=b"jpeg")])


class Shut:
    """A gate that refuses while it has a reason to."""

    def __init__(self, reason: HeadraceError | None = None) -> None:
        self.reason = reason
        self.budgets_s: list[float] = []
        self.reading = 0
        self.expirations = 0

    def refusal(self, budget_s: float, reading: int, now_s: float) -> HeadraceError | None:
        self.budgets_s.append(budget_s)
        self.reading = max(self.reading, reading)
        return self.reason

    def expired(self) -> None:
        self.expirations += 1


async def predict(address: str, calls: int) -> Counter[str]:
    """So many calls at once on one channel, by status."""
    found: Counter[str] = Counter()
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub: pb_grpc.InferenceAsyncStub = pb_grpc.InferenceStub(channel)

        async def one() -> None:
            try:
                await stub.Predict(ONE, timeout=10)
                found["OK"] += 1
            except grpc.aio.AioRpcError as error:
                found[error.code().name] += 1

        await asyncio.gather(*(one() for _ in range(calls)))
    return found


async def test_a_call_is_refused_without_its_message_and_with_all_that_a_refusal_carries() -> None:
    flow, outcomes, gate = Flow(), Outcomes(), Shut(Overloaded("no room", retry_after_ms=40))
    running = await start_grpc(settings(), flow, State(), outcomes, gate=gate)
    async with grpc.aio.insecure_channel(running.address) as channel:
        raw: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/headrace.v1.Inference/Predict")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw(b"\xff not protobuf at all", timeout=5)
        gate.reason = None
        answer = await pb_grpc.InferenceStub(channel).Predict(ONE, timeout=5)
    await running.stop(0.0)

    trailers = dict(caught.value.trailing_metadata() or ())
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
    assert trailers["grpc-retry-pushback-ms"] == "40"
    assert len(trailers["request-id"]) == 16
    assert answer.results
    assert len(flow.requests) == 1
    assert outcomes.counts == {("Predict", "overloaded"): 1, ("Predict", "ok"): 1}
    assert outcomes.in_flight == 0
    assert all(0 < budget_s < 6 for budget_s in gate.budgets_s)


async def test_a_burst_of_calls_gets_one_answer_each() -> None:
    flow, outcomes, gate = Flow(), Outcomes(), Shut()
    running = await start_grpc(settings(), flow, State(), outcomes, gate=gate)
    served = await predict(running.address, 300)
    gate.reason = Overloaded("no room", retry_after_ms=40)
    refused = await predict(running.address, 300)
    await running.stop(0.0)
    assert served == {"OK": 300}
    assert refused == {"RESOURCE_EXHAUSTED": 300}
    assert outcomes.counts == {("Predict", "ok"): 300, ("Predict", "overloaded"): 300}


async def test_while_one_call_waits_others_are_accepted_beyond_the_number_outstanding() -> None:
    flow = Flow()
    flow.gate = asyncio.Event()
    running = await start_grpc(settings(), flow, State(), gate=Shut())
    calls = asyncio.create_task(predict(running.address, 5 * accept.OUTSTANDING))
    await flow.until(lambda now: now.running == 5 * accept.OUTSTANDING, "all calls to be in the flow")
    flow.gate.set()
    assert await calls == {"OK": 5 * accept.OUTSTANDING}
    await running.stop(0.0)


async def test_a_release_of_grpc_without_these_parts_serves_as_it_always_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "PARTS", (*accept.PARTS, "_of_another_release"))
    gate = Shut()
    running = await start_grpc(settings(), Flow(), State(), gate=gate)
    assert await predict(running.address, 20) == {"OK": 20}
    gate.reason = Overloaded("no room", retry_after_ms=40)
    assert await predict(running.address, 20) == {"RESOURCE_EXHAUSTED": 20}
    await running.stop(0.0)


async def test_this_release_of_grpc_has_all_the_parts() -> None:
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    edge = Edge(settings().gateway, Outcomes())
    acceptor = accept.Acceptor(server, {}, edge)
    await server.start()
    assert acceptor.start()
    await server.stop(None)
    assert accept._unusable(acceptor._core, asyncio.get_running_loop()) is None


async def test_a_stopped_server_has_no_request_for_a_call_outstanding() -> None:
    before = asyncio.all_tasks()
    running = await start_grpc(settings(), Flow(), State(), gate=Shut())
    await predict(running.address, 3)
    await running.stop(0.0)
    async with asyncio.timeout(5):  # for the tasks to see that the server has stopped
        while left := asyncio.all_tasks() - before:
            await asyncio.wait(left)


def calls_alive() -> int:
    """gRPC's states of calls: those asked for, and those that something still holds."""
    return sum(type(thing).__name__ == "RPCState" for thing in gc.get_objects())


async def test_a_refused_call_leaves_nothing_for_the_garbage_collector() -> None:
    """The collector comes rarely, and a call holds its message, up to gateway.max_message_bytes of it."""
    flow, gate = Flow(), Shut()
    running = await start_grpc(settings(), flow, State(), gate=gate)
    await predict(running.address, 30)
    gc.collect()
    before = calls_alive()
    gc.disable()
    try:
        flow.fail = Overloaded("no room", retry_after_ms=40)
        await predict(running.address, 30)
        flow.fail, gate.reason = None, Overloaded("no room", retry_after_ms=40)
        await predict(running.address, 30)
        left = calls_alive() - before
    finally:
        gc.enable()
    await running.stop(0.0)
    assert left < 20, "of 60 refused calls"
