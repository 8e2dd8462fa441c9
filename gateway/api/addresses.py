"""host:port settings of the two listeners."""

from shared.errors import ExitCode, StartupError


def split(address: str, setting: str) -> tuple[str, int]:
    """Host and port; brackets of an IPv6 host removed. Raises StartupError(BAD_SETTINGS) naming the setting."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not port.isascii() or int(port) > 65_535:
        raise StartupError(ExitCode.BAD_SETTINGS, f"{setting} is {address!r}: it must be host:port, port 0..65535")
    return host.removeprefix("[").removesuffix("]"), int(port)
