"""`headrace serve`: starts gateway and workers side by side, restarts what dies, stops everything in order.

The supervisor handles no request and holds no state that a request needs: its own death by SIGKILL ends its children
(the kernel does that, see `shared.child.bind_to_parent`), and the next start finds nothing in its way.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.ready import ReadyWord
from shared import logs, settings_loader
from shared.child import StopSignal
from shared.clock import Clock, now_s
from shared.devices import worker_count
from shared.errors import ExitCode, StartupError
from shared.held_ports import HeldPorts
from shared.logs import get_logger
from shared.messages import ProcessFailed, ProcessReady, ToSupervisor
from shared.runtime_dir import RuntimeDir, gateway_role
from shared.settings import Settings, SupervisorSettings
from shared.shares import more_pool_processes
from shared.supervision import Backoff, Child

_FINAL_AT_START = {ExitCode.BAD_SETTINGS, ExitCode.IN_USE, ExitCode.MODEL_LOAD}
"""During a process's first start these would only repeat, so they end everything; later they count as failures."""
_KILL_LIMIT_S = 1.0
"""How long the kernel may take to end killed processes before we leave without having seen it."""

_GATEWAYS, _WORKERS = 0, 1
"""Stop orders."""
_OPTIONS = {"gateway.grpc_address": "--grpc-address", "gateway.http_address": "--http-address"}
"""How a gateway is told the real addresses of ports that are held for it."""

log = get_logger()


class Command(NamedTuple):
    """What to keep running."""

    name: str
    argv: Sequence[str]
    stop_order: int
    """Processes of a lower number stop first; those of the same number together, and they can stand in for another."""


class _Kept:
    """One command's present process and history."""

    def __init__(self, command: Command, settings: SupervisorSettings) -> None:
        self.command = command
        self.child: Child | None = None
        self.gone = asyncio.Event()
        self.gone.set()
        self.was_ready = False
        self.serves = False
        """Its present process has announced that it is ready."""
        self.last_failure = ""
        self.restart: asyncio.TimerHandle | None = None
        self.backoff = Backoff(
            first_s=settings.backoff_first_ms / 1000,
            max_s=settings.backoff_max_ms / 1000,
            stable_s=settings.stable_ms / 1000,
        )


class Supervisor:
    """Keeps commands running until a stop is asked for or there is no hope. One event loop, main thread."""

    def __init__(
        self,
        commands: Sequence[Command],
        settings: SupervisorSettings,
        stop: StopSignal,
        on_ready: Callable[[str, str, bool], None],
        clock: Clock = now_s,
    ) -> None:
        """`on_ready(name, detail, first)` is called each time a process announces that it is ready."""
        self._settings = settings
        self._stop = stop
        self._on_ready = on_ready
        self._clock = clock
        self._kept = [_Kept(command, settings) for command in commands]
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[ExitCode] = self._loop.create_future()

    async def run(self) -> ExitCode:
        """Start everything, wait for the end, stop everything; OK only when a stop was asked for."""
        self._loop.add_reader(self._stop.fileno(), self._signalled)
        try:
            for kept in self._kept:
                self._start(kept)
            code = await self._outcome
            if code in _FINAL_AT_START:
                self._kill_all()  # nothing was ever served: no request to wait for
            await self._stop_all()
            return code
        finally:
            self._loop.remove_reader(self._stop.fileno())
            for kept in self._kept:
                if kept.child is not None:
                    kept.child.close()

    # ------------------------------------------------------------------ running

    def serving(self) -> set[str]:
        """Names of the commands whose present process is ready."""
        return {kept.command.name for kept in self._kept if kept.serves}

    def _start(self, kept: _Kept) -> None:
        kept.restart = None
        now = self._clock()
        try:
            child = Child.spawn(kept.command.name, kept.command.argv)
        except OSError as error:
            kept.last_failure = f"can't be started: {error.strerror}"
            self._failed(kept)
            return
        kept.child = child
        kept.gone.clear()
        kept.backoff.started(now)
        child.on_message(self._loop, lambda _, message: self._heard(kept, message))
        child.on_exit(self._loop, lambda _, code: self._exited(kept, code))

    def _heard(self, kept: _Kept, message: ToSupervisor) -> None:
        if isinstance(message, ProcessReady):
            first, kept.was_ready, kept.serves = not kept.was_ready, True, True
            self._on_ready(kept.command.name, message.detail, first)
        elif isinstance(message, ProcessFailed):
            kept.last_failure = message.text

    def _exited(self, kept: _Kept, code: int) -> None:
        kept.child = None
        served, kept.serves = kept.serves, False
        kept.gone.set()
        if self._outcome.done():
            return
        if not kept.was_ready and code in _FINAL_AT_START:
            log.error("can't start", child=kept.command.name, exit_code=code, reason=kept.last_failure)
            self._outcome.set_result(ExitCode(code))
            return
        kept.last_failure = f"{_told(code)}{': ' if kept.last_failure else ''}{kept.last_failure}"
        self._failed(kept, served=served)

    def _failed(self, kept: _Kept, *, served: bool = False) -> None:
        """Start it again later, or give up on it.

        Who did its work in this life may have met an input that ends it, and the gateway keeps those away.
        """
        now = self._clock()
        if served:
            kept.backoff.worked()
        kept.backoff.failed(now)
        delay_s = kept.backoff.next_delay_s(now)
        failures = kept.backoff.failures_in_a_row
        name, why, kept.last_failure = kept.command.name, kept.last_failure, ""
        if failures >= self._settings.max_failures and not self._others_serve(kept):
            log.error("gave up", child=name, failures=failures, last=why, setting="supervisor.max_failures")
            if not self._outcome.done():
                self._outcome.set_result(ExitCode.INTERNAL)
            return
        log.warning("ended, starts again", child=name, failures=failures, delay_s=round(delay_s, 3), why=why)
        kept.restart = self._loop.call_later(delay_s, self._start, kept)

    def _others_serve(self, kept: _Kept) -> bool:
        """One of several workers that can't live costs its share of the speed; the others' requests stay untouched."""
        order = kept.command.stop_order
        return any(other.serves for other in self._kept if other is not kept and other.command.stop_order == order)

    # ------------------------------------------------------------------ stopping

    def _signalled(self) -> None:
        self._stop.acknowledge()
        if not self._outcome.done():
            log.info("stopping", limit_ms=self._settings.stop_ms)
            self._outcome.set_result(ExitCode.OK)
        if self._stop.count > 1:
            log.warning("asked again: killing what is left")
            self._kill_all()

    async def _stop_all(self) -> None:
        """In order, each told once; what lives after `stop_ms` is killed."""
        for kept in self._kept:
            if kept.restart is not None:
                kept.restart.cancel()
        try:
            async with asyncio.timeout(self._settings.stop_ms / 1000):
                for order in sorted({kept.command.stop_order for kept in self._kept}):
                    await self._end([kept for kept in self._kept if kept.command.stop_order == order])
        except TimeoutError:
            alive = [kept.command.name for kept in self._kept if kept.child is not None]
            log.warning("killing what did not stop in time", children=alive, setting="supervisor.stop_ms")
            self._kill_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KILL_LIMIT_S):
                    await self._all_gone(self._kept)

    async def _end(self, group: Sequence[_Kept]) -> None:
        for kept in group:
            if kept.child is not None:
                kept.child.terminate()
        await self._all_gone(group)

    def _kill_all(self) -> None:
        for kept in self._kept:
            if kept.child is not None:
                kept.child.kill()

    @staticmethod
    async def _all_gone(group: Sequence[_Kept]) -> None:
        for kept in group:
            await kept.gone.wait()


