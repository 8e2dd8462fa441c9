"""What `headrace traffic` and `headrace models load | unload` order, and from whom: a running server, or the disk.

Without a server traffic.json is written as a server would write it, and the next start takes it up.
"""

import contextlib
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from headrace.admin_client import AdminClient
from headrace.admin_results import TrafficNow
from headrace.admin_wire import NoServer
from headrace.options import Target
from shared import traffic as transitions
from shared.errors import Conflict, ExitCode, StartupError, UnknownModel, UnknownVersion
from shared.repository import MIN_PREFIX, Repository, RepositoryError
from shared.repository_writer import change_traffic, now_utc
from shared.traffic import By, Canary, Ramp, Traffic, Why
from shared.traffic_repair import set_aside

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+", re.ASCII)
_PART = re.compile(r"([\d.]+)([smhd])", re.ASCII)
_BY: dict[str, By] = {"routing_key": "routing_key", "request_id": "request_id"}
MAX_FILE_BYTES = 1024 * 1024
"""Of a token or certificate."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `headrace traffic` that change something, as they were given."""

    canary: str = ""
    shadow: str = ""
    percent: str = ""
    every: str = ""
    by: str = ""
    promote: bool = False
    rollback: bool = False
    ends: str = ""
    reason: str = ""
    drop_standby: bool = False
    to: str = ""


class Orders(Protocol):
    """`headrace.admin_client.AdminClient`, or `OnDisk`."""

    def switch(self, name: str, version: str) -> Traffic:
        """All callers to this version."""

    def canary(self, name: str, canary: Canary) -> Traffic:
        """A share to a version."""

    def promote(self, name: str) -> Traffic:
        """The canary becomes current."""

    def roll_back(self, name: str, reason: str = "", ends: str = "") -> Traffic:
        """End the canary, or go back; `ends`: the version that is to end."""

    def drop_standby(self, name: str) -> Traffic:
        """Give up the version to go back to."""

    def traffic(self, name: str) -> TrafficNow:
        """As it is."""


class OnDisk:
    """Orders written to traffic.json, through the same transitions as a server's."""

    def __init__(self, root: Path, by: str = "headrace traffic") -> None:
        self._root = root
        self._by = by

    def switch(self, name: str, version: str) -> Traffic:
        """Also past a traffic.json that is damaged. Raises UnknownModel, RepositoryError."""

        def change(before: Traffic) -> Traffic:
            return transitions.switch(before, version, self._why())

        try:
            return self._changed(name, change)
        except RepositoryError:
            if not set_aside(self._root, name):
                raise
        return self._changed(name, change)

    def canary(self, name: str, canary: Canary) -> Traffic:
        """A ramp counts from now. Raises Conflict, InvalidOption, UnknownModel, RepositoryError."""
        ramp = canary.ramp
        if ramp is not None and math.isfinite(ramp.every_s):
            ramp = msgspec.structs.replace(ramp, next_at_s=time.time() + ramp.every_s)
        timed = msgspec.structs.replace(canary, ramp=ramp)
        return self._changed(name, lambda before: transitions.start_canary(before, timed, self._why()))

    def promote(self, name: str) -> Traffic:
        """Raises Conflict, UnknownModel, RepositoryError."""

        def change(before: Traffic) -> Traffic:
            if before.canary is not None and before.canary.shadow:
                version = before.canary.version
                raise Conflict(
                    f"no server tells how shadow {version} has answered: start one and ask again, or give it all "
                    f"callers all the same by --to {version}"
                )
            return transitions.promote(before, self._why())

        return self._changed(name, change)

    def roll_back(self, name: str, reason: str = "", ends: str = "") -> Traffic:
        """Raises Conflict, UnknownModel, RepositoryError."""
        return self._changed(
            name,
            lambda before: transitions.roll_back(before, self._why(reason), ends or transitions.unnamed_ending(before)),
        )

    def drop_standby(self, name: str) -> Traffic:
        """Raises UnknownModel, RepositoryError."""
        return self._changed(name, lambda before: transitions.drop_standby(before, self._why()))

    def traffic(self, name: str) -> TrafficNow:
        """Without figures. Raises UnknownModel, UnknownVersion, RepositoryError."""
        repository = Repository(self._root)
        repository.versions(name)  # a name of a model, and no path
        traffic = repository.traffic(name)
        if not traffic.current:
            traffic = msgspec.structs.replace(traffic, current=repository.current(name))
        return TrafficNow(traffic)

    def _why(self, reason: str = "") -> Why:
        return Why(now_utc(), self._by, reason)

    def _changed(self, name: str, change: Callable[[Traffic], Traffic]) -> Traffic:
        return change_traffic(self._root, name, change)


class Reached(NamedTuple):
    """Who takes the orders about one model."""

    orders: Orders
    versions: Sequence[str]
    note: str = ""
    """Why it is the disk; empty when it is a server."""


def server(target: Target) -> AdminClient:
    """The server, by TCP where an address is given. Raises NoServer, StartupError."""
    if not target.address:
        return AdminClient.connect(target.settings())
    token = _content(target.token_file, "--token-file").decode("ascii", "replace").strip() if target.token_file else ""
    if not token.isascii() or not token.isprintable():
        raise _wrong("--token-file holds no token: one line of printable ASCII characters")
    ca = _content(target.ca, "--ca") if target.ca is not None else None
    return AdminClient.connect(target.address, token, ca)


