import socket

import pytest
from google.protobuf.internal import api_implementation

from gateway.api.native import SERVICE
from gateway.api.outcomes import Outcomes
from gateway.api.server import Parts, server_options, start_grpc
from shared.errors import ExitCode, StartupError
from tests.support.fake_flow import Flow, State, settings


def test_options_that_close_known_holes_are_all_set() -> None:
    options = dict(server_options(settings(gateway={"max_message_bytes": 1024})))

    assert options["grpc.so_reuseport"] == 0
    assert options["grpc.server.max_pending_requests"] >= 10_000
    assert options["grpc.server.max_pending_requests_hard_limit"] >= 10_000
    assert options["grpc.http2.max_deallocating_streams"] >= 10_000
    assert options["grpc.keepalive_time_ms"] + options["grpc.http2.ping_timeout_ms"] <= 15_000
    assert options["grpc.server_handshake_timeout_ms"] <= 10_000
    assert options["grpc.max_receive_message_length"] > 1024
    for name in (
        "grpc.http2.min_ping_interval_without_data_ms",
        "grpc.max_allowed_incoming_connections",
        "grpc.max_concurrent_streams",
        "grpc.max_metadata_size",
    ):
        assert options[name] > 0


@pytest.mark.parametrize("switched_on", [True, False])
def test_reflection_can_be_switched_off(switched_on: bool) -> None:
    parts = Parts(settings(gateway={"reflection": switched_on}), Flow(), State(), Outcomes())

    found = {name for name in parts.services if "reflection" in name}
    assert bool(found) == switched_on
    assert {SERVICE, "grpc.health.v1.Health"} <= set(parts.services)


async def test_a_protobuf_without_upb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_implementation, "Type", lambda: "python")

    with pytest.raises(StartupError, match="needs upb") as caught:
        await start_grpc(settings(), Flow(), State())

    assert caught.value.exit_code is ExitCode.BAD_SETTINGS


async def test_an_address_of_another_machine_is_a_bad_setting() -> None:
    with pytest.raises(StartupError, match=r"gateway\.grpc_address 192\.0\.2\.1:8001 .* of this machine") as caught:
        await start_grpc(settings(gateway={"grpc_address": "192.0.2.1:8001"}), Flow(), State())

    assert caught.value.exit_code is ExitCode.BAD_SETTINGS


async def test_an_address_in_use_is_told_as_such() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(StartupError, match=rf"gateway\.grpc_address {address} .* in use") as caught:
            await start_grpc(settings(gateway={"grpc_address": address}), Flow(), State())

    assert caught.value.exit_code is ExitCode.IN_USE
