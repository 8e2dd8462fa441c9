"""PROCESS: the gateway. The composition root: settings → objects → serve; the only place that constructs.

python -m gateway [--config headrace.yaml] [--index I] [--ready-fd N]

Of several gateways (`gateway.processes`) each is a process of its own number, with its own arena, pool and limits.
"""

import asyncio
import os
import secrets
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

from prometheus_client.exposition import generate_latest

from gateway import command_line
from gateway.admission import Admission
from gateway.api.admin import Admin, Behind
from gateway.api.admin_server import start_admin
from gateway.api.http import RestParts, RunningHttp, start_http
from gateway.api.open_inference.infer import Infer
from gateway.api.open_inference.repository import Repository
from gateway.api.open_inference.service import OpenInference
from gateway.api.outcomes import Outcomes
from gateway.api.server import RunningGrpc, start_grpc
from gateway.batcher import Batcher
from gateway.build import served_models
from gateway.command_line import Told
from gateway.cost_model import CostModel
from gateway.describe import Parts, export
from gateway.describe_lives import LivesShown
from gateway.dispatch import Dispatcher
from gateway.event_loop import new_event_loop
from gateway.everywhere import Everywhere
from gateway.flow import Door, Flow
from gateway.forecast import Forecast
from gateway.gate import Gate
from gateway.generation_driver import Generation
from gateway.generation_metrics import GenerationMetrics
from gateway.hangs import slowest_s
from gateway.inflight import InFlight
from gateway.leases import Leases
from gateway.lives import Knit, Lives
from gateway.metrics import Metrics
from gateway.pauses import Pauses
from gateway.pool_client import PoolClient, PoolJob
from gateway.pool_processes import PoolProcesses
from gateway.proof import AtTexts
from gateway.quarantine import Quarantine
from gateway.readiness import Readiness
from gateway.routing import Routing
from gateway.row_caps import RowCaps
from gateway.serve import Announcement, serve, unless_stopped, until_settled
from gateway.work import Work
from gateway.worker_client import WorkerClient
from shared import logs, settings_loader
from shared.arena import Arena
from shared.board import Board
from shared.child import (
    Announcer,
    StopSignal,
    bind_to_parent,
    collect_garbage_rarely,
    keep_freed_memory,
    raise_file_limit,
    run_main,
)
from shared.clock import now_s
from shared.devices import worker_count
from shared.errors import ExitCode
from shared.handover import Welcomer
from shared.messages import PROTOCOL_VERSION, FromWorker, ToWorker, Welcome
from shared.runtime_dir import RuntimeDir, gateway_role
from shared.settings import Settings
from shared.shares import share_of
from shared.transport import Router

MESSAGE_BYTES, HEAP_BYTES = 32 << 20, 256 << 20
"""Messages up to this size, and this much heap, are reused: a request of 602 KB cost 300 to 700 page faults, more than
half of the gateway's time for it."""

SWITCH_S = 0.0005
"""How soon the event loop lets another thread of this process in."""

_until_the_end: list[RunningGrpc] = []
"""Keeps the server answering (with refusals) until the process exits; a collected server cancels its calls."""


class Front(NamedTuple):
    """What listens."""

    grpc: RunningGrpc
    http: RunningHttp


