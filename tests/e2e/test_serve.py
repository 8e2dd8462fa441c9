"""`headrace serve`, as a user sees it: ready line, answers, reflection, health, and an end that leaves nothing."""

import json
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from headrace import AsyncClient, Client
from tests.support.stack import STOP_LIMIT_S, Site, eventually, serving, simulated_repository


def test_a_photo_is_answered_with_its_stage_times(site: Site, jpeg: bytes) -> None:
    with Client(site.grpc) as client:
        answer = client.classify(jpeg, model="sim", top_k=3)
    assert len(answer.labels) == 3
    assert len(answer.version) == 16
    assert answer.server_timing.batch_rows >= 1
    assert answer.server_timing.prepare_ms > 0
    timing = answer.server_timing
    assert timing.copy_ms + timing.run_ms >= 2.0  # the simulated device takes at least that


def test_the_same_image_gets_the_same_answer_alone_and_in_company(site: Site, jpeg: bytes) -> None:
    with Client(site.grpc) as client:
        alone = client.classify(jpeg, model="sim")
        together = list(client.classify_many([jpeg] * 40, model="sim"))
    assert [outcome.result.labels for outcome in together if outcome.result] == [alone.labels] * 40


async def test_the_asyncio_client(site: Site, jpeg: bytes) -> None:
    async with AsyncClient(site.grpc) as client:
        answer = await client.classify(jpeg, model="second")
    assert answer.model == "second"


def test_a_client_without_any_proto_file_lists_and_calls(site: Site, jpeg: bytes) -> None:
    with grpc.insecure_channel(site.grpc) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"headrace.v1.Inference", "grpc.health.v1.Health"} <= set(database.get_services())
        service = DescriptorPool(database).FindServiceByName("headrace.v1.Inference")
        method = service.FindMethodByName("Predict")
        request = GetMessageClass(method.input_type)()
        request.model = "sim"
        request.inputs.add().image = jpeg
        call = channel.unary_unary(
            f"/{service.full_name}/{method.name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        answer = json_format.MessageToDict(call(request, timeout=10))
    assert answer["model"] == "sim"
    assert len(answer["results"][0]["classification"]["labels"]) == 5


def test_health_says_serving_for_the_server_and_each_model(site: Site) -> None:
    with grpc.insecure_channel(site.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "sim", "second"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, service
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=5)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_http_tells_health_metrics_and_state(site: Site) -> None:
    assert site.get("/healthz")[0] == 200
    assert site.get("/readyz")[0] == 200
    status, text = site.get("/metrics")
    assert status == 200
    for name in (
        "headrace_requests_total",
        "headrace_stage_seconds_bucket",
        "headrace_batch_rows",
        "headrace_workers",
        "headrace_late_answers_total",
    ):
        assert name in text, name
    debug = json.loads(site.get("/debug")[1])
    assert debug["ready"] is True
    assert {"in_flight", "queues", "arena", "pool", "workers"} <= set(debug)


def test_ctrl_c_stops_everything_within_five_seconds_and_leaves_nothing(own_site: Site, jpeg: bytes) -> None:
    shared_memory = Path("/dev/shm")
    before = set(shared_memory.iterdir())
    with serving(own_site) as process:
        with Client(own_site.grpc) as client:
            client.classify(jpeg)
        assert len(own_site.processes()) == 5  # supervisor, gateway, worker, two pool processes
        process.signal(signal.SIGINT)
        assert process.wait(5.0) == 0
    own_site.wait_no_process()
    assert not own_site.runtime.exists() or not list(own_site.runtime.iterdir())
    assert set(shared_memory.iterdir()) <= before


def test_sigterm_is_an_asked_for_stop_too(own_site: Site) -> None:
    with serving(own_site) as process:
        process.signal(signal.SIGTERM)
        assert process.wait(5.0) == 0
    own_site.wait_no_process()


def test_requests_in_flight_are_answered_before_the_end(tmp_path: Path, jpeg: bytes) -> None:
    site = Site(tmp_path / "site", simulated_repository(tmp_path / "models", a_ms=300.0))
    with serving(site) as process, Client(site.grpc) as client, ThreadPoolExecutor(8) as callers:
        calls = [callers.submit(client.classify, jpeg, timeout_s=10) for _ in range(8)]
        eventually("all calls to be in", lambda: site.debug()["in_flight"]["requests"] == 8, 5.0)
        process.signal(signal.SIGTERM)
        assert all(call.result(STOP_LIMIT_S).labels for call in calls)
        assert process.wait(STOP_LIMIT_S) == 0


def test_a_gateway_with_requests_in_flight_to_the_end_stops_by_itself(own_site: Site, jpeg: bytes) -> None:
    """Every stage of the stop takes as long as it may: the pool hangs, and with it calls over gRPC and HTTP."""
    with serving(own_site) as process, Client(own_site.grpc) as client, ThreadPoolExecutor(2) as callers:
        pool = [psutil.Process(pid) for pid in own_site.pool_pids()]
        for each in pool:
            each.suspend()
        upload = urllib.request.Request(f"http://{own_site.http}/v1/classify", jpeg, {"content-type": "image/jpeg"})
        calls = [
            callers.submit(client.classify, jpeg, timeout_s=30),
            callers.submit(urllib.request.urlopen, upload, timeout=30),
        ]
        eventually("both calls to be in", lambda: own_site.debug()["in_flight"]["requests"] == 2, 5.0)
        process.signal(signal.SIGTERM)
        assert process.wait(STOP_LIMIT_S) == 0
        assert not [line for line in process.lines if "killing what did not stop in time" in line]
        assert all(isinstance(call.exception(STOP_LIMIT_S), Exception) for call in calls)
    own_site.wait_no_process()


def test_nothing_of_ours_can_be_opened_by_others(site: Site) -> None:
    for path in [site.runtime, *site.runtime.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_only_loopback_listens(site: Site) -> None:
    ours = {process.pid for process in site.processes()}
    addresses = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in site.processes()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and process.pid in ours
    }
    assert addresses == {"127.0.0.1"}


def test_torch_is_in_no_process_that_does_not_need_it(site: Site) -> None:
    for process in site.processes():
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in maps, process.cmdline()
