from collections import Counter

import pytest

from bench.ledger import compare, server_calls, server_drops, server_requests, server_rows, since, word

CALLERS = {"ok": 90, "overloaded": 20, "deadline_exceeded": 3, "expired": 9, "left": 5}
SERVER = {"ok": 92, "overloaded": 21, "deadline_exceeded": 9, "cancelled": 4}


def test_a_ledger_closes_but_for_what_the_callers_gave_up() -> None:
    ledger = compare(CALLERS, SERVER)
    assert (ledger.calls, ledger.given_up) == (127, 14)
    assert (ledger.noticed, ledger.crossed, ledger.never_arrived) == (10, 3, 1)
    assert ledger.faults == ()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"ok": 89}, "told ok 1 times more often"),
        ({"deadline_exceeded": 2, "cancelled": 0}, "told deadline_exceeded 1 times more often"),
        ({"overloaded": 23}, "counted 1 calls that nobody made"),
        ({"internal": 2}, "counted 1 calls that nobody made"),
    ],
)
def test_whatever_else_differs_is_a_fault(change: dict[str, int], fault: str) -> None:
    ledger = compare(CALLERS, SERVER | change)
    assert len(ledger.faults) == 1
    assert fault in ledger.faults[0]
    assert fault in str(ledger)


def test_an_expired_call_may_look_like_a_cancelled_one_but_only_an_expired_one() -> None:
    ledger = compare(CALLERS, SERVER | {"deadline_exceeded": 7, "cancelled": 6})
    assert (ledger.noticed, ledger.mistaken, ledger.faults) == (10, 1, ())
    assert compare(CALLERS, SERVER).mistaken == 0
    (fault,) = compare({"ok": 5, "unreachable": 2, "expired": 1}, {"ok": 5, "cancelled": 4}).faults
    assert "counted 1 calls that nobody made" in fault


def test_a_callers_word_is_the_servers_where_it_got_one() -> None:
    assert word("OK", "") == "ok"
    assert word("DEADLINE_EXCEEDED", "deadline_exceeded") == "deadline_exceeded"
    assert word("DEADLINE_EXCEEDED", "") == "expired"
    assert word("CANCELLED", "") == "left"
    assert word("UNAVAILABLE", "process_lost") == "process_lost"
    assert word("UNAVAILABLE", "") == "unreachable"
    assert word("UNIMPLEMENTED", "") == "unimplemented"


METRICS = """\
# TYPE headrace_calls_total counter
headrace_calls_total{method="Predict",reason="ok"} 3.0
headrace_calls_total{method="Metadata",reason="ok"} 4.0
headrace_calls_total{method="Predict",reason="overloaded"} 0.0
# TYPE headrace_requests_total counter
headrace_requests_total{model="a",outcome="ok"} 2.0
headrace_requests_total{model="b",outcome="ok"} 5.0
# TYPE headrace_dropped_total counter
headrace_dropped_total{model="a",point="batch",reason="cancelled"} 6.0
headrace_dropped_total{model="b",point="batch",reason="cancelled"} 1.0
headrace_dropped_total{model="b",point="copy",reason="cancelled"} 8.0
# TYPE headrace_rows_total counter
headrace_rows_total{model="a"} 9.0
# TYPE headrace_rows_for_nobody_total counter
headrace_rows_for_nobody_total{model="a"} 2.0
"""


def test_the_servers_side_is_read_from_its_metrics() -> None:
    assert server_calls(METRICS) == {"ok": 7}
    assert server_calls(METRICS, "Predict") == {"ok": 3}
    assert server_requests(METRICS) == {"ok": 7}
    assert server_requests(METRICS, "b") == {"ok": 5}
    assert server_drops(METRICS, "batch") == {"cancelled": 7}
    assert server_rows(METRICS) == (9, 2)
    assert since(server_calls(METRICS, "Predict"), server_calls(METRICS)) == Counter(ok=4)