class Gateway:
    """All parts of the process, wired. Who owns what, and who tells whom, is visible here and nowhere else."""

    def __init__(self, settings: Settings, config: Path | None, runtime: RuntimeDir, index: int) -> None:
        """Builds; starts nothing. `settings`: this gateway's share. Raises StartupError."""
        models, broken = served_models(settings)
        count = settings.gateway.processes
        self.settings, self.name = settings, gateway_role(index)
        self.generation = secrets.randbits(63)
        self.pauses = Pauses()
        private = runtime.private(self.generation, index)
        self.endpoint = f"ipc://{private}/worker.sock"
        self.arena = Arena.create(settings.arena.budget_bytes)
        board = Board(self.arena.fd, self.arena.nbytes)

        self.metrics, self.outcomes, cost = Metrics(), Outcomes(), CostModel()
        self.admission, routing = Admission(settings.admission), Routing(models, broken)
        leases = Leases(self.arena, settings.arena.inline_bytes, settings.worker.staged_batches + 1)
        self.router: Router[FromWorker, ToWorker] = Router(
            self.endpoint,
            FromWorker,
            generation=self.generation,
            high_water_mark=1024,  # far above the batches that a worker may hold, with their cancellations
        )
        self.workers = WorkerClient(self.router, self._welcome, board, shared=count > 1)
        work: InFlight[Work] = InFlight()
        jobs: InFlight[PoolJob] = InFlight()
        self.dispatch = Dispatcher(Batcher(cost.predict), cost, self.workers, work, settings.worker)
        self.processes = PoolProcesses(settings, config, self.arena, f"ipc://{private}/pool.sock", self.generation)
        self.readiness = Readiness(routing, worker_count(settings.worker))
        self.pool = PoolClient(self.processes, jobs, self.readiness.pipeline_opened)
        self.forecast = Forecast(self.processes.count, routing)
        quarantine = Quarantine()
        door = Door(self.admission, self.forecast, quarantine)
        self.gate = Gate(self.admission, self.forecast, self.metrics)
        self.flow = Flow(door, routing, leases, self.pool, self.dispatch, self.metrics)
        self.texts = self.flow.generation = Generation(self.workers, settings.worker, self.metrics.drops)
        self.texts.hangs.slowest_s = lambda: slowest_s(cost)
        self.welcomer = Welcomer(
            runtime.gateway_socket(index), self.arena.fd, self.workers.on_hello, self.workers.on_lost
        )

        parts = Parts(
            admission=self.admission,
            arena=self.arena,
            cost=cost,
            dispatch=self.dispatch,
            forecast=self.forecast,
            inflight=(work, jobs, self.texts.held),
            leases=leases,
            metrics=self.metrics,
            pool=self.pool,
            processes=self.processes,
            quarantine=quarantine,
            routing=routing,
            workers=self.workers,
        )
        row_caps = RowCaps(routing.models, self.dispatch.configure)
        self.workers.connect([row_caps, self.dispatch, self.texts, self.readiness])
        self.dispatch.drops, self.outcomes.refused_unread = self.metrics.drops, self.metrics.unread
        self.dispatch.slots_back = self.pool.slots_back = leases.pump
        leases.nobody_comes = self.dispatch.kick
        self.metrics.registry.register(self.outcomes)
        knit = Knit(
            self.admission, cost, self.dispatch, self.flow, self.metrics, self.pool, self.readiness, self.workers
        )
        self.lives = Lives(settings, routing, knit, row_caps.forget)
        self.control = self.lives.control
        self._show(parts)
        self.everywhere = None
        if count > 1:
            self.everywhere = Everywhere(index, [runtime.peer_socket(each) for each in range(count)], self.control)
            self.everywhere.connect(lambda: generate_latest(self.metrics.registry), self.readiness.debug)
        self.control.start(models)
        orders = self.everywhere or self.control
        self.lives.begin(orders, leads=index == 0)
        self.admin = Admin(settings, Behind(orders, self.readiness, self.workers.memory))
        self.admin_socket, self.leads = runtime.admin_socket(index), index == 0
        self.open_inference = OpenInference(
            Infer(self.flow, routing, settings, self.metrics.statistics),
            routing,
            self.metrics.statistics,
            self.readiness,
            Repository(self.readiness, self.everywhere or self.control, allowed=settings.gateway.repository_control),
        )

    def _show(self, parts: Parts) -> None:
        """Put everything that the parts know of themselves on `/metrics` and `/debug`."""
        lives, generation = LivesShown(self.lives, self.workers), GenerationMetrics(self.metrics, self.texts)
        export(parts)
        lives.export(self.metrics)
        self.readiness.texts = AtTexts(self.workers, self.texts.lobby)
        self.readiness.connect(self.flow, lambda: parts.describe() | lives.describe() | generation.describe())

    async def run(self, announcer: Announcer, stop: StopSignal) -> ExitCode:
        """Serve until asked to stop. Ports come first, so that one in use ends the start before anything else runs.

        Of several gateways' ports that is known already; there each listens when it is ready (see `LISTEN_LATEST_S`).
        """
        loop = asyncio.get_running_loop()
        front = None if self.everywhere else await self._listen()
        admin = await start_admin(self.settings, self.admin_socket, self.admin, on_tcp=self.leads)
        self.router.start(loop, self.workers.on_message)
        await self.welcomer.start()
        self.processes.start()
        collect_garbage_rarely()
        self.lives.watch.start()
        try:
            if self.everywhere is not None:
                await unless_stopped(self.everywhere.start(), stop)
                await until_settled(self.readiness, stop, self._tick)
            if front is None:
                front = await self._listen()
            ports = (front.grpc.port, front.http.port)
            announcement = Announcement(announcer, self.readiness, ports, self.settings, self.name)
            return await serve(stop, announcement, self._tick)
        finally:
            self.admission.close_doors()
            self.readiness.drain()
            self.lives.watch.close()
            await admin.close()
            if front is not None:
                await front.grpc.drain(self.settings.gateway.drain_ms / 1000)
                _until_the_end.append(front.grpc)
                await front.http.stop()
            if self.everywhere is not None:
                self.everywhere.close()
            await self.welcomer.close()
            self.workers.close()
            await self.processes.stop(limit_s=1.0)  # idle by now: the calls that used them have ended

    async def _listen(self) -> Front:
        grpc = await start_grpc(self.settings, self.flow, self.readiness, self.outcomes, self.open_inference, self.gate)
        rest = RestParts(self.flow, self.open_inference, self.outcomes, self.everywhere)
        return Front(grpc, await start_http(self.settings, self.readiness, self.metrics.registry, rest))

    def _tick(self) -> None:
        paused_s = self.pauses.noticed(now_s())
        if paused_s:
            logs.get_logger().warning("did not run for a while: nobody is judged by it", seconds=round(paused_s, 1))
            return  # first what arrived meanwhile is read
        self.processes.tick(self.pauses)
        self.pool.tick(self.settings.pool.job_limit_ms / 1000, self.pauses)
        self.dispatch.tick(self.pauses)
        self.texts.tick(self.pauses)
        self.readiness.tick()
        self.lives.versions.tidy()
        self.forecast.tick(now_s())

    def _welcome(self, identity: bytes) -> Welcome:
        return Welcome(PROTOCOL_VERSION, self.generation, self.endpoint, identity, self.arena.nbytes)