def reached(target: Target, name: str) -> Reached:
    """The server if it serves the model, else the disk. Raises UnknownModel, StartupError."""
    try:
        client = server(target)
    except NoServer:
        if target.address:
            raise
        return _on_disk(target, name, "no server runs: written to traffic.json, the next start takes it up")
    try:
        client.traffic(name)
        return Reached(client, [each.state.version for each in client.model(name).versions])
    except UnknownModel:
        client.close()
        if target.address:
            raise
        return _on_disk(
            target, name, "the server does not serve this model: written to traffic.json, a load takes it up"
        )


def _on_disk(target: Target, name: str, note: str) -> Reached:
    root = target.settings().repository
    repository = Repository(root)
    stored, named = repository.versions(name), []
    with contextlib.suppress(RepositoryError):  # one that can't be read names nobody
        named = repository.traffic(name).wanted()
    return Reached(OnDisk(root), list(dict.fromkeys([*stored, *named])), note)


def carried_out(wanted: Wanted, name: str, at: Reached) -> Traffic:
    """Order what the options say. Raises HeadraceError, StartupError."""
    if wanted.to:
        return at.orders.switch(name, matched(wanted.to, at.versions, name))
    if wanted.promote:
        return at.orders.promote(name)
    if wanted.drop_standby:
        return at.orders.drop_standby(name)
    if wanted.rollback:
        ends = matched(wanted.ends, at.versions, name) if wanted.ends else at.orders.traffic(name).ending
        return at.orders.roll_back(name, wanted.reason, ends)
    version = matched(wanted.canary or wanted.shadow, at.versions, name)
    return at.orders.canary(name, planned(wanted, version))


def changes_something(wanted: Wanted) -> bool:
    """Whether the options order anything. Raises StartupError for those that do not go together."""
    given = {
        "--canary": wanted.canary,
        "--shadow": wanted.shadow,
        "--promote": wanted.promote,
        "--rollback": wanted.rollback,
        "--drop-standby": wanted.drop_standby,
        "--to": wanted.to,
    }
    orders = [option for option, value in given.items() if value]
    if len(orders) > 1:
        raise _wrong(f"{orders[0]} and {orders[1]} do not go together: one change at a time")
    starts = bool(wanted.canary or wanted.shadow)
    for option, value in (("--percent", wanted.percent), ("--every", wanted.every), ("--by", wanted.by)):
        if value and not starts:
            raise _wrong(f"{option} goes with --canary or --shadow")
    for option, value in (("--reason", wanted.reason), ("--ends", wanted.ends)):
        if value and not wanted.rollback:
            raise _wrong(f"{option} goes with --rollback")
    if starts:
        planned(wanted, "")
    return bool(orders)


def planned(wanted: Wanted, version: str) -> Canary:
    """The canary that the options describe. Raises StartupError naming the option."""
    steps = _percents(wanted.percent, "--canary" if wanted.canary else "--shadow")
    by = _BY.get(wanted.by or "routing_key")
    if by is None:
        raise _wrong(f"--by {wanted.by[:100]!a}: must be routing_key or request_id")
    if len(steps) > 1 and not wanted.every:
        raise _wrong("several steps of --percent need --every, the time between two, e.g. --every 10m")
    if len(steps) == 1 and wanted.every:
        raise _wrong("--every goes with several steps of --percent, e.g. --percent 5,25,50,100")
    ramp = Ramp(steps=steps, every_s=seconds(wanted.every, "--every")) if wanted.every else None
    return Canary(version=version, percent=steps[0], by=by, shadow=bool(wanted.shadow), ramp=ramp)


def _percents(text: str, option: str) -> list[float]:
    if not text:
        raise _wrong(f"{option} needs --percent, e.g. --percent 5")
    try:
        steps = [float(part) for part in text.split(",")]
    except ValueError:
        steps = []
    if not steps or not all(0 < step <= 100 for step in steps):
        raise _wrong(
            f"--percent {text[:100]!a}: must be numbers above 0 and at most 100, e.g. 5, or 5,25,50,100 for a ramp"
        )
    return steps


def seconds(text: str, option: str) -> float:
    """`90s`, `10m`, `1h30m`, `2d`. Raises StartupError."""
    if not _DURATION.fullmatch(text):
        raise _wrong(f"{option} {text[:100]!a}: must be a time with its unit (s, m, h or d), e.g. 90s, 10m or 1h30m")
    return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))


def matched(prefix: str, versions: Sequence[str], name: str) -> str:
    """The one version whose hash starts so. Raises UnknownVersion."""
    found = [version for version in versions if version.startswith(prefix)]
    if len(prefix) >= MIN_PREFIX and len(found) == 1:
        return found[0]
    if len(prefix) < MIN_PREFIX:
        why = f"a version is named by {MIN_PREFIX} digits of its hash or more"
    else:
        why = f"{len(found)} versions of {name} start with it" if found else f"model {name} has no such version"
    raise UnknownVersion(f"version {prefix[:100]!a}: {why} (`headrace models list` shows them)")


def _content(path: Path | None, option: str) -> bytes:
    if path is None:
        return b""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise _wrong(f"{option} {path}: can't be read: {error.strerror}") from None


def _wrong(text: str) -> StartupError:
    return StartupError(ExitCode.BAD_SETTINGS, text)
