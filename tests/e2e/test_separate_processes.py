"""Gateway and worker by themselves: either order, and each survives the other's death."""

import signal
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace import Client, InferenceError
from tests.support.stack import Process, Site, eventually


def health_of(site: Site, service: str = "") -> int:
    with grpc.insecure_channel(site.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status)


def stop(process: Process) -> None:
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def classify(site: Site, jpeg: bytes) -> None:
    with Client(site.grpc) as client:
        assert client.classify(jpeg).labels


def test_gateway_without_a_worker_is_unavailable_at_once_and_says_why(own_site: Site, jpeg: bytes) -> None:
    with own_site.module("gateway") as gateway:
        eventually("HTTP to listen", lambda: own_site.get("/readyz")[0] == 503)
        reason = own_site.get("/readyz")[1]
        assert "no worker is connected" in reason
        assert own_site.get("/healthz")[0] == 200
        with Client(own_site.grpc, max_attempts=1) as client, pytest.raises(InferenceError) as caught:
            client.classify(jpeg, timeout_s=30)
        assert caught.value.code == grpc.StatusCode.UNAVAILABLE
        assert caught.value.reason == "not_ready"
        assert caught.value.retry_after_ms
        assert health_of(own_site) == health_of(own_site, "sim") == health_pb2.HealthCheckResponse.NOT_SERVING
        stop(gateway)


def test_a_gateway_that_may_open_few_files_says_so(own_site: Site) -> None:
    command = 'ulimit -n 1000; exec "$0" -m gateway --config "$1"'
    with Process(["sh", "-c", command, sys.executable, str(own_site.config)], own_site.folder) as gateway:
        assert "1000" in gateway.wait_line("ulimit -n")


@pytest.mark.parametrize("order", [("gateway", "workers"), ("workers", "gateway")])
def test_either_may_start_first(own_site: Site, jpeg: bytes, order: tuple[str, str]) -> None:
    with own_site.module(order[0]) as first, own_site.module(order[1]) as second:
        own_site.wait_ready()
        classify(own_site, jpeg)
        stop(first)
        stop(second)
    own_site.wait_no_process()


def test_a_new_worker_takes_over_and_the_gateway_lives_on(own_site: Site, jpeg: bytes) -> None:
    with own_site.module("gateway") as gateway:
        pid = gateway.pid
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
            with own_site.module("workers") as worker:
                own_site.wait_ready()
                classify(own_site, jpeg)
                worker.signal(number)
                worker.wait()
                eventually("the gateway to notice", lambda: not own_site.ready(), 2.0)
        assert own_site.gateway_pid() == pid
        stop(gateway)


def test_a_new_gateway_finds_the_worker_with_its_models_still_loaded(own_site: Site, jpeg: bytes) -> None:
    with own_site.module("workers") as worker:
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
            with own_site.module("gateway") as gateway:
                own_site.wait_ready()
                assert own_site.worker_pids() == [worker.pid]
                classify(own_site, jpeg)
                gateway.signal(number)
                gateway.wait()
        stop(worker)
    own_site.wait_no_process()


def test_two_gateways_in_one_folder(own_site: Site, jpeg: bytes) -> None:
    with own_site.module("gateway") as first, own_site.module("workers") as worker:
        own_site.wait_ready()
        with own_site.module("gateway") as second:
            assert second.wait() == 3
            assert "already runs" in second.output()
            assert f"pid {first.pid}" in second.output()
        classify(own_site, jpeg)  # the first has lost nothing
        stop(first)
        stop(worker)
