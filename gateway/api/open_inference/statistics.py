"""`gateway.statistics` → the protocol's statistics message."""

from gateway.api.open_inference.models import Served, number_of
from gateway.statistics import BatchStatistics, Duration, ModelStatistics
from protos.inference import grpc_service_pb2 as pb


def message(model: Served, counts: ModelStatistics, asked_version: str = "") -> pb.ModelStatistics:
    """One model's counts since the gateway started; durations are cumulative nanoseconds.

    The version is the one that was asked for, in the caller's own form; without one it is a number, since load
    generators read it as a 64-bit integer to find the newest.
    """
    return pb.ModelStatistics(
        name=model.name,
        version=asked_version or number_of(model.version),
        last_inference=counts.last_inference_ms,
        inference_count=counts.inference_count,
        execution_count=counts.execution_count,
        inference_stats=_requests(counts),
        batch_stats=[_batch(rows, counts.batches[rows]) for rows in sorted(counts.batches)],
    )


def _requests(counts: ModelStatistics) -> pb.InferStatistics:
    return pb.InferStatistics(
        success=_duration(counts.success),
        fail=pb.StatisticDuration(
            count=sum(failed.count for failed in counts.fail.values()),
            ns=sum(failed.ns for failed in counts.fail.values()),
        ),
        queue=_duration(counts.queue),
        compute_input=_duration(counts.compute_input),
        compute_infer=_duration(counts.compute_infer),
        compute_output=_duration(counts.compute_output),
        # No cache; the message is there, since a client in C++ may read it without looking.
        cache_hit=pb.StatisticDuration(),
        cache_miss=pb.StatisticDuration(),
    )


def _batch(rows: int, counts: BatchStatistics) -> pb.InferBatchStatistics:
    """A load generator stops when the three counts differ, so all are the number of batches."""
    return pb.InferBatchStatistics(
        batch_size=rows,
        compute_input=pb.StatisticDuration(count=counts.count, ns=counts.input_ns),
        compute_infer=pb.StatisticDuration(count=counts.count, ns=counts.infer_ns),
        compute_output=pb.StatisticDuration(count=counts.count, ns=counts.output_ns),
    )


def _duration(duration: Duration) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=duration.count, ns=duration.ns)
