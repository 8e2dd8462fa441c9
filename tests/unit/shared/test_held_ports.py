import select
import socket
from collections.abc import Iterator

import pytest

from shared.errors import ExitCode, StartupError
from shared.held_ports import HeldPorts

GRPC, HTTP = "gateway.grpc_address", "gateway.http_address"


@pytest.fixture
def held() -> Iterator[HeldPorts]:
    held = HeldPorts.hold({GRPC: "127.0.0.1:0", HTTP: "127.0.0.1:0"})
    yield held
    held.close()


def listener(address: str, *, shared: bool) -> socket.socket:
    """Somebody's server."""
    host, _, port = address.rpartition(":")
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind((host, int(port)))
    listening.listen()
    return listening


def refused(address: str) -> StartupError:
    with pytest.raises(StartupError) as caught:
        HeldPorts.hold({GRPC: address})
    return caught.value


def test_port_0_becomes_a_real_one_and_each_setting_has_its_own(held: HeldPorts) -> None:
    assert [name for name in held.addresses if not held.addresses[name].endswith(":0")] == [GRPC, HTTP]
    assert held.addresses[GRPC] != held.addresses[HTTP]


def test_our_gateways_share_it_and_get_all_connections(held: HeldPorts) -> None:
    address = held.addresses[GRPC]
    with listener(address, shared=True) as one, listener(address, shared=True) as two:
        host, port = one.getsockname()
        callers = [socket.create_connection((host, port)) for _ in range(40)]
        accepted = 0
        while select.select([one, two], [], [], 0)[0]:
            for listening in select.select([one, two], [], [], 0)[0]:
                listening.accept()[0].close()
                accepted += 1
        assert accepted == 40, "none went to the socket that only holds the port"
        for caller in callers:
            caller.close()


def test_a_second_server_with_several_gateways_is_refused_before_ours_listen(held: HeldPorts) -> None:
    error = refused(held.addresses[HTTP])
    assert error.exit_code == ExitCode.IN_USE
    assert error.text == f"{GRPC} {held.addresses[HTTP]} can't be bound: it is in use"


def test_also_on_another_address_of_the_machine(held: HeldPorts) -> None:
    assert refused(f"0.0.0.0:{held.addresses[GRPC].rpartition(':')[2]}").exit_code == ExitCode.IN_USE


@pytest.mark.parametrize("shared", [True, False])
def test_a_port_on_which_somebody_listens_is_refused(held: HeldPorts, shared: bool) -> None:
    address = held.addresses[GRPC]
    held.close()
    with listener(address, shared=shared):
        assert refused(address).exit_code == ExitCode.IN_USE
    HeldPorts.hold({GRPC: address}).close()


def test_nothing_is_held_after_a_refusal(held: HeldPorts) -> None:
    with pytest.raises(StartupError):
        HeldPorts.hold({HTTP: "127.0.0.1:0", GRPC: held.addresses[GRPC]})
    held.close()
    HeldPorts.hold(held.addresses).close()


def test_an_address_of_no_machine_is_a_wrong_setting() -> None:
    error = refused("192.0.2.1:0")
    assert error.exit_code == ExitCode.BAD_SETTINGS
    assert "192.0.2.1:0 can't be bound: Cannot assign requested address" in error.text
