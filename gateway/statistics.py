"""Cumulative counts per model, as the Open Inference Protocol's statistics report them. Plain numbers, event loop only.

Durations are nanoseconds. Success counts requests, `inference_count` rows, `execution_count` batches. Queue and the
three compute stages are counted once per successful request that was computed, so that without a cache their counts are
equal to success.
"""

import time
from dataclasses import dataclass, field

from gateway.request import StageTimes
from shared.errors import Code


@dataclass(slots=True)
class Duration:
    """How often, and how long in all."""

    count: int = 0
    ns: int = 0

    @property
    def mean_ms(self) -> float:
        """Milliseconds on average; 0 when there was none."""
        return self.ns / self.count / 1e6 if self.count else 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.count += 1
        self.ns += round(seconds * 1e9)


@dataclass(slots=True)
class BatchStatistics:
    """Batches of one size."""

    count: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    """Of the successful requests whose (slowest) input ran in one of these: `compute_output`, split by size."""


@dataclass(slots=True)
class ModelStatistics:
    """One model's counts since the gateway started."""

    success: Duration = field(default_factory=Duration)
    fail: dict[Code, Duration] = field(default_factory=dict)
    """By reason."""
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    inference_count: int = 0
    execution_count: int = 0
    last_inference_ms: int = 0
    """Wall clock, milliseconds since 1970; 0 when there was none."""
    batches: dict[int, BatchStatistics] = field(default_factory=dict)
    """By rows."""

    def succeeded(self, seconds: float, times: StageTimes, rows: int) -> None:
        """One request was answered, after `ran` was told of its batch, if it was not answered by what there was."""
        self.success.add(seconds)
        if times.reused:
            return
        self.queue.add(times.admit_s + times.wait_s + times.batch_s)
        self.compute_input.add(times.prepare_s + times.copy_s)
        self.compute_infer.add(times.run_s)
        self.compute_output.add(times.finish_s)
        if (batch := self.batches.get(times.batch_rows)) is not None:
            batch.output_ns += round(times.finish_s * 1e9)
        self.inference_count += rows
        self.last_inference_ms = time.time_ns() // 1_000_000  # the protocol's field is a date, not a duration

    def failed(self, code: Code, seconds: float) -> None:
        """One request was refused or failed."""
        self.fail.setdefault(code, Duration()).add(seconds)

    def ran(self, rows: int, copy_s: float, run_s: float) -> None:
        """One batch came back from a worker."""
        self.execution_count += 1
        batch = self.batches.setdefault(rows, BatchStatistics())
        batch.count += 1
        batch.input_ns += round(copy_s * 1e9)
        batch.infer_ns += round(run_s * 1e9)


class Statistics:
    """All served versions' counts."""

    def __init__(self) -> None:
        self._versions: dict[tuple[str, str], ModelStatistics] = {}

    def of(self, name: str, version: str) -> ModelStatistics:
        """The counts of one version of a model."""
        found = self._versions.get((name, version))
        if found is None:
            found = self._versions[name, version] = ModelStatistics()
        return found

    def has(self, name: str, version: str) -> bool:
        """Whether anything was counted for this version since it came."""
        return (name, version) in self._versions

    def forget(self, name: str, version: str) -> None:
        """The version is served no more."""
        self._versions.pop((name, version), None)
