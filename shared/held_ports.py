"""The ports that several gateways of one server share, kept from everybody else.

Used by the supervisor, and by a gateway that was started by hand.

A listening socket with SO_REUSEPORT lets in every later one of the same user that asks for it, too: a second server
would start without a word and take half of the connections. So before the first gateway listens, each port is

- bound once without SO_REUSEPORT, which fails while anybody listens there, and
- reserved by file locks in the user's private runtime folder (the default one, whatever `runtime_dir` says), which the
  next server with several gateways finds taken though nobody listens yet. The kernel lets go of them with the process.

One lock is the address's own, a second one the port's: an address shares it with other addresses, while 0.0.0.0 and
[::] have it for themselves, since they would take the connections of all.

A server with one gateway, and any program that does not ask for SO_REUSEPORT, is refused by the kernel itself. What
stays possible is another program of the same user that asks for it (gRPC's own servers do by default). Where the folder
can't be used, two servers that start in the same moment are not told apart: a warning says so.
"""

import errno
import ipaddress
import socket
from collections.abc import Mapping
from typing import Self

from shared import addresses
from shared.errors import ExitCode, StartupError
from shared.logs import get_logger
from shared.runtime_dir import RuntimeDir

log = get_logger()


class HeldPorts:
    """Held until `close` or the end of the process."""

    def __init__(self) -> None:
        """Use `hold`."""
        self._sockets: list[socket.socket] = []
        self._locks = _locks()
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
        if self._locks is not None:
            self._locks.close()

    def _take(self, setting: str, address: str) -> str:
        host, port = addresses.split(address)
        errors: list[OSError] = []
        try:
            places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            raise _unusable(setting, address, error) from None
        bound: list[str] = []
        for family, _, _, _, place in places:
            try:
                port = self._bind(family, (place[0], port, *place[2:]))
            except OSError as error:
                errors.append(error)
            else:
                bound.append(str(place[0]))
        if any(error.errno == errno.EADDRINUSE for error in errors):
            raise _in_use(setting, address)
        if not bound:
            raise _unusable(setting, address, errors[0])
        try:
            self._reserve(bound, port)
        except StartupError as error:
            raise _in_use(setting, address) if error.exit_code == ExitCode.IN_USE else error from None
        return f"{address.rpartition(':')[0]}:{port}"

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

    def _reserve(self, hosts: list[str], port: int) -> None:
        if self._locks is None:
            return
        every = any(ipaddress.ip_address(host.partition("%")[0]).is_unspecified for host in hosts)
        self._locks.lock(f"port-{port}", shared=not every)
        for host in hosts:
            self._locks.lock(f"port-{port}-{host}")


def _locks() -> RuntimeDir | None:
    try:
        return RuntimeDir.open(None)
    except StartupError as error:
        log.warning("ports can't be reserved", reason=error.text)
        return None


def _in_use(setting: str, address: str) -> StartupError:
    return StartupError(ExitCode.IN_USE, f"{setting} {address} can't be bound: it is in use")


def _unusable(setting: str, address: str, error: OSError) -> StartupError:
    return StartupError(ExitCode.BAD_SETTINGS, f"{setting} {address} can't be bound: {error.strerror or error}")
