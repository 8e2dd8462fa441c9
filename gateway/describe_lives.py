"""What `/debug` and `/metrics` show of versions: traffic, the guard's figures, workers' memory, caches."""

from typing import Any

import msgspec

from gateway.lives import Lives
from gateway.metrics import Metrics, Rows
from gateway.orders import Standing
from gateway.worker_client import WorkerClient


class LivesShown:
    """Read on the event loop when somebody looks."""

    def __init__(self, lives: Lives, workers: WorkerClient) -> None:
        self._lives = lives
        self._workers = workers

    def describe(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "traffic": {name: self._traffic(name) for name in self._lives.control.names()},
            "memory": {worker: msgspec.to_builtins(note) for worker, note in self._workers.memory()},
            "caches": {
                name: {
                    "bytes": store.nbytes,
                    "entries": len(store),
                    "hits": store.hits,
                    "misses": store.misses,
                    "evictions": store.evictions,
                }
                for name, store in self._lives.reuse.stores()
            },
            "waiting_for_load": self._lives.demand.waiting(),
            "copies": {"begun": self._lives.shadows.begun, "left_out": self._lives.shadows.left_out},
        }

    def _traffic(self, name: str) -> dict[str, Any]:
        traffic = self._lives.control.traffic(name)
        figures = self._lives.control.figures(name)
        shown: dict[str, Any] = msgspec.to_builtins(traffic.without_history())
        return {
            **shown,
            "unwritten": self._standing(name).unwritten,
            "figures": [msgspec.to_builtins(each) for each in figures],
        }

    def export(self, metrics: Metrics) -> None:
        """Gauges and counts that others keep."""
        metrics.gauges(
            "headrace_version_share",
            "Percent of a model's callers whom this version answers (0 for a shadow).",
            ("model", "version", "role"),
            self._shares,
        )
        metrics.gauges(
            "headrace_traffic_unwritten",
            "1 while a rollback is in force that could not be written to traffic.json yet.",
            ("model",),
            lambda: [((name,), float(bool(self._standing(name).unwritten))) for name in self._names()],
        )
        caches = ("cache",)
        stores = self._lives.reuse.stores
        metrics.counters("headrace_cache_hits_total", "Found.", caches, lambda: _of(stores(), "hits"))
        metrics.counters("headrace_cache_misses_total", "Not found.", caches, lambda: _of(stores(), "misses"))
        metrics.counters("headrace_cache_evictions_total", "No room.", caches, lambda: _of(stores(), "evictions"))
        metrics.gauges("headrace_cache_bytes", "In use.", caches, lambda: _of(stores(), "nbytes"))
        metrics.counter(
            "headrace_single_flight_joined_total",
            "Requests answered by what another one computed at the same time.",
            self._lives.reuse.joined,
        )
        metrics.gauge("headrace_waiting_for_load", "Requests that wait for a model.", self._lives.demand.waiting)
        shadows = self._lives.shadows
        metrics.counter("headrace_copies_total", "Requests copied to a shadow.", lambda: shadows.begun)
        metrics.counter("headrace_copies_left_out_total", "Not copied for want of room.", lambda: shadows.left_out)
        self._export_memory(metrics)

    def _names(self) -> list[str]:
        return self._lives.control.names()

    def _standing(self, name: str) -> Standing:
        return self._lives.control.standing(name)

    def _export_memory(self, metrics: Metrics) -> None:
        memory = self._workers.memory
        for name, help_text, field in (
            ("budget", "What its models may take.", "budget_bytes"),
            ("models", "What its models take, as measured.", "models_bytes"),
            ("process", "What the system says that it has.", "process_bytes"),
        ):

            def read(field: str = field) -> Rows:
                return [((worker,), float(getattr(note, field))) for worker, note in memory()]

            metrics.gauges(f"headrace_worker_{name}_bytes", help_text, ("worker",), read)
        worker = ("worker",)
        metrics.counters(
            "headrace_worker_loads_total", "Versions loaded.", worker, lambda: [((w,), n.loads) for w, n in memory()]
        )
        metrics.counters(
            "headrace_worker_evictions_total",
            "Versions given up for another one.",
            worker,
            lambda: [((w,), n.evictions) for w, n in memory()],
        )
        metrics.gauges(
            "headrace_version_memory_bytes",
            "What a loaded version takes, as measured.",
            ("worker", "model", "version"),
            lambda: [((w, use.name, use.version), use.memory_bytes) for w, n in memory() for use in n.uses],
        )

    def _shares(self) -> Rows:
        found: list[tuple[tuple[str, ...], float]] = []
        for name in self._lives.control.names():
            traffic = self._lives.control.traffic(name)
            canary = traffic.canary
            percent = canary.percent if canary is not None and not canary.shadow else 0.0
            found.append(((name, traffic.current, "current"), 100.0 - percent))
            if canary is not None:
                found.append(((name, canary.version, "shadow" if canary.shadow else "canary"), percent))
        return found


def _of(stores: Any, field: str) -> Rows:  # noqa: ANN401 - stores of different kinds of values
    return [((name,), float(getattr(store, field))) for name, store in stores]
