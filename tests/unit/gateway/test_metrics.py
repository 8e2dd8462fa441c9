import asyncio

import pytest
from prometheus_client import generate_latest

from gateway.batcher import Batch, QueuedItem, QueueKey
from gateway.metrics import Metrics
from gateway.request import DEFAULT_PRIORITY, PROOF_PRIORITY, Request, StageTimes
from gateway.served import ServedModel
from shared.clock import now_s
from shared.errors import Code, InvalidInput, NotReady, UnknownModel
from shared.messages import BatchDone
from shared.pipeline import RawInput
from tests.support.gateway_parts import served


def request(times: StageTimes | None = None) -> Request:
    inputs = [RawInput(kind="text", data=b"x")]
    return Request("words", "", "id", inputs, {}, now_s() + 1, now_s(), 1, times=times or StageTimes())


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def end(metrics: Metrics, error: BaseException | None, model: ServedModel | None = None) -> None:
    """One request of a served model that ends like this."""
    with metrics.request(request()) as measured:
        measured.routed(model or served())
        if error is not None:
            raise error


def test_every_outcome_is_counted_exactly_once() -> None:
    metrics = Metrics()
    end(metrics, None)
    for error in (InvalidInput("no"), asyncio.CancelledError(), KeyError("bug")):
        with pytest.raises(type(error)):
            end(metrics, error)
    counts = {word: value(metrics, "headrace_requests_total", model="words", outcome=word) for word in ("ok", *Code)}
    assert {word for word, count in counts.items() if count} == {"ok", "invalid_input", "cancelled", "internal"}
    assert sum(count or 0 for count in counts.values()) == 4


def test_stage_times_of_answered_requests_become_histograms() -> None:
    metrics = Metrics()
    with metrics.request(request(StageTimes(run_s=0.25))) as measured:
        measured.model = served()
    assert value(metrics, "headrace_stage_seconds_sum", model="words", stage="run") == 0.25
    assert value(metrics, "headrace_stage_seconds_count", model="words", stage="admit") == 1


def test_what_names_no_model_of_ours_is_unknown_and_adds_no_series() -> None:
    metrics = Metrics()
    for name in ("made-up-1", "made-up-2"):
        asked = request()
        asked.model = name
        with pytest.raises(InvalidInput), metrics.request(asked):
            raise InvalidInput("no")
    text = generate_latest(metrics.registry).decode()
    assert "made-up" not in text
    assert value(metrics, "headrace_requests_total", model="unknown", outcome="invalid_input") == 2


def test_a_request_for_a_model_that_is_not_ready_counts_for_that_model() -> None:
    metrics = Metrics()
    metrics.of("words")  # has run before
    for name, counted in (("words", "words"), ("made-up", "unknown")):
        asked = request()
        asked.model = name
        with pytest.raises(NotReady), metrics.request(asked):
            raise NotReady("its worker was lost")
        assert value(metrics, "headrace_requests_total", model=counted, outcome="not_ready") == 1
        labels = {"model": counted, "point": "admission", "reason": "not_ready"}
        assert value(metrics, "headrace_dropped_total", **labels) == 1


def test_a_caller_s_mistake_is_no_dropped_work() -> None:
    metrics = Metrics()
    for mistake in (InvalidInput("no"), UnknownModel("no such model")):
        with pytest.raises(type(mistake)), metrics.request(request()):
            raise mistake
    assert list(metrics.drops.rows()) == []


def test_numbers_that_others_keep_are_read_when_somebody_looks() -> None:
    metrics = Metrics()
    state = {"waiting": 1.0}
    metrics.gauge("headrace_waiting", "Waiting.", lambda: state["waiting"])
    metrics.counters("headrace_things_total", "Things.", ("kind",), lambda: [(("a",), 2.0), (("b",), state["waiting"])])
    state["waiting"] = 7.0
    assert value(metrics, "headrace_waiting") == 7.0
    assert value(metrics, "headrace_things_total", kind="a") == 2.0
    assert value(metrics, "headrace_things_total", kind="b") == 7.0


def test_rows_that_only_fp32_could_answer_are_counted() -> None:
    metrics, model = Metrics(), served()
    ran = Batch(QueueKey(1, ()), [QueuedItem(1, QueueKey(1, ()), 3, 1.0, 0.0)], 3, 4)
    for rescued in (0, 2):
        metrics.batch(model, ran, BatchDone(1, [], 0.0, 0.0, 0.0, 3 + rescued, rescued), nobody=0)
    assert value(metrics, "headrace_rows_rescued_total", model="words") == 2
    assert value(metrics, "headrace_rows_total", model="words") == 8


def test_readiness_own_batches_are_in_no_statistics() -> None:
    metrics, model = Metrics(), served()
    done = BatchDone(1, [], 0.0, 0.0, 0.001, 1)
    for priority, counted in ((PROOF_PRIORITY, 0), (DEFAULT_PRIORITY, 1)):
        item = QueuedItem(1, QueueKey(1, ()), 1, 1.0, 0.0, priority=priority)
        metrics.batch(model, Batch(QueueKey(1, ()), [item], 1, 1), done, 0)
        assert metrics.statistics.of("words", model.version).execution_count == counted


