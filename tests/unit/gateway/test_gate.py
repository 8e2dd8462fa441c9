from gateway.admission import Admission
from gateway.forecast import Forecast
from gateway.gate import Gate
from gateway.metrics import Metrics
from shared.errors import DeadlineExceeded, Draining, Overloaded
from shared.settings import AdmissionSettings
from tests.unit.gateway.test_forecast import FakeLoad


def gate(*loads: FakeLoad, max_requests: int = 2) -> tuple[Gate, Admission, Metrics]:
    admission, metrics = Admission(AdmissionSettings(max_requests=max_requests)), Metrics()
    return Gate(admission, Forecast(1, loads), metrics), admission, metrics


def refused(metrics: Metrics) -> dict[str, float]:
    """Requests of no known model, by outcome, as `/metrics` counts them."""
    counted = {
        sample.labels["outcome"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "headrace_requests_total" and sample.labels["model"] == "unknown" and sample.value
    }
    assert sum(counted.values()) == sum(metrics.drops.of("unknown").get("admission", {}).values())
    return counted


def test_what_some_model_could_answer_is_read() -> None:
    busy = FakeLoad()
    busy.rows_in_flight = 80
    door, admission, metrics = gate(busy, FakeLoad())
    assert door.refusal(0.05, 0, 0.0) is None
    assert admission.in_flight_requests == 0
    assert refused(metrics) == {}


def test_what_none_could_answer_in_time_is_refused_and_counted() -> None:
    busy = FakeLoad()
    busy.rows_in_flight = 80
    door, _, metrics = gate(busy)
    assert isinstance(door.refusal(0.05, 0, 0.0), Overloaded)
    assert isinstance(door.refusal(0.001, 0, 0.0), DeadlineExceeded)
    assert refused(metrics) == {"overloaded": 1, "deadline_exceeded": 1}


def test_a_full_server_refuses_until_there_is_room() -> None:
    door, admission, metrics = gate(FakeLoad(), max_requests=1)
    with admission.admit(1, 10, 0.0):
        full = door.refusal(10.0, 0, 0.0)
    assert isinstance(full, Overloaded)
    assert "admission.max_requests" in full.text
    assert door.refusal(10.0, 0, 0.0) is None
    assert refused(metrics) == {"overloaded": 1}


def test_closed_doors_stay_closed() -> None:
    door, admission, metrics = gate(FakeLoad())
    admission.close_doors()
    assert isinstance(door.refusal(10.0, 0, 0.0), Draining)
    assert refused(metrics) == {"draining": 1}


def test_calls_whose_messages_are_on_the_way_count_as_ahead() -> None:
    busy = FakeLoad()  # 1.25 ms of the worker for each row more
    busy.rows_in_flight = 8
    door, _, _ = gate(busy)
    assert door.refusal(0.050, 0, 0.0) is None
    assert door.refusal(0.050, 25, 0.0) is None
    assert isinstance(door.refusal(0.050, 40, 0.0), Overloaded)


def test_what_ran_out_of_time_before_it_began_is_counted() -> None:
    door, _, metrics = gate(FakeLoad())
    door.expired()
    assert refused(metrics) == {"deadline_exceeded": 1}
