import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gateway import command_line
from gateway.command_line import Told
from shared.errors import ExitCode, StartupError
from shared.runtime_dir import RuntimeDir
from shared.settings import Settings

GRPC, HTTP = command_line.PORTS


@pytest.fixture
def runtime() -> Iterator[RuntimeDir]:
    with TemporaryDirectory(prefix="hr-") as folder:
        runtime = RuntimeDir.open(Path(folder) / "run")
        yield runtime
        runtime.close()


def settings(grpc: str, http: str) -> Settings:
    return Settings(gateway={"processes": 2, "grpc_address": grpc, "http_address": http})  # type: ignore[arg-type]  # as a file gives it


def two_addresses() -> tuple[str, str]:
    """Free a moment ago."""
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}", f"127.0.0.1:{two.getsockname()[1]}"


def told(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Told, int | None]:
    monkeypatch.setattr("sys.argv", ["gateway", *arguments])
    return command_line.parse()


def test_what_a_person_types_and_what_the_supervisor_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch=monkeypatch) == (Told(None, 0, {}, None), None)
    held = ["--grpc-address", "127.0.0.1:7", "--http-address", "127.0.0.1:8"]
    given = told(
        "--index", "1", *held, "--config", "h.yaml", "--parent-pid", "5", "--ready-fd", "6", monkeypatch=monkeypatch
    )
    assert given == (Told(Path("h.yaml"), 1, {GRPC: "127.0.0.1:7", HTTP: "127.0.0.1:8"}, 5), 6)


@pytest.mark.parametrize("number", ["-1", "x", "1.5"])
def test_a_number_that_is_none_ends_the_process(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as caught:
        told("--index", number, monkeypatch=monkeypatch)
    assert caught.value.code == 2


def test_ports_that_are_held_take_the_place_of_the_settings() -> None:
    before = settings("127.0.0.1:0", "127.0.0.1:0")
    after = command_line.with_ports(before, Told(None, 1, {GRPC: "127.0.0.1:7"}, None))
    assert (after.gateway.grpc_address, after.gateway.http_address) == ("127.0.0.1:7", "127.0.0.1:0")
    assert command_line.with_ports(before, Told(None, 1, {}, None)) == before


def test_a_gateway_too_many_is_refused() -> None:
    with pytest.raises(StartupError, match=r"--index 2 is not below gateway.processes \(2\)") as caught:
        command_line.with_ports(settings("127.0.0.1:0", "127.0.0.1:0"), Told(None, 2, {}, None))
    assert caught.value.exit_code == ExitCode.BAD_SETTINGS


def test_by_hand_the_first_holds_the_ports_and_the_second_finds_it(runtime: RuntimeDir) -> None:
    both = settings(*two_addresses())
    runtime.lock("gateway")
    held = command_line.hold_ports(both, 0, runtime)
    assert held is not None
    assert command_line.hold_ports(both, 1, runtime) is None
    held.close()


def test_by_hand_somebody_elses_port_is_in_use(runtime: RuntimeDir) -> None:
    both = settings(*two_addresses())
    with socket.create_server(("127.0.0.1", int(both.gateway.grpc_address.rpartition(":")[2])), reuse_port=True):
        runtime.lock("gateway")
        with pytest.raises(StartupError) as caught:
            command_line.hold_ports(both, 0, runtime)
    assert caught.value.exit_code == ExitCode.IN_USE


def test_by_hand_a_free_port_for_each_would_be_no_server(runtime: RuntimeDir) -> None:
    with pytest.raises(StartupError, match="need the same port") as caught:
        command_line.hold_ports(settings(two_addresses()[0], "127.0.0.1:0"), 0, runtime)
    assert caught.value.exit_code == ExitCode.BAD_SETTINGS
