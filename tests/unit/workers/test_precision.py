import pytest

from workers.precision import LIMIT_ROWS, WINDOW_ROWS, OverflowGuard, Setting, choose


@pytest.mark.parametrize(
    ("worker", "model", "on_cuda", "expected"),
    [
        ("auto", "auto", True, "fp16"),
        ("auto", "auto", False, "fp32"),
        ("fp32", "auto", True, "fp32"),
        ("fp32", "fp16", True, "fp16"),
        ("fp16", "fp32", True, "fp32"),
        ("fp16", "fp16", False, "fp32"),
    ],
)
def test_the_model_decides_before_the_worker_and_a_cpu_before_both(
    worker: Setting, model: Setting, on_cuda: bool, expected: str
) -> None:
    assert choose(worker, model, on_cuda=on_cuda) == expected


def test_the_guard_trips_once_at_the_limit() -> None:
    calls: list[tuple[int, int]] = []
    guard = OverflowGuard(lambda rescued, rows: calls.append((rescued, rows)))
    guard.record(100, LIMIT_ROWS - 1)
    assert calls == []
    guard.record(10, 1)
    guard.record(10, 1)
    assert calls == [(LIMIT_ROWS, 110)]
    assert guard.total_rescued == LIMIT_ROWS + 1


def test_rare_overflows_never_trip_it() -> None:
    calls: list[tuple[int, int]] = []
    guard = OverflowGuard(lambda rescued, rows: calls.append((rescued, rows)))
    for _ in range(100):
        guard.record(WINDOW_ROWS, LIMIT_ROWS - 1)
    assert calls == []
