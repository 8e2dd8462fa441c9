"""The admin service over TCP: never without TLS, never without the token."""

import socket
from pathlib import Path

import grpc
import pytest

from gateway.api.admin import SERVICE, Admin, Behind
from gateway.api.admin_server import start_admin
from headrace.admin_client import AdminClient
from headrace.admin_wire import NoServer
from shared.errors import ExitCode, StartupError
from tests.integration.conftest import TOKEN
from tests.support.fake_admin import (
    AdminThread,
    Control,
    admin_settings,
)


def test_by_tcp_with_the_token(over_tcp: AdminThread, certificate: tuple[Path, Path], versions: list[str]) -> None:
    address, ca = f"localhost:{over_tcp.running.port}", certificate[0].read_bytes()
    with AdminClient.connect(address, TOKEN, ca) as admin:
        assert admin.switch("m", versions[1]).history[-1]["by"] == f"{admin.user} (token)"
    with AdminClient.connect(over_tcp.settings) as local:  # the socket needs none
        assert local.traffic("m").traffic.current == versions[1]


@pytest.mark.parametrize("token", ["", "wrong-token-of-some-length", TOKEN[:-1], TOKEN + "x"])
def test_without_the_right_token_nothing_is_told(
    over_tcp: AdminThread, certificate: tuple[Path, Path], token: str
) -> None:
    address, ca = f"localhost:{over_tcp.running.port}", certificate[0].read_bytes()
    with AdminClient.connect(address, token, ca) as admin:
        with pytest.raises(StartupError, match="the server refuses the token") as caught:
            admin.models()
        assert caught.value.exit_code == ExitCode.BAD_SETTINGS
    credentials = grpc.ssl_channel_credentials(ca)
    metadata = (("authorization", f"Bearer {token}"),)
    texts = set()
    with grpc.secure_channel(address, credentials) as channel:
        for method in (
            f"/{SERVICE}/ListModels",
            f"/{SERVICE}/NoSuch",
            "/grpc.reflection.v1.ServerReflection/X",
            "/a/b",
        ):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(method)(b"", metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
            texts.add(refused.value.details())  # type: ignore[attr-defined]
    assert len(texts) == 1  # whether a method exists is not told either
    assert TOKEN not in texts.pop()


def test_two_authorizations_are_none(over_tcp: AdminThread, certificate: tuple[Path, Path]) -> None:
    address = f"localhost:{over_tcp.running.port}"
    metadata = (("authorization", "Bearer wrong"), ("authorization", f"Bearer {TOKEN}"))
    with (
        grpc.secure_channel(address, grpc.ssl_channel_credentials(certificate[0].read_bytes())) as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        channel.unary_unary(f"/{SERVICE}/ListModels")(b"", metadata=metadata)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]


def test_tcp_is_never_without_tls(over_tcp: AdminThread) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{over_tcp.running.port}") as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/ListModels")(b"", metadata=(("authorization", f"Bearer {TOKEN}"),))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


def test_a_certificate_that_nobody_vouches_for_is_not_trusted(over_tcp: AdminThread) -> None:
    with pytest.raises(NoServer, match="no admin service answers at"):
        AdminClient.connect(f"localhost:{over_tcp.running.port}", TOKEN)


async def test_an_address_in_use_is_told_and_the_socket_is_gone(
    root: Path, runtime_dir: Path, tmp_path: Path, certificate: tuple[Path, Path], token_file: Path
) -> None:
    made, key = certificate
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        settings = admin_settings(root, runtime_dir, address=address, certificate=made, key=key, token_file=token_file)
        control = Control(root)
        with pytest.raises(StartupError, match=r"admin\.address .* in use") as caught:
            await start_admin(settings, tmp_path / "admin.sock", Admin(settings, Behind(control, control)))
    assert caught.value.exit_code == ExitCode.IN_USE
    assert not (tmp_path / "admin.sock").exists()
