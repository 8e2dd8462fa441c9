import pytest

from gateway.api.addresses import split
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
