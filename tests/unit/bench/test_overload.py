import json
from pathlib import Path

import pytest

from bench import overload_report as report
from bench.ledger import compare
from bench.overload_run import WINDOW, Outcome, back_to_normal_s, faults, mark_void

LOAD = {
    "name": "poisson 20/s",
    "planned": 20,
    "outcomes": {"ok": 10, "overloaded": 8, "expired": 2},
    "ok_ms": {"p50": 100.0, "p99": 200.0},
    "refused_ms": {"p50": 1.0, "p99": 5.0},
    "sent_after_plan_ms": {"p99": 3.0},
    "offered_per_s": 20.0,
    "goodput_per_s": 10.0,
    "generator_cores": 0.25,
}
FACTS = {
    "command": "make it",
    "seconds": 1,
    "rounds": 1,
    "channels": 4,
    "load_s": 8.0,
    "deadline_ms": 250,
    "autogroups": "off",
}


def _outcome(name: str = "2x", **changes: object) -> Outcome:
    callers, server = {"ok": 10, "overloaded": 8, "expired": 2}, {"ok": 11, "overloaded": 8, "deadline_exceeded": 1}
    ledger = compare(callers, server)
    fields = {
        "name": name,
        "result": {"total": LOAD, "cpu_ms_per_call": 0.2, "phases": [LOAD]},
        "load": LOAD,
        "callers": callers,
        "server": server,
        "drops": {"admission": {"overloaded": 8}, "prepare": {}, "batch": {"deadline_exceeded": 1}, "copy": {}},
        "ledger": ledger,
        "faults": faults(LOAD, ledger),
        "server_cores": {"gateway": 0.5},
        "others_cores": 0.0,
        "private_mb": (100.0, 101.0),
        "rows": 50,
        "nobody": 1,
        "peak_per_s": 20.0,
        "back_to_normal_s": 0.25,
    }
    return Outcome(**(fields | changes))  # type: ignore[arg-type]  # the tests' own changes


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_shares_are_of_what_was_admitted_and_computed() -> None:
    outcome = _outcome()
    assert outcome.goodput == 0.5
    assert outcome.late_share == pytest.approx(1 - 10 / 13)  # 11 answered, 1 dropped, 1 computed for nobody
    assert outcome.nobody_share == pytest.approx(0.02)


def test_a_ledger_closes_when_the_plan_adds_up_and_both_sides_agree() -> None:
    assert _outcome().faults == ()
    lost = {**LOAD, "planned": 21}
    assert "21 calls were planned" in faults(lost, compare({}, {}))[0]
    pending = {**LOAD, "outcomes": {"ok": 19, "": 1}}
    assert "20 calls were planned" in faults(pending, compare({}, {}))[0]
    assert "told ok 1 times more" in faults(LOAD, compare({"ok": 10}, {"ok": 9}))[0]


def _probes(after_ms: list[float], outcome: str = "ok") -> list[list[str]]:
    """One probe each 25 ms: 40 of 10 ms before a load of 1 s, which ends at 2 s."""
    before = [(0, number * 0.025, 10.0) for number in range(40)]
    after = [(2, 2.0 + number * 0.025, ms) for number, ms in enumerate(after_ms)]
    return [
        [str(phase), "medium", f"{at_s}", f"{at_s}", f"{at_s + ms / 1e3}", outcome if phase else "ok"]
        for phase, at_s, ms in (*before, (1, 1.5, 200.0), *after)
    ]


def test_normal_is_back_with_the_first_of_some_probes_that_are_about_as_fast_as_before() -> None:
    assert back_to_normal_s(_probes([12.0] * 20), 1) == 0.0
    half = WINDOW // 2  # the median of a window is normal once more than half of it is
    assert back_to_normal_s(_probes([40.0] * 12 + [14.0] * 20), 1) == pytest.approx((12 - half + 1) * 0.025)
    assert back_to_normal_s(_probes([16.0] * 40), 1) == float("inf")
    assert back_to_normal_s(_probes([12.0] * 40, "overloaded"), 1) == float("inf")


def test_time_back_to_normal_needs_probes() -> None:
    with pytest.raises(ValueError, match="probes"):
        back_to_normal_s(_probes([]), 1)


def test_a_round_whose_goodput_is_above_its_peak_is_void(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disturbed = [_outcome("poisson", round=1, peak_per_s=9.0), _outcome(round=1, peak_per_s=9.0)]
    fine = [_outcome(round=2, peak_per_s=9.9), _outcome("2x-bare", round=2, peak_per_s=5.0)]
    assert "1.11 P: the machine was disturbed while P was measured (9/s)" in mark_void(disturbed)
    assert mark_void(fine) == ""  # 1.01; and a generator that needs less CPU may find more than P
    assert mark_void([]) == ""
    report.write([*disturbed, *fine], FACTS, tmp_path)
    shown = capsys.readouterr().out.splitlines()
    assert [_cells(line)[0] for line in shown[2:5]] == ["0.6 P, Poisson*", "2 P*", "2 P, bare frames"]
    assert next(line for line in shown if line.startswith("(*)")).startswith("(*) void in round 1: goodput at 2 P is")
    assert _cells(shown[3])[1:5] == ["9", "20", "10", "1.06"]  # the figures are what they were
    runs = json.loads((tmp_path / "bench" / "results" / "overload.json").read_text())["runs"]
    assert [run["void"] for run in runs] == [True, True, False, False]


def test_the_page_has_the_medians_and_every_runs_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [_outcome(round=1), _outcome(round=2, peak_per_s=10.0), _outcome(round=3, back_to_normal_s=float("inf"))]
    report.write([*rounds, _outcome("slow", back_to_normal_s=None, faults=("a fault",))], FACTS, tmp_path)
    page = (tmp_path / "docs" / "benchmarks" / "overload.md").read_text()
    lines = page.splitlines()
    two = _cells(next(line for line in lines if line.startswith("| 2 P ")))
    assert two[1:5] == ["20", "20", "10", "0.50"]
    assert two[-1] == "0.25"
    slow = _cells(next(line for line in lines if line.startswith("| 100 a second")))
    assert slow[-1] == ""
    ledger = [_cells(line) for line in lines if " / " in line and line.startswith("|")]
    assert len(ledger) == 4
    assert ledger[0][2:] == ["20", "0", "0 / 1", "2 / 0", "10 / 11", "8 / 8", "1", "0", "1", "0", "yes"]
    assert ledger[3][-1] == "no"
    assert "{" not in page
    results = json.loads((tmp_path / "bench" / "results" / "overload.json").read_text())
    assert results["runs"][2]["back_to_normal_s"] == "never"
    assert "Overload" not in capsys.readouterr().out  # only the tables are printed
