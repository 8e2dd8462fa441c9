import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bench import cpu_serving, gpu, gpu_facts, gpu_loop, gpu_report
from bench.gpu_facts import Passed
from tests.support.fake_streams import FakeDevice, FakeStreams
from tests.support.worker_parts import WIDTH, ToyPipeline
from workers.backends.stream_runner import StreamRunner


def passed(copy: tuple[float, float], run: tuple[float, float]) -> Passed:
    return Passed(copy[0], run[1], copy, run)


IN_A_ROW = [passed((0, 1), (1, 5)), passed((5, 6), (6, 10))]
STAGED = [passed((0, 1), (1, 5)), passed((1, 2), (5, 9)), passed((4.5, 5.5), (9, 13))]


def test_the_device_is_idle_between_one_result_and_the_next_start() -> None:
    assert gpu_facts.idle_share(IN_A_ROW) == pytest.approx(1 / 9)
    assert gpu_facts.idle_share(STAGED) == 0


def test_a_copy_is_hidden_as_far_as_another_pass_computes() -> None:
    assert gpu_facts.overlap_share(IN_A_ROW) == 0
    assert gpu_facts.overlap_share(STAGED) == 1
    assert gpu_facts.overlap_share([passed((0, 1), (1, 5)), passed((4, 6), (6, 7))]) == 0.5
    assert gpu_facts.overlap_share(IN_A_ROW[:1]) == 0


def test_rates_latencies_and_agreement() -> None:
    assert gpu_facts.per_s(IN_A_ROW, 20) == 4
    assert gpu_facts.p99_ms(STAGED) == 8500
    assert gpu_facts.agreement([1, 2, 3, 4], [1, 2, 3, 5]) == 0.75
    assert gpu_facts.busy_share(1e9, 3e9, 4.0) == 0.5
    assert gpu_facts.busy_share(0, 9e9, 4.0) == 1


def test_spans_come_from_the_devices_own_marks() -> None:
    streams = FakeStreams(copy_s=1.0, row_s=10.0)
    runner = StreamRunner(nn.Identity(), ToyPipeline(), FakeDevice(streams), "fp32", 0)
    rows = [[np.zeros((2, WIDTH), np.float32)]]
    first, second = (runner.start(rows, 2, "fp32", lane) for lane in (0, 1))
    spans = [gpu_loop._spans(first, one, 0.0, one.wait()) for one in (first, second)]
    assert spans == [((0, 2), (2, 22)), ((2, 4), (22, 42))]
    assert gpu_facts.overlap_share([Passed(0, 0, *span) for span in spans]) == 1


def test_crops_are_parts_of_the_photo_and_the_same_each_time() -> None:
    crops = gpu_loop.crops(3, 64)
    assert crops.shape == (3, 64, 64, 3)
    assert not np.array_equal(crops[0], crops[1])
    assert np.array_equal(crops, gpu_loop.crops(3, 64))


def test_statistics_of_the_protocol_are_added_up() -> None:
    def size(rows: int, count: int, ns: int) -> dict[str, Any]:
        return {"batch_size": str(rows), "compute_infer": {"count": str(count), "ns": str(ns)}}

    assert gpu.computed({"model_stats": [{"batch_stats": [size(8, 2, 500), size(1, 3, 60)]}]}) == (560, 19, 5)
    assert gpu.computed({"model_stats": [{}]}) == (0, 0, 0)


def loop(precision: str, per_s: float, classes: list[int], graphs: list[int]) -> dict[str, Any]:
    size = {"plain_per_s": 100.0, "worker_per_s": per_s, "p99_ms": 3.0, "idle": 0.01, "overlap": 0.9}
    found = {"model": "resnet50", "precision": precision, "graphs": graphs, "sizes": {"8": size}, "classes": classes}
    return found | {"memory_bytes": 5_000_000, "peak_bytes": 9_000_000}


SERVED = {
    "like": "resnet50", "input": "JPEG", "in_flight": 4, "images_per_s": 80.0, "p50_ms": 1.0, "p99_ms": 2.0,
    "busy": 0.75, "batch_rows": 7.5,
}  # fmt: skip


def test_the_report_compares_within_one_run(tmp_path: Path) -> None:
    loops = [loop("fp16", 300.0, [1, 2], [8]), loop("fp16", 200.0, [1, 2], []), loop("fp32", 150.0, [1, 3], [8])]
    text = gpu_report.tables(loops, [SERVED], "Measured here.")
    assert "| resnet50 | fp16 | yes | 8 | 100 | 300 | 3.00 × | 1.0% | 90% | 3.00 |" in text
    assert "| resnet50 | fp16 | no | 8 | 100 | 200 | 2.00 × |" in text
    assert "| resnet50 | 8 | 2.00 × | 5, 5 | 9, 9 | 50.0% |" in text, "with graphs where there are any"
    assert "| resnet50 | JPEG | 4 | 80 | 80% | 25.0% | 1.0 | 2.0 | 7.5 |" in text
    page = tmp_path / "docs" / "benchmarks" / "gpu.md"
    page.parent.mkdir(parents=True)
    (tmp_path / "bench" / "results").mkdir(parents=True)
    page.write_text(f"# On a GPU\n\n{gpu_report.NOT_RUN}\n\nWhy.\n")
    for _ in range(2):
        gpu_report.write(tmp_path, text, {"loops": loops})
    written = page.read_text()
    assert gpu_report.NOT_RUN not in written
    assert written.count("## Results") == written.count("Why.") == 1
    assert json.loads((tmp_path / "bench" / "results" / "gpu.json").read_text())["loops"] == loops


def test_without_a_gpu_nothing_is_measured_or_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench.gpu"])
    monkeypatch.setattr(gpu_report, "write", lambda *_: pytest.fail("a file was written"))
    assert gpu.main() == 1
    assert capsys.readouterr().out.splitlines() == [gpu.NO_GPU]


def test_the_page_says_that_it_has_not_been_run_as_long_as_there_are_no_results() -> None:
    page = (gpu.ROOT / "docs" / "benchmarks" / "gpu.md").read_text()
    assert (gpu_report.NOT_RUN in page) != ("## Results" in page)
    assert (gpu.ROOT / "bench" / "results" / "gpu.json").exists() == ("## Results" in page)


# ------------------------------------------------------------------ the CPU's rows through the server


def test_rows_and_batches_are_read_from_the_metrics() -> None:
    metrics = (
        '# HELP headrace_worker_rows_total x\nheadrace_worker_rows_total{worker="worker-0"} 64.0\n'
        'headrace_worker_rows_total{worker="worker-1"} 6.0\nheadrace_worker_batches_total{worker="worker-0"} 2.0\n'
    )
    assert cpu_serving.totals(metrics) == (70, 2)


def test_the_section_takes_the_best_and_replaces_an_earlier_one() -> None:
    rounds = [cpu_serving.Round(6.0, 6.06, 7.0, 6.3, 8.4, 31.0), cpu_serving.Round(6.5, 6.5, 7.0, 9.9, 9.9, 32.0)]
    text = cpu_serving.section([rounds[0], *rounds], "here")
    assert "| 6.00 | 6.06 | 1.010 × |" in text
    assert "| 6.00 | 6.30 | 1.050 × |" in text
    assert "| 7.00 | 8.40 | 1.200 × |" in text
    page = cpu_serving.inserted("# Page\n\nWords.\n\n## Results\n\ntable\n", text)
    again = cpu_serving.inserted(page, text)
    assert again == page
    assert page.index("Words.") < page.index("## Through the server") < page.index("## Results") < page.index("table")
