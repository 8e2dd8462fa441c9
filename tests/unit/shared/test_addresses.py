import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.addresses import split


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:8001", ("127.0.0.1", 8001)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),  # noqa: S104 - text, nothing is bound
        ("[::1]:8001", ("::1", 8001)),
        ("[::]:65535", ("::", 65535)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        ("localhost:8001", ("localhost", 8001)),
        ("localhost.:8001", ("localhost.", 8001)),
        ("gpu-1.example_net.org:1", ("gpu-1.example_net.org", 1)),
    ],
)
def test_splits_host_and_port(address: str, parts: tuple[str, int]) -> None:
    assert split(address) == parts


@pytest.mark.parametrize(
    ("address", "rule"),
    [
        ("", "host:port"),
        (":", "host:port"),
        ("localhost", "host:port"),
        ("8001", "host:port"),
        (":8001", "host:port"),
        ("127.0.0.1:99999", "port from 0 to 65535"),
        ("127.0.0.1:65536", "port from 0 to 65535"),
        ("1.2.3.4:", "port from 0 to 65535"),
        ("host:abc", "port from 0 to 65535"),
        ("host:-1", "port from 0 to 65535"),
        ("host:+1", "port from 0 to 65535"),
        ("host: 1", "port from 0 to 65535"),
        ("host:²", "port from 0 to 65535"),
        ("host:٣", "port from 0 to 65535"),
        ("host:" + "9" * 5000, "port from 0 to 65535"),
        ("::1:8001", "in brackets"),
        ("http://host:8001", "in brackets"),
        ("[]:8001", "valid IPv6"),
        ("[127.0.0.1]:8001", "valid IPv6"),
        ("[::1:8001", "in brackets"),
        ("127.0.0:8001", "valid IPv4"),
        ("127.0.0.256:8001", "valid IPv4"),
        ("a b:8001", "name or an IP"),
        ("-host:8001", "name or an IP"),
        ("a/b:8001", "name or an IP"),
    ],
)
def test_tells_which_rule_is_broken(address: str, rule: str) -> None:
    with pytest.raises(ValueError, match=r"^must ") as caught:
        split(address)
    assert rule in str(caught.value)


@given(st.text())
def test_anything_else_than_a_rule_never_comes_out(text: str) -> None:
    try:
        host, port = split(text)
    except ValueError as error:
        assert str(error).startswith("must ")  # noqa: PT017 - most texts are none, a few are
    else:
        assert host
        assert 0 <= port <= 65_535
