"""What is measured of generated texts: `/metrics` and `/debug`. Event loop only."""

from collections.abc import Callable
from typing import Any, TypeAlias

from gateway.generation_driver import Generation
from gateway.generation_job import Job
from gateway.generation_lobby import Version
from gateway.metrics import Metrics
from gateway.request import StageTimes
from gateway.series import Counter, Histogram, Rows
from gateway.served import ServedModel

Read: TypeAlias = Callable[[Version], float]
_FIRST_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class GenerationMetrics:
    """Registers with the gateway's metrics, and reads from the driver when somebody looks."""

    def __init__(self, metrics: Metrics, generation: Generation) -> None:
        self._generation = generation
        self._seen = metrics.seen
        registry = metrics.registry
        self._tokens = Counter(
            "headrace_generated_tokens", "Tokens of texts that came to their own end.", ("model",), registry=registry
        )
        self._first_s = Histogram(
            "headrace_first_token_seconds",
            "From arrival to the first part of a text.",
            ("model",),
            buckets=_FIRST_S,
            registry=registry,
        )
        self._token_s = Histogram(
            "headrace_token_seconds",
            "From one token of a text to the next, on average over the text.",
            ("model",),
            buckets=_TOKEN_S,
            registry=registry,
        )
        generation.told = self.ended

        def gauge(name: str, help_text: str, read: Read) -> None:
            metrics.gauges(name, help_text, ("model", "version"), lambda: self._rows(read))

        gauge("headrace_generation_running", "Sequences that workers generate.", _running)
        gauge("headrace_generation_waiting", "Texts that no worker has begun.", _waiting)
        gauge("headrace_generation_tokens_reserved", "Tokens of the workers' caches that are reserved.", _reserved)
        gauge("headrace_generation_tokens_capacity", "Tokens that the workers' caches have room for.", _capacity)

    def ended(self, job: Job, times: StageTimes, seconds: float) -> None:
        """A caller's text came to its own end."""
        name = job.model.name
        self._tokens.labels(name).inc(times.tokens)
        self._first_s.labels(name).observe(times.admit_s + times.first_s)
        if times.tokens > 1:
            self._token_s.labels(name).observe(seconds / (times.tokens - 1))

    def describe(self) -> dict[str, Any]:
        """For `/debug`."""
        return {"generation": [_described(model, version) for model, version in self._versions()]}

    def _versions(self) -> list[tuple[ServedModel, Version]]:
        """Those that have run, or were asked."""
        versions = self._generation.lobby.versions.values()
        found = [(version.model, version) for version in versions if version.model is not None]
        self._seen.update((model.name, model.version) for model, _ in found)
        return found

    def _rows(self, read: Read) -> Rows:
        return [((model.name, model.version), read(version)) for model, version in self._versions()]


def _running(version: Version) -> int:
    return sum(room.rows for room in version.places.rooms.values())


def _waiting(version: Version) -> int:
    return version.places.waiting()


def _reserved(version: Version) -> int:
    return sum(room.tokens for room in version.places.rooms.values())


def _capacity(version: Version) -> int:
    return sum(room.limits.tokens for room in version.places.rooms.values() if room.is_open)


def _described(model: ServedModel, version: Version) -> dict[str, Any]:
    places, pace = version.places, version.pace
    return {
        "model": model.name,
        "version": model.version,
        "running_sequences": _running(version),
        "waiting_texts": places.waiting(),
        "waiting_most": places.waiting_most,
        "tokens_reserved": _reserved(version),
        "tokens_capacity": _capacity(version),
        "sequences_capacity": sum(room.sequences for room in places.rooms.values() if room.is_open),
        "token_ms": round(pace.token_s * 1e3, 3),
        "share_of_max_tokens": round(pace.share, 3),
    }
