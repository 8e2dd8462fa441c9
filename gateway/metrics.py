"""All metrics of the gateway, under the words that logs and docs use. Observed in a few microseconds, no formatting.

Labels never hold user data: `model` is a served model's name (or `unknown`), `outcome` a word of `shared.errors.Code`
or `ok`, so the number of series is bounded.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias

from prometheus_client import CollectorRegistry, disable_created_metrics

from gateway.batcher import Batch
from gateway.drops import Drops, Point
from gateway.pieces import Pieces
from gateway.request import DEFAULT_PRIORITY, Request, StageTimes, is_own
from gateway.series import Count, Counter, Histogram, Readings, Rows
from gateway.statistics import Statistics
from shared.clock import now_s
from shared.errors import Code, HeadraceError
from shared.messages import BatchDone

if TYPE_CHECKING:
    from gateway.served import ServedModel, Terms

__all__ = ["DROPPED", "FOR_NOBODY", "Judged", "MeasuredRequest", "Metrics", "Rows"]

disable_created_metrics()  # type: ignore[no-untyped-call]  # else each one has a second series, which nobody asked for

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_STAGES = ("admit", "wait", "prepare", "batch", "copy", "run", "finish")

DROPPED = (
    "Items (inputs, or pieces of large ones) dropped before they were computed: at the door (admission), before they "
    "were prepared (prepare), before a worker got them (batch), by the worker (copy)."
)
FOR_NOBODY = "Rows computed for a caller that had left, or whose time was over before the answer, however close it was."

_LEFT = (Code.CANCELLED, Code.DEADLINE_EXCEEDED)

Judged: TypeAlias = "Callable[[MeasuredRequest, Code | None, float], None]"


class _OfModel:
    """What one model has computed, with labels resolved once."""

    __slots__ = ("batch_rows", "rescued", "rows")

    def __init__(self, metrics: "Metrics", name: str) -> None:
        self.batch_rows = metrics.batch_rows.labels(name)
        self.rows = metrics.rows.labels(name)
        self.rescued = metrics.rows_rescued.labels(name)


class _OfRequests:
    """What has become of one model's requests: ten times as many series, so only once there was one."""

    __slots__ = ("nonfinite", "outcomes", "request_s", "stages")

    def __init__(self, metrics: "Metrics", name: str) -> None:
        self.outcomes = {word: metrics.requests.labels(name, word) for word in ("ok", *Code)}
        self.request_s = metrics.request_s.labels(name)
        self.stages = [metrics.stage_s.labels(name, stage) for stage in _STAGES]
        self.nonfinite = metrics.rows_nonfinite.labels(name)


class Metrics(Readings):
    """The registry and what is observed in it."""

    def __init__(self) -> None:
        super().__init__(CollectorRegistry())
        registry = self.registry
        self.requests = Counter("headrace_requests", "Requests by outcome.", ("model", "outcome"), registry=registry)
        self.request_s = Histogram(
            "headrace_request_seconds", "From arrival to answer.", ("model",), buckets=_SECONDS, registry=registry
        )
        self.stage_s = Histogram(
            "headrace_stage_seconds", "Time in each stage.", ("model", "stage"), buckets=_SECONDS, registry=registry
        )
        self.batch_rows = Histogram(
            "headrace_batch_rows",
            "Rows of each batch.",
            ("model",),
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
            registry=registry,
        )
        self.rows = Counter("headrace_rows", "Rows computed by a worker.", ("model",), registry=registry)
        self.drops = drops = Drops()
        self.counters("headrace_dropped_total", DROPPED, ("model", "point", "reason"), drops.rows)
        self.counters("headrace_rows_for_nobody_total", FOR_NOBODY, ("model",), self._rows_for_nobody)
        self.rows_nonfinite = Counter(
            "headrace_rows_nonfinite", "Rows passed on with NaN or infinity in them.", ("model",), registry=registry
        )
        self.rows_rescued = Counter(
            "headrace_rows_rescued",
            "Rows that overflowed in FP16 and were fine in FP32.",
            ("model",),
            registry=registry,
        )
        self.version_requests = Counter(
            "headrace_version_requests",
            "Requests by the version that they went to, and by outcome.",
            ("model", "version", "outcome"),
            registry=registry,
        )
        self.version_request_s = Histogram(
            "headrace_version_request_seconds",
            "From arrival to answer, by version.",
            ("model", "version"),
            buckets=_SECONDS,
            registry=registry,
        )
        self._models: dict[str, _OfModel] = {}
        self._requests: dict[str, _OfRequests] = {}
        self._versions: dict[tuple[str, str], _OfVersion] = {}
        self.judged: Judged = lambda _measured, _outcome, _seconds: None
        """Told of every request that went to a version, how it ended and after how long."""
        self.statistics = Statistics()
        """The same events, as the Open Inference Protocol counts them."""

    def request(self, request: Request) -> "MeasuredRequest":
        """Measures one request: `with metrics.request(request) as measured: measured.model = …`."""
        return MeasuredRequest(self, request)

    def batch(self, model: "ServedModel", batch: Batch, done: BatchDone, nobody: int) -> None:
        """One batch came back."""
        self.seen.add((model.name, model.version))
        of_model = self.of(model.name)
        of_model.batch_rows.observe(batch.rows)
        of_model.rows.inc(done.rows_run)
        if not is_own(batch.items[0].priority):  # statistics are of what callers asked for
            self._ran(model, batch.rows, done)
            self.drops.computed(model.name, nobody)
        if done.rows_rescued:
            of_model.rescued.inc(done.rows_rescued)

    def _ran(self, model: "ServedModel", rows: int, done: BatchDone) -> None:
        """Not for a version that has gone, whose callers have all left before: its entry would stay for ever."""
        name, version = model.name, model.version
        if model.state.phase != "unloaded" or self.statistics.has(name, version):
            self.statistics.of(name, version).ran(rows, done.copy_s, done.run_s)

    def _rows_for_nobody(self) -> Rows:
        return [((name,), self.drops.rows_for_nobody.get(name, 0)) for name in self._models]

    def unread(self, reason: Code) -> None:
        """A call was refused before anything was read of it, so that nobody knows its model: one request, one item."""
        self.of("unknown")
        self.requests_of("unknown").outcomes[reason].inc()
        self.drops.add("unknown", Point.ADMISSION, reason, DEFAULT_PRIORITY)

    def known(self, asked: str) -> str:
        """The name that a request gives, once it is one of ours that has run; else `unknown`."""
        return asked if asked in self._models else "unknown"

    def of_version(self, name: str, version: str) -> "_OfVersion":
        """The metrics of one version of a served model."""
        found = self._versions.get((name, version))
        if found is None:
            found = self._versions[name, version] = _OfVersion(self, (name, version))
            self.seen.add((name, version))
        return found

    def forget(self, name: str, version: str) -> None:
        """The version is served no more: its series end, so that they don't pile up over the years."""
        self._versions.pop((name, version), None)
        self.seen.discard((name, version))
        self.statistics.forget(name, version)
        for series in (self.version_requests, self.version_request_s):
            series.forget(name, version)

    def of(self, name: str) -> _OfModel:
        """The metrics of a served model; `unknown` for requests that named none of ours."""
        found = self._models.get(name)
        if found is None:
            found = self._models[name] = _OfModel(self, name)
        return found

    def requests_of(self, name: str) -> _OfRequests:
        """The metrics of a served model's requests; `unknown` as above."""
        found = self._requests.get(name)
        if found is None:
            found = self._requests[name] = _OfRequests(self, name)
        return found