def run(config: Path | None) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code (`shared.errors.ExitCode`).

    `config` None: ./headrace.yaml if there is one, else the defaults. Raises StartupError when a start is hopeless.
    """
    settings = settings_loader.load(config).settings
    logs.configure("supervisor", settings.log)
    if note := more_pool_processes(settings):
        log.info("more pool processes than asked for", note=note)
    runtime = RuntimeDir.open(settings.runtime_dir)
    runtime.lock("supervisor")

    with StopSignal() as stop:
        ports = None
        try:
            ports = _shared_ports(settings)
            runtime.sweep_all()
            commands = _commands(config, settings, ports)
            return int(asyncio.run(_supervise(commands, settings, stop)))
        except StartupError:
            raise
        except Exception:
            log.exception("unexpected failure")
            return int(ExitCode.INTERNAL)
        finally:
            if ports is not None:
                ports.close()
            _tidy(runtime)


async def _supervise(commands: Sequence[Command], settings: Settings, stop: StopSignal) -> ExitCode:
    word = ReadyWord([command.name for command in commands if command.stop_order == _GATEWAYS], settings)
    supervisor = Supervisor(commands, settings.supervisor, stop, word)
    word.serving = supervisor.serving
    return await supervisor.run()


def _shared_ports(settings: Settings) -> HeldPorts | None:
    """Several gateways would let another server in beside them: the ports are taken for all. Raises StartupError."""
    gateway = settings.gateway
    if gateway.processes == 1:
        return None
    return HeldPorts.hold(dict(zip(_OPTIONS, (gateway.grpc_address, gateway.http_address), strict=True)))


def _commands(config: Path | None, settings: Settings, ports: HeldPorts | None = None) -> list[Command]:
    common = [] if config is None else ["--config", str(config)]
    held = [] if ports is None else [word for each in ports.addresses.items() for word in (_OPTIONS[each[0]], each[1])]
    # The gateways stop first: they drain what was admitted, and need their workers for that.
    return [
        *(
            Command(gateway_role(index), [*_module("gateway", index), *held, *common], _GATEWAYS)
            for index in range(settings.gateway.processes)
        ),
        *(
            Command(f"worker-{index}", [*_module("workers", index), *common], _WORKERS)
            for index in range(worker_count(settings.worker))
        ),
    ]


def _module(name: str, index: int) -> list[str]:
    return [sys.executable, "-P", "-m", name, "--index", str(index)]


def _tidy(runtime: RuntimeDir) -> None:
    """Leave nothing behind, also after a gateway that was killed; one started by hand still owns its things."""
    with contextlib.suppress(StartupError):
        runtime.sweep_all()
    runtime.close()


def _told(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
