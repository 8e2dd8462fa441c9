"""Carries out `headrace traffic` and `headrace models load | unload | status | watch`."""

import contextlib
import datetime as dt
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from headrace import admin_show
from headrace.admin_client import AdminClient
from headrace.admin_orders import Reached, Wanted, carried_out, changes_something, reached, server
from headrace.admin_results import VersionState
from headrace.options import Target
from headrace.output import json_line, literal, print_json
from shared.errors import ExitCode, StartupError
from shared.traffic import Traffic

WIDE = 110
"""Columns of a terminal from which on load stages and precision are shown."""
EVERY_S = 1.0
"""Between two looks at figures, which a server does not announce."""


def traffic(target: Target, name: str, wanted: Wanted, *, watch: bool, as_json: bool) -> None:
    """`headrace traffic`. Raises HeadraceError, StartupError."""
    ordered = changes_something(wanted)
    if ordered and watch:
        raise StartupError(ExitCode.BAD_SETTINGS, "--watch goes with no change: order first, then watch")
    at = reached(target, name)
    try:
        if ordered:
            _order(at, name, wanted, as_json=as_json)
        elif watch:
            _watch_traffic(at, name, as_json=as_json)
        elif as_json:
            print_json(at.orders.traffic(name))
        else:
            note = "no server answers for it: this is what traffic.json says" if at.note else ""
            Console().print(admin_show.traffic(name, at.orders.traffic(name), note))
    finally:
        if isinstance(at.orders, AdminClient):
            at.orders.close()


def _order(at: Reached, name: str, wanted: Wanted, *, as_json: bool) -> None:
    with _spinning(f"{name}: loading and proving what that needs"):
        after = carried_out(wanted, name, at)
    if as_json:
        print_json(after)
    else:
        _print_done(admin_show.done_text(name, after))
    if at.note:
        Console(stderr=True).print(literal(at.note), soft_wrap=True)
    for told in _amiss(at, name, wanted, after):
        Console(stderr=True).print(admin_show.warning(told), soft_wrap=True)


def _amiss(at: Reached, name: str, wanted: Wanted, after: Traffic) -> list[str]:
    """What is to be known of an order that was carried out."""
    if wanted.rollback:
        return admin_show.amiss(at.orders.traffic(name))
    doubt = str(after.history[-1].get("reason", "")) if after.history else ""
    return [doubt] if doubt and not wanted.drop_standby else []


def _watch_traffic(at: Reached, name: str, *, as_json: bool) -> None:
    if as_json:
        _repeat(lambda: _write(json_line(at.orders.traffic(name))))
        return
    _live(lambda: admin_show.traffic(name, at.orders.traffic(name)))


def load(target: Target, name: str, *, as_json: bool) -> None:
    """`headrace models load`. Raises HeadraceError, StartupError."""
    with server(target) as admin, _spinning(f"{name}: loading and proving"):
        found = admin.load(name)
    if as_json:
        print_json(found)
        return
    for state in found:
        if state.phase == "ready":
            _print_done(f"{state.model} {state.version} is {state.role}, loaded in {state.load_s:.1f} s")


def unload(target: Target, name: str, *, as_json: bool) -> None:
    """`headrace models unload`. Raises HeadraceError, StartupError."""
    with server(target) as admin:
        admin.unload(name)
    if as_json:
        print_json({"model": name, "phase": "unloaded"})
        return
    _print_done(f"{name} is no longer served")


def status(target: Target, *, once: bool, as_json: bool) -> None:
    """`headrace models status`. Raises HeadraceError, StartupError."""
    with server(target) as admin:
        if as_json:
            print_json(admin.models())
        elif once or not Console().is_terminal:
            Console().print(_models(admin))
        else:
            _live(lambda: _models(admin))


def _models(admin: AdminClient) -> RenderableType:
    return admin_show.models(admin.models(), wide=Console().width >= WIDE)


def watch(target: Target, name: str, *, as_json: bool) -> None:
    """`headrace models watch`. Raises HeadraceError, StartupError."""
    known: dict[tuple[str, str], VersionState] = {}
    console = Console()
    with server(target) as admin, contextlib.suppress(KeyboardInterrupt):
        for change in admin.watch(name):
            if as_json:
                _write(json_line(change))
                continue
            at = dt.datetime.now().astimezone().strftime("%H:%M:%S")
            for line in admin_show.change_lines(change, known):
                console.print(Text(f"{at} ", "dim") + line, soft_wrap=True)


def _live(shown: Callable[[], RenderableType]) -> None:
    """Show something anew each second, until Ctrl-C."""
    with Live(shown(), auto_refresh=False) as live:
        _repeat(lambda: live.update(shown(), refresh=True))


def _repeat(look: Callable[[], None]) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            look()
            time.sleep(EVERY_S)


def _write(line: str) -> None:
    """At once, for whoever reads at the other end of a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def _spinning(text: str) -> Iterator[None]:
    """On a terminal, something that moves while the server works."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(literal(text)):
        yield


def _print_done(text: str) -> None:
    Console().print(Text("✓ ", style="green") + literal(text), soft_wrap=True)
