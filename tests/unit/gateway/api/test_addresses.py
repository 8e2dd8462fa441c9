import errno
import socket

import pytest

from gateway.api.addresses import refusal, split
from shared.errors import ExitCode, StartupError


@pytest.mark.parametrize(
    ("address", "parts"),
    [("127.0.0.1:8001", ("127.0.0.1", 8001)), ("[::1]:0", ("::1", 0)), ("localhost:65535", ("localhost", 65535))],
)
def test_splits_host_and_port(address: str, parts: tuple[str, int]) -> None:
    assert split(address, "gateway.grpc_address") == parts


@pytest.mark.parametrize("address", ["", "8001", ":8001", "host:", "host:x", "host:65536", "host:-1", "host:²"])
def test_refuses_what_is_not_host_and_port_and_names_the_setting(address: str) -> None:
    with pytest.raises(StartupError, match=r"gateway\.grpc_address is .*: must be host:port") as caught:
        split(address, "gateway.grpc_address")

    assert caught.value.exit_code is ExitCode.BAD_SETTINGS


SETTING = "gateway.grpc_address"


def test_an_address_in_use_is_told_from_one_of_another_machine() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        used = refusal(address, SETTING)
    foreign = refusal("192.0.2.1:8001", SETTING)  # kept free for documentation

    assert (used.exit_code, used.text) == (ExitCode.IN_USE, f"{SETTING} {address} can't be bound: it is in use")
    assert foreign.exit_code is ExitCode.BAD_SETTINGS
    assert foreign.text == f"{SETTING} 192.0.2.1:8001 can't be bound: it is not an address of this machine"


@pytest.mark.parametrize(
    ("error", "exit_code", "why"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), ExitCode.BAD_SETTINGS, "permission denied"),
        (OSError(errno.EAFNOSUPPORT, "no such family"), ExitCode.BAD_SETTINGS, "no such family"),
        (OSError(errno.EADDRINUSE, "taken"), ExitCode.IN_USE, "it is in use"),
    ],
)
def test_other_reasons_are_told_too(
    monkeypatch: pytest.MonkeyPatch, error: OSError, exit_code: ExitCode, why: str
) -> None:
    def bind(_socket: socket.socket, _place: object) -> None:
        raise error

    monkeypatch.setattr(socket.socket, "bind", bind)
    told = refusal("127.0.0.1:80", SETTING)
    assert (told.exit_code, told.text) == (exit_code, f"{SETTING} 127.0.0.1:80 can't be bound: {why}")


def test_a_name_that_nobody_has_is_a_bad_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    told = refusal("nohost.invalid:80", SETTING)
    assert told.exit_code is ExitCode.BAD_SETTINGS
    assert told.text.endswith("can't be bound: Name or service not known")


def test_an_address_that_is_free_again_was_in_use() -> None:
    assert refusal("127.0.0.1:0", SETTING).exit_code is ExitCode.IN_USE