class _OfVersion:
    """One version's outcomes and latencies, with labels resolved once."""

    __slots__ = ("_labels", "_outcomes", "_requests", "_seconds")

    def __init__(self, metrics: "Metrics", labels: tuple[str, str]) -> None:
        self._labels = labels
        self._requests = metrics.version_requests
        self._seconds = metrics.version_request_s.labels(*labels)
        self._outcomes: dict[str, Count] = {}

    def count(self, outcome: Code | None, seconds: float) -> None:
        """One request ended."""
        word = outcome or "ok"
        counted = self._outcomes.get(word)
        if counted is None:  # most versions never see most outcomes: no series for these
            counted = self._outcomes[word] = self._requests.labels(*self._labels, word)
        counted.inc()
        if outcome is None:
            self._seconds.observe(seconds)


class MeasuredRequest:
    """Counts a request's outcome exactly once, whatever it is. The flow fills in how far the request has come."""

    __slots__ = ("_metrics", "model", "pieces", "request", "rows", "terms")

    def __init__(self, metrics: Metrics, request: Request) -> None:
        self._metrics = metrics
        self.request = request
        self.model: ServedModel | None = None
        self.pieces: list[Pieces] = []
        self.rows = 0
        self.terms: Terms | None = None
        """Once it is admitted."""

    def routed(self, model: "ServedModel") -> None:
        """Who is to answer it; from here on the version is kept for this request. Again when that one could not."""
        if self.model is not None:
            self.model.requests -= 1
        self.model, self.terms = model, None
        model.requests += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.model is not None:
            self.model.requests -= 1
        name = self.model.name if self.model else self._metrics.known(self.request.model)
        version = self.model.version if self.model is not None else ""
        self._metrics.of(name)
        requests, statistics = self._metrics.requests_of(name), self._metrics.statistics.of(name, version)
        outcome = self._outcome(error)
        requests.outcomes[outcome or "ok"].inc()
        spent_s = now_s() - self.request.arrived_s
        if self.model is not None:
            self._metrics.of_version(name, version).count(outcome, spent_s)
            self._metrics.judged(self, outcome, spent_s)
        if outcome is not None:
            statistics.failed(outcome, spent_s)
            self._dropped(name, outcome)
            return
        requests.request_s.observe(spent_s)
        if not self.request.times.reused:  # what was not computed went through no stage
            _observe_stages(requests, self.request.times)
        if self.request.times.nonfinite_rows:
            requests.nonfinite.inc(self.request.times.nonfinite_rows)
        statistics.succeeded(spent_s, self.request.times, self.rows)

    def _outcome(self, error: BaseException | None) -> Code | None:
        if error is None:
            return None
        if isinstance(error, HeadraceError):
            return error.code
        if isinstance(error, asyncio.CancelledError):  # gRPC cancels, too, when the caller's time is over
            return Code.DEADLINE_EXCEEDED if now_s() >= self.request.late_s else Code.CANCELLED
        return Code.INTERNAL

    def _dropped(self, name: str, outcome: Code) -> None:
        drops, priority = self._metrics.drops, self.request.priority
        if self.terms is not None:
            if outcome in _LEFT:  # what was computed after that is counted with its batch
                drops.computed(name, self.terms.computed_rows)
        elif self.pieces and not self.request.times.reused:  # well formed, and refused at the door
            items = sum(len(items) for items in self.pieces if isinstance(items, list))
            drops.add(name, Point.ADMISSION, outcome, priority, items)
        elif outcome is Code.NOT_READY:  # before anybody looked how many pieces its inputs are
            drops.add(name, Point.ADMISSION, outcome, priority, len(self.request.inputs))


def _observe_stages(requests: _OfRequests, times: StageTimes) -> None:
    spent = (times.admit_s, times.wait_s, times.prepare_s, times.batch_s, times.copy_s, times.run_s, times.finish_s)
    for stage, seconds in zip(requests.stages, spent, strict=True):
        stage.observe(seconds)
