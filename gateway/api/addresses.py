"""host:port settings of the two listeners."""

from shared import addresses
from shared.errors import ExitCode, StartupError


def split(address: str, setting: str) -> tuple[str, int]:
    """Host and port; brackets of an IPv6 host removed. Raises StartupError(BAD_SETTINGS) naming the setting."""
    try:
        return addresses.split(address)
    except ValueError as error:
        raise StartupError(ExitCode.BAD_SETTINGS, f"{setting} is {address!r}: {error}") from None
