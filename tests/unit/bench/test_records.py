import pytest

from bench.records import LATE, NOT_SENT, Records, callers_words, percentile, stages, summary


def _records() -> Records:
    records = Records([0.0, 0.1, 0.2, 0.3, 1.0], [0, 0, 0, 0, 1], ["short", "long", "short", "short", "short"])
    records.outcomes = ["ok", "ok", "overloaded", NOT_SENT, "expired"]
    for index, (sent_s, ended_s) in enumerate([(0.05, 0.1), (0.1, 0.36), (0.25, 0.26), (0.9, 0.9), (1.0, 1.25)]):
        records.sent_s[index], records.ended_s[index] = sent_s, ended_s
    return records


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(value) for value in range(100)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 99.0]


def test_every_planned_call_has_one_outcome() -> None:
    records = _records()
    found = summary(records, records.where(phase=0))
    assert found["planned"] == sum(found["outcomes"].values()) == 4
    assert found["outcomes"] == {"ok": 2, "overloaded": 1, NOT_SENT: 1}


def test_an_answer_counts_from_the_planned_time_and_a_refusal_from_the_sending() -> None:
    records = _records()
    found = summary(records, records.where(size="short"))
    assert found["ok_ms"]["p50"] == pytest.approx(100)  # 50 from its sending
    assert found["refused_ms"]["p50"] == pytest.approx(10)  # 60 from its plan
    assert found["sent_after_plan_ms"]["max"] == pytest.approx(50)


def test_an_answer_after_its_deadline_is_late() -> None:
    records = _records()
    records.mark_late(0.25)
    assert records.outcomes == ["ok", LATE, "overloaded", NOT_SENT, "expired"]


def test_what_callers_saw_leaves_out_what_was_not_sent() -> None:
    assert callers_words({"ok": 3, LATE: 2, NOT_SENT: 5, "overloaded": 1}) == {"ok": 5, "overloaded": 1}
    assert callers_words({NOT_SENT: 5}) == {}


def test_records_are_written_as_lines() -> None:
    header, first, *rest = _records().lines()
    assert header == "phase,size,planned_s,sent_s,ended_s,outcome"
    assert first == "0,short,0.000000,0.050000,0.100000,ok"
    assert len(rest) == 4


def test_nothing_at_all_has_a_summary_too() -> None:
    assert summary(Records([], [], []), [])["planned"] == 0


def test_stages_come_from_the_headers_of_the_answers() -> None:
    found = stages(['admit;dur=0.5, batch;dur=4.0, rows;desc="3"', "admit;dur=1.5, batch;dur=2.0"])
    assert found["batch"]["max"] == 4.0
    assert found["admit"]["p50"] == 1.5
    assert found["sum"]["max"] == 4.5
    assert "rows" not in found
