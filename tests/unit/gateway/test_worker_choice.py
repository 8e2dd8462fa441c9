import math
from typing import Any, cast

import pytest

from gateway.running import RunningBatches
from gateway.worker_choice import LONGEST_SLEEP_S, WorkerChoice


class Nobody:
    """No worker is connected."""

    def workers(self) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("due_ms", "sleep_ms"),
    [(-1.0, 1), (0.0, 1), (0.01, 1), (0.4, 1), (1.0, 1), (1.4, 2), (1.5, 2), (5.0, 5), (249.6, 250), (1e6, 250)],
)
def test_a_sleep_is_never_cut_to_less_by_a_timer_of_whole_milliseconds(due_ms: float, sleep_ms: int) -> None:
    choice = WorkerChoice(cast("Any", Nobody()), RunningBatches(), 2)
    now_s = 86_400.123456
    sleep_s = choice.sleep_s(now_s, now_s + due_ms / 1e3)
    assert sleep_s * 1e3 == pytest.approx(sleep_ms)
    assert choice.sleep_s(now_s, math.inf) == LONGEST_SLEEP_S
