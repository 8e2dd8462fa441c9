"""host:port, as the settings have it. Used by `shared.settings` (hence every process) and the gateway's listeners."""

import ipaddress
import re

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_])?\.?")
_PORT = re.compile(r"[0-9]{1,5}")


def split(address: str) -> tuple[str, int]:
    """Host and port; the brackets of an IPv6 host removed. Looks nothing up. Raises ValueError: a rule, `must …`."""
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        raise ValueError("must be host:port")
    if not _PORT.fullmatch(port) or int(port) > 65_535:
        raise ValueError("must be host:port with a port from 0 to 65535")
    return _checked(host), int(port)


def _checked(host: str) -> str:
    if host.startswith("[") and host.endswith("]"):
        return _ip(host[1:-1], ipaddress.IPv6Address, "IPv6")
    if ":" in host:
        raise ValueError("must have an IPv6 address in brackets, [::1]:8001")
    if re.fullmatch(r"[0-9.]+", host):
        return _ip(host, ipaddress.IPv4Address, "IPv4")
    if not _NAME.fullmatch(host):
        raise ValueError("must be host:port with a name or an IP address as host")
    return host


def _ip(text: str, kind: type[ipaddress.IPv4Address | ipaddress.IPv6Address], name: str) -> str:
    try:
        kind(text)
    except ValueError:
        raise ValueError(f"must have a valid {name} address before the port") from None
    return text
