import re
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from shared.errors import ExitCode, StartupError
from shared.held_ports import HeldPorts

GRPC, HTTP = "gateway.grpc_address", "gateway.http_address"

HOLD = """
import sys
from shared.held_ports import HeldPorts
HeldPorts.hold({"gateway.grpc_address": sys.argv[1]})
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the user's private folder is made, and is gone again at the end."""
    with TemporaryDirectory(prefix="hr-") as name:  # short: a socket's path has 107 bytes
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name)


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


@pytest.mark.parametrize(("first", "second"), [("127.0.0.1", "0.0.0.0"), ("0.0.0.0", "127.0.0.1")])  # noqa: S104
def test_an_address_and_all_addresses_exclude_each_other(first: str, second: str) -> None:
    held = HeldPorts.hold({GRPC: f"{first}:0"})
    assert refused(f"{second}:{held.addresses[GRPC].rpartition(':')[2]}").exit_code == ExitCode.IN_USE
    held.close()


def test_servers_on_different_addresses_may_have_the_same_port_in_whatever_order_they_end(folder: Path) -> None:
    one = HeldPorts.hold({GRPC: "127.0.0.1:0"})
    port = one.addresses[GRPC].rpartition(":")[2]
    two = HeldPorts.hold({GRPC: f"127.0.0.2:{port}"})
    one.close()
    assert refused(f"0.0.0.0:{port}").exit_code == ExitCode.IN_USE
    two.close()
    HeldPorts.hold({GRPC: f"0.0.0.0:{port}"}).close()
    assert list(folder.iterdir()) == []


def test_the_locks_are_private_and_no_socket_has_a_name_that_others_could_take_first(
    folder: Path, held: HeldPorts
) -> None:
    assert (folder / "headrace").stat().st_mode & 0o777 == 0o700
    ports = [address.rpartition(":")[2] for address in held.addresses.values()]
    names = {path.name for path in (folder / "headrace").iterdir()}
    assert names == {f"port-{port}{rest}.lock" for port in ports for rest in ("", "-127.0.0.1")}
    abstract = re.findall(r"@(.*)", Path("/proc/net/unix").read_text())
    assert not [name for name in abstract if name.endswith(tuple(ports))]


def test_a_server_that_was_killed_holds_nothing(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert refused(address).exit_code == ExitCode.IN_USE
        other.kill()
    assert list((folder / "headrace").iterdir()) != [], "it could not tidy up"
    HeldPorts.hold({GRPC: address}).close()
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_not_private_is_not_used_and_does_not_keep_the_server_from_starting(folder: Path) -> None:
    (folder / "headrace").mkdir()
    (folder / "headrace").chmod(0o777)
    held = HeldPorts.hold({GRPC: "127.0.0.1:0"})
    assert list((folder / "headrace").iterdir()) == []
    held.close()


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