async def run(settings: Settings, told: Told, announcer: Announcer, stop: StopSignal) -> ExitCode:
    """One life of the gateway, inside its role's lock."""
    runtime = RuntimeDir.open(settings.runtime_dir)
    held = None
    try:
        runtime.lock(gateway_role(told.number))
        runtime.sweep(told.number)
        if settings.gateway.processes > 1 and not told.ports:
            held = command_line.hold_ports(settings, told.number, runtime)
        return await Gateway(share_of(settings, told.number), told.config, runtime, told.number).run(announcer, stop)
    finally:
        if held is not None:
            held.close()
        runtime.close()


def main() -> NoReturn:
    """Parse the command line, run, and end the process with its exit code."""
    told, ready_fd = command_line.parse()
    announcer = Announcer(ready_fd)
    run_main(gateway_role(told.number), lambda: _start(told, announcer), announcer)


def _start(told: Told, announcer: Announcer) -> int:
    bind_to_parent(told.parent_pid)
    keep_freed_memory(MESSAGE_BYTES, HEAP_BYTES)
    settings = command_line.with_ports(settings_loader.load(told.config).settings, told)
    logs.configure(gateway_role(told.number), settings.log)
    if (files := raise_file_limit()) < 4096:  # each connection is one
        logs.get_logger().warning(
            "few files may be open: raise the hard limit (ulimit -n) to 4096 or more", limit=files
        )
    if os.geteuid() == 0:
        logs.get_logger().warning("runs as root: a user of its own is enough, and safer")
    # A disk's answers are waited for in threads, which an event loop that is never idle would let in every 5 ms only:
    # a rollback under full load took seconds.
    sys.setswitchinterval(SWITCH_S)
    os.umask(0o077)  # whatever this process creates, sockets included, is its user's alone
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    with StopSignal() as stop:
        # The loop is never closed: that would cancel the refusals of the last moment, and the process ends next.
        return loop.run_until_complete(run(settings, told, announcer, stop))


if __name__ == "__main__":
    main()
