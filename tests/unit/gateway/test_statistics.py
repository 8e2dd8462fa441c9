from gateway.request import StageTimes
from gateway.statistics import Statistics
from shared.errors import Code


def test_the_stage_counts_equal_success() -> None:
    model = Statistics().of("words", "")
    times = StageTimes(admit_s=1e-6, wait_s=2e-6, batch_s=3e-6, prepare_s=4e-6, copy_s=5e-6, run_s=6e-6, finish_s=7e-6)
    model.succeeded(3e-5, times, rows=5)
    model.succeeded(3e-5, times, rows=2)
    counts = {stage.count for stage in (model.queue, model.compute_input, model.compute_infer, model.compute_output)}
    assert counts == {model.success.count} == {2}
    assert (model.queue.ns, model.compute_input.ns, model.compute_infer.ns) == (12000, 18000, 12000)
    assert model.inference_count == 7
    assert model.last_inference_ms > 0


def test_what_was_not_computed_is_a_success_and_no_inference() -> None:
    model = Statistics().of("words", "")
    for reused in ("kept", "shared"):
        model.succeeded(3e-5, StageTimes(reused=reused), rows=5)
    assert (model.success.count, model.inference_count, model.last_inference_ms) == (2, 0, 0)
    assert {each.count for each in (model.queue, model.compute_input, model.compute_infer, model.compute_output)} == {0}


def test_failures_by_reason_and_batches_by_size() -> None:
    statistics = Statistics()
    model = statistics.of("words", "")
    model.failed(Code.INVALID_INPUT, 1e-6)
    model.failed(Code.INVALID_INPUT, 1e-6)
    model.failed(Code.OVERLOADED, 1e-6)
    model.ran(4, 1e-6, 2e-6)
    model.ran(4, 1e-6, 2e-6)
    assert {code: duration.count for code, duration in model.fail.items()} == {"invalid_input": 2, "overloaded": 1}
    assert model.execution_count == model.batches[4].count == 2
    assert model.batches[4].infer_ns == 4000
    assert statistics.of("words", "") is model
    assert model.success.count == 0


def test_the_output_stage_of_batches_adds_up_to_that_of_their_requests() -> None:
    model = Statistics().of("words", "")
    for rows, finish_s in [(4, 1e-6), (4, 2e-6), (8, 5e-6)]:
        model.ran(rows, 1e-6, 2e-6)
        model.succeeded(1e-5, StageTimes(finish_s=finish_s, batch_rows=rows), rows)

    assert {rows: batch.output_ns for rows, batch in model.batches.items()} == {4: 3000, 8: 5000}
    assert sum(batch.output_ns for batch in model.batches.values()) == model.compute_output.ns


def test_versions_are_counted_apart_and_one_that_is_forgotten_begins_anew() -> None:
    statistics = Statistics()
    one, two = statistics.of("words", "1"), statistics.of("words", "2")
    one.failed(Code.OVERLOADED, 1e-6)
    assert (two.fail, statistics.of("words", "1")) == ({}, one)
    statistics.forget("words", "1")
    statistics.forget("words", "nobody")
    assert statistics.of("words", "1").fail == {}
    assert statistics.of("words", "2") is two
