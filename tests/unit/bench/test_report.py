import math

import cv2
import numpy as np
import pytest

from bench.photo import HEIGHT, WIDTH, photo
from bench.processes import ALONE, role_of
from bench.report import CLIENT, Sample, medians, write


def _sample(name: str, kind: str, cpu_ms: dict[str, float], p50_ms: float = 1.0) -> Sample:
    return Sample(name, kind, 1, 100.0, p50_ms, 2 * p50_ms, cpu_ms)


def test_median_is_taken_per_figure_and_errors_are_summed() -> None:
    rounds = [
        Sample("headrace", "real", 1, rate, p50, 9.0, {"gateway": gateway}, {"UNAVAILABLE": 1})
        for rate, p50, gateway in ((1.0, 30.0, 0.2), (2.0, 10.0, 0.3), (3.0, 20.0, 0.1))
    ]
    (found,) = medians(rounds)
    assert (found.requests_per_s, found.p50_ms, found.cpu_ms) == (2.0, 20.0, {"gateway": 0.2})
    assert found.errors == {"UNAVAILABLE": 3}


def test_what_the_server_adds_is_its_cpu_without_the_two_floors(capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        _sample("bare", "simulated", {ALONE: 1.0}, p50_ms=3.0),
        _sample("grpc", "", {ALONE: 0.3, CLIENT: 9.0}, p50_ms=0.5),
        _sample("headrace", "simulated", {"gateway": 0.5, "pool": 1.25, CLIENT: 9.0}, p50_ms=4.0),
    ]
    write(found, found, {}, folder=None)
    last = [cell.strip() for cell in capsys.readouterr().out.strip().splitlines()[-1].strip("|").split("|")]
    assert last == ["simulated", "1", "1.75", "1.00", "0.30", "0.45", "0.20", "0.25", "0.50"]


def test_a_sample_counts_cpu_per_request() -> None:
    result = {"requests": 200, "window_s": 2.0, "p50_ms": 1.0, "p99_ms": 2.0}
    sample = Sample.of(("headrace", "real"), 16, result, {"gateway": 0.1, CLIENT: 0.05})
    assert sample.requests_per_s == 100.0
    assert math.isclose(sample.server_cpu_ms, 0.5)


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("python -m gateway --config x", "gateway"),
        ("python -m preprocess_pool --identity pool-0.1", "pool"),
        ("python -m workers --index 0", "worker"),
        ("python -m headrace serve --config x", "supervisor"),
        ("python -m bench.echo", ALONE),
    ],
)
def test_role_comes_from_the_command_line(command: str, role: str) -> None:
    assert role_of(command.split()) == role


def test_the_photo_is_the_same_each_time_and_of_the_stated_size() -> None:
    encoded = photo()
    assert encoded == photo()
    assert 55_000 < len(encoded) < 65_000
    image = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
    assert image is not None
    assert image.shape == (HEIGHT, WIDTH, 3)