def count(metrics: Metrics, version: str, outcome: str = "ok") -> float | None:
    return value(metrics, "headrace_version_requests_total", model="words", version=version, outcome=outcome)


def seconds(metrics: Metrics, version: str) -> float | None:
    return value(metrics, "headrace_version_request_seconds_count", model="words", version=version)


def test_requests_count_for_the_version_that_they_went_to_and_only_for_outcomes_that_came() -> None:
    metrics, model = Metrics(), served()
    end(metrics, None)
    with pytest.raises(InvalidInput):
        end(metrics, InvalidInput("no"))
    assert (count(metrics, model.version), count(metrics, model.version, "invalid_input")) == (1, 1)
    assert seconds(metrics, model.version) == 1, "latency is of answers"
    assert count(metrics, model.version, "internal") is None
    with pytest.raises(UnknownModel), metrics.request(request()):
        raise UnknownModel("nobody")
    assert generate_latest(metrics.registry).decode().count("headrace_version_requests_total{") == 2


def test_a_version_keeps_its_requests_until_they_end_however_they_end() -> None:
    metrics, model = Metrics(), served()
    with metrics.request(request()) as measured:
        measured.routed(model)
        assert model.requests == 1
    with pytest.raises(KeyError):
        end(metrics, KeyError("bug"), model)
    assert model.requests == 0


def test_a_version_that_is_gone_takes_its_series_along_and_its_model_s_stay() -> None:
    metrics, model = Metrics(), served()
    end(metrics, None)
    metrics.forget(model.name, model.version)
    assert (count(metrics, model.version), seconds(metrics, model.version)) == (None, None)
    assert value(metrics, "headrace_requests_total", model="words", outcome="ok") == 1
    assert metrics.statistics.of("words", model.version).success.count == 0
    end(metrics, None)
    assert count(metrics, model.version) == 1


def test_what_was_not_computed_adds_no_zeros_to_the_stages() -> None:
    metrics = Metrics()
    for reused in ("", "kept", "shared"):
        with metrics.request(request(StageTimes(reused=reused))) as measured:
            measured.routed(served())
    assert value(metrics, "headrace_request_seconds_count", model="words") == 3
    assert value(metrics, "headrace_stage_seconds_count", model="words", stage="run") == 1


def test_who_judges_is_told_of_each_request_that_went_to_a_version() -> None:
    metrics, model = Metrics(), served()
    told: list[tuple[object, Code | None, str]] = []
    metrics.judged = lambda measured, outcome, _s: told.append((measured.model, outcome, measured.request.times.reused))
    with metrics.request(request(StageTimes(reused="kept"))) as measured:
        measured.routed(model)
    with pytest.raises(NotReady):
        end(metrics, NotReady("lost"), model)
    with pytest.raises(UnknownModel), metrics.request(request()):
        raise UnknownModel("nobody")
    assert told == [(model, None, "kept"), (model, Code.NOT_READY, "")]


def test_a_version_that_nobody_wanted_yet_has_no_series() -> None:
    metrics = Metrics()
    models = [served(number, name=f"model-{number}") for number in range(3)]
    labels = ("model", "version", "kind")
    metrics.gauges("headrace_x", "X.", labels, lambda: [((one.name, one.version, "a"), 1.0) for one in models])
    metrics.gauges("headrace_y", "Y.", ("model",), lambda: [((one.name,), 1.0) for one in models])
    empty = generate_latest(metrics.registry).decode()
    assert [value(metrics, "headrace_y", model=one.name) for one in models] == [1.0] * 3, "of no version"
    assert "headrace_x{" not in empty

    item = QueuedItem(1, QueueKey(1, ()), 1, 1.0, 0.0, priority=PROOF_PRIORITY)
    metrics.batch(models[0], Batch(QueueKey(1, ()), [item], 1, 1), BatchDone(1, [], 0.0, 0.0, 0.001, 1), 0)
    loaded = generate_latest(metrics.registry).decode()
    assert 'headrace_x{kind="a",model="model-0"' in loaded
    assert len(loaded) - len(empty) < 1500, "one that was loaded and never asked has a dozen lines"
    assert "headrace_requests_total{" not in loaded

    end(metrics, None, models[1])
    asked = generate_latest(metrics.registry).decode()
    assert asked.count("headrace_x{") == 2
    assert 'headrace_requests_total{model="model-1",outcome="internal"} 0.0' in asked.replace(
        'outcome="internal",model="model-1"', 'model="model-1",outcome="internal"'
    )
    metrics.forget(models[1].name, models[1].version)
    assert generate_latest(metrics.registry).decode().count("headrace_x{") == 1
