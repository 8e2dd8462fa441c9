"""The two lines that `headrace serve` prints when every model is proven: what is served where, what to type next."""

import contextlib
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from headrace.zoo import cache_of
from shared.errors import HeadraceError, StartupError
from shared.logs import get_logger
from shared.repository import Repository
from shared.settings import GatewaySettings, Settings

_DEFAULT_ADDRESS = GatewaySettings().grpc_address

log = get_logger()


class ReadyWord:
    """Prints the lines once, when every gateway is ready at the same moment; all else goes to the log.

    Called by the supervisor each time that a process announces that it is ready.
    """

    def __init__(self, gateways: Iterable[str], settings: Settings) -> None:
        """`gateways`: the names of those that have to be ready."""
        self._gateways = frozenset(gateways)
        self._settings = settings
        self._said = False
        self.serving: Callable[[], set[str]] = set
        """Names of the processes that are ready now; the supervisor's."""

    def __call__(self, name: str, detail: str, first: bool) -> None:  # noqa: FBT001 - called by position, once
        """See the class."""
        if name not in self._gateways:
            log.info("ready", child=name, detail=detail)
        elif not first:
            log.warning("ready again", child=name, detail=detail)
        elif not self._said and len(self._gateways) > 1:
            log.info("ready", child=name)
        if not self._said and self._gateways <= self.serving():
            self._said = True
            with contextlib.suppress(OSError):  # nobody reads our output; the log has it, too
                sys.stdout.write(ready_text(detail, self._settings) + "\n")
                sys.stdout.flush()


def ready_text(detail: str, settings: Settings) -> str:
    """From the gateway's own word (`gRPC host:port, HTTP host:port, models a, b`); never raises."""
    command = _command(detail, settings)
    return f"Headrace is ready: {detail}" + (f"\nTry it:  {command}" if command else "")


def _command(detail: str, settings: Settings) -> str:
    models = [name.strip() for name in _found(r"models ([^;]*)", detail).split(",") if name.strip()]
    # The first will do: the supervisor, which stops the server, has to look at no more than that.
    image = next((name for name in models if _pipeline(name, settings.repository) == "image_classification"), None)
    if image is None:
        http = _found(r"HTTP ([^\s,;]+)", detail)
        return f"curl http://{reachable(http)}/readyz" if http else ""
    words = [_program(), "classify", _photo(settings.repository)]
    if len(models) > 1:
        words += ["--model", image]
    address = reachable(_found(r"gRPC ([^\s,;]+)", detail))
    if address != _DEFAULT_ADDRESS:
        words += ["--address", address]
    return " ".join(words)


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match.group(1) if match else ""


def _pipeline(name: str, repository: Path) -> str:
    try:
        return Repository(repository, only=name).open(name).config.pipeline
    except (HeadraceError, StartupError, OSError):  # the repository has changed since the gateway read it
        return ""


def reachable(address: str) -> str:
    """What a client on this machine types for a listening address."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in {"0.0.0.0", "[::]", ""} else address  # noqa: S104 - replaced, not bound


def _photo(repository: Path) -> str:
    """A sample photo where they are fetched already, so that the line runs as it stands; else a name to replace."""
    found = min(cache_of(repository).glob("photos/*.jpg"), default=None)
    return "PHOTO.jpg" if found is None else _short(found)


def _program() -> str:
    """How to start `headrace` from the present folder."""
    beside = Path(sys.executable).parent / "headrace"
    if not beside.exists():
        return f"{sys.executable} -m headrace"
    if shutil.which("headrace") == str(beside):
        return "headrace"
    return _short(beside)


def _short(path: Path) -> str:
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))
