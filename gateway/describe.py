"""What `/debug` and the gauges of `/metrics` show of the gateway's parts."""

from typing import Any

from gateway.admission import Admission
from gateway.cost_model import CostModel
from gateway.dispatch import Dispatcher
from gateway.leases import Leases
from gateway.metrics import Metrics
from gateway.pool_client import PoolClient
from gateway.pool_processes import PoolProcesses
from gateway.worker_client import WorkerClient
from shared.arena import Arena


class Describe:
    """Reads all parts; called on the event loop when somebody looks."""

    def __init__(  # noqa: PLR0913, PLR0917 - it shows every part, and owns none
        self,
        admission: Admission,
        leases: Leases,
        arena: Arena,
        dispatch: Dispatcher,
        workers: WorkerClient,
        processes: PoolProcesses,
        cost: CostModel,
    ) -> None:
        self.admission = admission
        self.leases = leases
        self.arena = arena
        self.dispatch = dispatch
        self.workers = workers
        self.processes = processes
        self.cost = cost
        self.pool: PoolClient | None = None

    def __call__(self) -> dict[str, Any]:
        """JSON-able."""
        memory = self.arena.stats()
        return {
            "in_flight": {
                "requests": self.admission.in_flight_requests,
                "rows": self.admission.in_flight_rows,
                "bytes": self.admission.in_flight_bytes,
            },
            "queues": {
                "waiting_for_slot": self.leases.waiting_items(),
                "waiting_for_pool": self.pool.waiting() if self.pool else 0,
                "waiting_for_batch": self.dispatch.waiting_items(),
                "batches_at_workers": self.dispatch.batches_out(),
            },
            "arena": {
                "bytes": self.arena.nbytes,
                "leased": memory.leased_bytes,
                "quarantined": memory.quarantined_bytes,
                "largest_free": memory.largest_free_bytes,
            },
            "pool": self.processes.describe(),
            "workers": [
                {
                    "worker": worker.name,
                    "pid": worker.pid,
                    "device": worker.device,
                    "models": sorted(worker.loaded),
                    "batches": self.dispatch.outstanding(worker),
                }
                for worker in self.workers.workers()
            ],
            "cost": [
                {"model": key.model, "bucket": key.bucket, **self.cost.line(key)._asdict()}
                for key in self.cost.keys()  # noqa: SIM118 - a method of ours, not a dict's
            ],
        }

    def bad_frames(self) -> float:
        """Frames of workers and pool processes that could not be decoded."""
        return self.processes.bad_frames + self.workers.bad_frames

    def stale_frames(self) -> float:
        """Frames that belong to another life of the gateway."""
        return self.processes.stale_frames + self.workers.stale_frames


def export(metrics: Metrics, parts: Describe) -> None:
    """Gauges and counts that the parts keep themselves."""
    gauge, arena = metrics.gauge, parts.arena
    gauge("headrace_in_flight_requests", "Admitted and not yet answered.", lambda: parts.admission.in_flight_requests)
    gauge("headrace_in_flight_rows", "Rows of these.", lambda: parts.admission.in_flight_rows)
    gauge("headrace_in_flight_bytes", "Payload bytes of these.", lambda: parts.admission.in_flight_bytes)
    gauge("headrace_waiting_for_slot", "Items without a slot yet, still encoded.", parts.leases.waiting_items)
    gauge("headrace_waiting_for_batch", "Items prepared and waiting for a batch.", parts.dispatch.waiting_items)
    gauge("headrace_arena_leased_bytes", "Arena bytes in use.", lambda: arena.stats().leased_bytes)
    gauge("headrace_arena_quarantined_bytes", "Held by a process, owner gone.", lambda: arena.stats().quarantined_bytes)
    gauge("headrace_workers", "Connected workers.", lambda: len(list(parts.workers.workers())))
    gauge("headrace_pool_processes", "Pool processes that take jobs.", lambda: len(list(parts.processes.ready())))
    if parts.pool is not None:
        pool = parts.pool
        gauge("headrace_waiting_for_pool", "Jobs that no pool process has yet.", pool.waiting)
        metrics.counter("headrace_pool_processes_lost_total", "Pool processes that died.", lambda: pool.lost_processes)
        metrics.counter("headrace_pool_jobs_expired_total", "Dropped before preparation.", lambda: pool.expired)
    metrics.counter("headrace_workers_lost_total", "Workers that died or left.", lambda: parts.dispatch.lost_workers)
    metrics.counter("headrace_bad_frames_total", "Undecodable messages dropped.", parts.bad_frames)
    metrics.counter("headrace_stale_frames_total", "Messages of another life dropped.", parts.stale_frames)
