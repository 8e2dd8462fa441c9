"""host:port settings of the two listeners: what they say, and why one could not be bound."""

import errno
import socket

from shared import addresses
from shared.errors import ExitCode, StartupError

_WHY = {
    errno.EADDRINUSE: "it is in use",
    errno.EADDRNOTAVAIL: "it is not an address of this machine",
    errno.EACCES: "permission denied",
}


def split(address: str, setting: str) -> tuple[str, int]:
    """Host and port; brackets of an IPv6 host removed. Raises StartupError(BAD_SETTINGS) naming the setting."""
    try:
        return addresses.split(address)
    except ValueError as error:
        raise StartupError(ExitCode.BAD_SETTINGS, f"{setting} is {address!r}: {error}") from None


def refusal(address: str, setting: str) -> StartupError:
    """Why an address could not be bound, asked of the kernel once more, for gRPC does not tell: IN_USE or BAD_SETTINGS.

    Blocks for as long as a name's look-up takes.
    """
    errors = _errors_of_binding(*split(address, setting))
    used = [error for error in errors if error.errno == errno.EADDRINUSE]
    if not errors:  # whoever had it has gone since
        return StartupError(ExitCode.IN_USE, f"{setting} {address} can't be bound: is it in use?")
    error = (used or errors)[0]
    why = _WHY.get(error.errno or 0, error.strerror or str(error))
    return StartupError(
        ExitCode.IN_USE if used else ExitCode.BAD_SETTINGS, f"{setting} {address} can't be bound: {why}"
    )


def _errors_of_binding(host: str, port: int) -> list[OSError]:
    """One for each address of the host; a name that is none is one, too."""
    found: list[OSError] = []
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return [error]
    for family, kind, protocol, _, place in places:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            found.append(error)
    return found
