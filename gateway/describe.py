"""What `/debug` and the gauges of `/metrics` show of the gateway's parts."""

from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.admission import Admission
from gateway.cost_model import CostModel, QueueKey
from gateway.dispatch import Dispatcher
from gateway.forecast import Forecast
from gateway.inflight import InFlight
from gateway.leases import Leases
from gateway.metrics import Metrics, Rows
from gateway.pool_client import PoolClient
from gateway.pool_processes import PoolProcesses
from gateway.quarantine import Quarantine
from gateway.routing import Routing
from gateway.served import ServedModel
from gateway.worker_client import WorkerClient
from shared.arena import Arena


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that has something to show; read on the event loop when somebody looks."""

    admission: Admission
    arena: Arena
    cost: CostModel
    dispatch: Dispatcher
    forecast: Forecast
    inflight: tuple[InFlight[Any], ...]
    leases: Leases
    metrics: Metrics
    pool: PoolClient
    processes: PoolProcesses
    quarantine: Quarantine
    routing: Routing
    workers: WorkerClient

    def describe(self) -> dict[str, Any]:
        """JSON-able."""
        memory = self.arena.stats()
        return {
            "models": [self._model(model) for model in self.routing.models()],
            "broken_models": {state.name: state.reason for state in self.routing.states() if not state.version},
            "in_flight": {
                "requests": self.admission.in_flight_requests,
                "rows": self.admission.in_flight_rows,
                "bytes": self.admission.in_flight_bytes,
            },
            "queues": {
                "waiting_for_slot": self.leases.waiting_items(),
                "waiting_for_pool": self.pool.waiting(),
                "waiting_for_batch": self.dispatch.waiting_items(),
                "batches_at_workers": len(self.dispatch.running),
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
                    "failed": worker.failed,
                    "batches": self.dispatch.outstanding(worker),
                }
                for worker in self.workers.workers()
            ],
            "ran": {name: ran._asdict() for name, ran in sorted(self.dispatch.running.ran.items())},
            "cost": [
                {"model": key.model, "bucket": key.bucket, **self.cost.line(key)._asdict()}
                for key in self.cost.keys()  # noqa: SIM118 - a method of ours, not a dict's
            ],
        }

    def _model(self, model: ServedModel) -> dict[str, Any]:
        counts = self.metrics.statistics.of(model.name, model.version)
        stages = {
            "queue": counts.queue,
            "compute_input": counts.compute_input,
            "compute_infer": counts.compute_infer,
            "compute_output": counts.compute_output,
            "request": counts.success,
        }
        return {
            **msgspec.structs.asdict(model.state),
            "preparing_rows": model.preparing_rows,
            "waiting_rows": self.dispatch.waiting_rows(model.number),
            "answered": counts.success.count,
            "failed": {reason: duration.count for reason, duration in counts.fail.items()},
            "dropped": self.metrics.drops.of(model.name),
            "rows_for_nobody": self.metrics.drops.rows_for_nobody.get(model.name, 0),
            "mean_ms": {name: round(stage.mean_ms, 3) for name, stage in stages.items()},
            "batch_rows": {rows: batch.count for rows, batch in sorted(counts.batches.items())},
        }

    def costs(self) -> Rows:
        """The cost model's lines: seconds of any batch, and of each row more; a bounded number of buckets a model."""
        served = {model.number: model for model in self.routing.models()}
        for key in sorted({*map(QueueKey, served), *self.cost.keys()}):
            if key.model not in served:
                continue
            model, line = served[key.model], self.cost.line(key)
            labels = model.name, model.version, "x".join(map(str, key.bucket))
            yield (*labels, "fixed"), line.fixed_s
            yield (*labels, "row"), line.row_s

    def held(self) -> Rows:
        """Batches in the hands of each connected worker."""
        return [((worker.name,), self.dispatch.outstanding(worker)) for worker in self.workers.workers()]

    def ran_batches(self) -> Rows:
        """Batches of each worker in all of its lives."""
        return [((name,), ran.batches) for name, ran in self.dispatch.running.ran.items()]

    def ran_rows(self) -> Rows:
        """Rows of these."""
        return [((name,), ran.rows) for name, ran in self.dispatch.running.ran.items()]

    def bad_frames(self) -> float:
        """Frames of workers and pool processes that could not be decoded."""
        return self.processes.bad_frames + self.workers.bad_frames

    def stale_frames(self) -> float:
        """Frames that belong to another life of the gateway."""
        return self.processes.stale_frames + self.workers.stale_frames


_COST = "What a batch costs, as learned: `fixed`, and for each `row`; by the bucket of inputs with free dimensions."


def export(parts: Parts) -> None:
    """Gauges and counts that the parts keep themselves."""
    metrics, arena, pool = parts.metrics, parts.arena, parts.pool
    gauge = metrics.gauge
    gauge("headrace_in_flight_requests", "Admitted and not yet answered.", lambda: parts.admission.in_flight_requests)
    gauge("headrace_in_flight_rows", "Rows of these.", lambda: parts.admission.in_flight_rows)
    gauge("headrace_in_flight_bytes", "Payload bytes of these.", lambda: parts.admission.in_flight_bytes)
    gauge("headrace_waiting_for_slot", "Items without a slot yet, still encoded.", parts.leases.waiting_items)
    gauge("headrace_waiting_for_batch", "Items prepared and waiting for a batch.", parts.dispatch.waiting_items)
    gauge("headrace_arena_leased_bytes", "Arena bytes in use.", lambda: arena.stats().leased_bytes)
    gauge("headrace_arena_quarantined_bytes", "Held by a process, owner gone.", lambda: arena.stats().quarantined_bytes)
    gauge("headrace_workers", "Connected workers.", lambda: len(list(parts.workers.workers())))
    gauge("headrace_pool_processes", "Pool processes that take jobs.", lambda: len(list(parts.processes.ready())))
    metrics.gauges("headrace_cost_seconds", _COST, ("model", "version", "bucket", "part"), parts.costs)
    metrics.gauges(
        "headrace_forecast_correction",
        "Real time ÷ forecast that all but one in two hundred requests stay within, learned.",
        ("model",),
        lambda: [((model.name,), parts.forecast.correction(model)) for model in parts.routing.models()],
    )
    gauge("headrace_quarantined_inputs", "Inputs refused for having ended processes.", lambda: len(parts.quarantine))
    gauge("headrace_waiting_for_pool", "Jobs that no pool process has yet.", pool.waiting)
    metrics.counter("headrace_pool_processes_lost_total", "Pool processes that died.", lambda: pool.lost_processes)
    metrics.counter("headrace_pool_jobs_expired_total", "Dropped before preparation.", lambda: pool.expired)
    metrics.gauges("headrace_worker_batches_held", "Batches that a worker holds.", ("worker",), parts.held)
    metrics.counters("headrace_worker_batches_total", "Batches that a worker ran.", ("worker",), parts.ran_batches)
    metrics.counters("headrace_worker_rows_total", "Rows that a worker ran.", ("worker",), parts.ran_rows)
    metrics.counter("headrace_workers_lost_total", "Workers that died or left.", lambda: parts.dispatch.lost_workers)
    late = "Answers to what was given up before."
    metrics.counter("headrace_late_answers_total", late, lambda: sum(table.late for table in parts.inflight))
    metrics.counter("headrace_bad_frames_total", "Undecodable messages dropped.", parts.bad_frames)
    metrics.counter("headrace_stale_frames_total", "Messages of another life dropped.", parts.stale_frames)
