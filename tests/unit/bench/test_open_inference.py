from pathlib import Path

import pytest

from bench import open_inference_report as report
from bench import perf_analyzer
from bench.open_inference_report import BY_HAND, Row, write
from bench.processes import ALONE
from bench.report import CLIENT

_FACTS = {"command": "make it", "seconds": 1, "windows": 3, "window_ms": 10, "perf_analyzer": "perf_analyzer …"}


def _rows() -> list[Row]:
    server = Row("grpc", "identity", 4, 100.0, 1.5, 2.5, {"gateway": 0.5, "worker": 0.25, CLIENT: 9.0}, batch_rows=3.0)
    return [server, Row("echo", "identity", 4, 400.0, 0.5, 0.75, {ALONE: 0.2, CLIENT: 9.0})]


def test_each_model_has_a_table_with_cpu_by_process(capsys: pytest.CaptureFixture[str]) -> None:
    write(_rows(), _FACTS, folder=None)
    header, _, server, echo = capsys.readouterr().out.strip().splitlines()[-4:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, server, echo)]
    assert cells[0][6:] == ["CPU ms/req", "gateway", "worker", ALONE, CLIENT, "others"]
    assert cells[1] == ["gRPC", "4", "100", "1.50", "2.50", "3.0", "0.750", "0.500", "0.250", "", "9.000", "0.00"]
    assert cells[2] == ["plain grpc.aio", "4", "400", "0.50", "0.75", "", "0.200", "", "", "0.200", "9.000", "0.00"]


def test_what_was_written_by_hand_survives_a_new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        report, "machine_facts", lambda names: dict.fromkeys((*names, "cores", "cpu", "kernel", "python"))
    )
    page = tmp_path / "docs" / "benchmarks" / "open_inference.md"
    for folder in (page.parent, tmp_path / "bench" / "results"):
        folder.mkdir(parents=True)
    write(_rows(), _FACTS, folder=tmp_path)
    assert page.read_text().endswith(f"{BY_HAND}\n")
    page.write_text(page.read_text() + "\n## Why\n\nBecause.\n")
    write(_rows(), {**_FACTS, "command": "make it again"}, folder=tmp_path)
    written = page.read_text()
    assert "make it again" in written
    assert written.endswith(f"{BY_HAND}\n\n## Why\n\nBecause.\n")


def test_figures_are_read_from_perf_analyzers_report(tmp_path: Path) -> None:
    path = tmp_path / "report.csv"
    path.write_text("Concurrency,Inferences/Second,p50 latency,p99 latency\n4,2303.03,1649,2645\n\n")
    assert perf_analyzer.figures(path) == (2303.03, 1.649, 2.645)
