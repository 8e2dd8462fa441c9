"""The ports that several gateways of one server share, kept from everybody else.

Used by the supervisor, and by a gateway that was started by hand.

A listening socket with SO_REUSEPORT lets in every later one of the same user that asks for it, too: a second server
would start without a word and take half of the connections. So before the first gateway listens, each port is

- bound once without SO_REUSEPORT, which fails while anybody listens there, and
- reserved by an abstract Unix socket of the network namespace, which the next server with several gateways finds taken.

A server with one gateway, and any program that does not ask for SO_REUSEPORT, is refused by the kernel itself. What
stays possible is another program of the same user that asks for it (gRPC's own servers do by default).
"""

import errno
import socket
from collections.abc import Mapping
from typing import Self

from shared import addresses
from shared.errors import ExitCode, StartupError


class HeldPorts:
    """Held until `close` or the end of the process."""

    def __init__(self) -> None:
        """Use `hold`."""
        self._sockets: list[socket.socket] = []
        self.addresses: dict[str, str] = {}
        """Setting → host:port, with the real port where 0 was asked for."""

    @classmethod
    def hold(cls, asked: Mapping[str, str]) -> Self:
        """`asked`: setting → host:port. Raises StartupError: IN_USE, or BAD_SETTINGS for an unusable address.

        Blocks for as long as a name's look-up takes.
        """
        held = cls()
        try:
            for setting, address in asked.items():
                held.addresses[setting] = held._take(setting, address)
        except StartupError:
            held.close()
            raise
        return held

    def close(self) -> None:
        """Let go; gateways that listen are not touched. Idempotent."""
        for taken in self._sockets:
            taken.close()
        self._sockets.clear()

    def _take(self, setting: str, address: str) -> str:
        host, port = addresses.split(address)
        errors: list[OSError] = []
        try:
            places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            raise _unusable(setting, address, error) from None
        bound = 0
        for family, _, _, _, place in places:
            try:
                bound = port = self._bind(family, (place[0], port, *place[2:]))
            except OSError as error:
                errors.append(error)
        if any(error.errno == errno.EADDRINUSE for error in errors):
            raise _in_use(setting, address)
        if not bound:
            raise _unusable(setting, address, errors[0])
        self._reserve(setting, address, bound)
        return f"{address.rpartition(':')[0]}:{bound}"

    def _bind(self, family: int, place: tuple[object, ...]) -> int:
        """Bound, and never listening: the port number is ours, and no connection ever comes here."""
        taken = socket.socket(family, socket.SOCK_STREAM)
        self._sockets.append(taken)
        # What earlier connections left behind (TIME_WAIT) is no server. A listener still is.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        taken.bind(place)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # only now: our gateways may follow
        return int(taken.getsockname()[1])

    def _reserve(self, setting: str, address: str, port: int) -> None:
        """By number alone: one server on 0.0.0.0 and one on 127.0.0.1 would take each other's connections."""
        taken = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets.append(taken)
        try:
            taken.bind(f"\0headrace-port-{port}")
        except OSError:
            raise _in_use(setting, address) from None


def _in_use(setting: str, address: str) -> StartupError:
    return StartupError(ExitCode.IN_USE, f"{setting} {address} can't be bound: it is in use")


def _unusable(setting: str, address: str, error: OSError) -> StartupError:
    return StartupError(ExitCode.BAD_SETTINGS, f"{setting} {address} can't be bound: {error.strerror or error}")
