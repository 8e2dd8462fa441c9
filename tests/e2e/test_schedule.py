"""The scheduler in the real server: queueing below the peak, decoding beside the device, overload and the time after.

The device is simulated and the pipeline's work is a pause, so the two cores of the test machine are not the limit.
"""

import itertools
import json
import time
from collections.abc import Iterator

import pytest

from headrace import Client
from headrace.client_results import Text
from tests.support.memory import proportional_bytes
from tests.support.open_loop import keep_sending, send
from tests.support.simulation import bursts, poisson
from tests.support.stack import Site, eventually, serving, simulated_repository

PIPELINE = """
import time
import numpy as np
from shared.pipeline import Options, Pipeline, PipelineSpec, Prepared, RawInput
from shared.results import Text
from shared.tensors import TensorSpec

class Pause(Pipeline):
    postprocess_is_trivial = True

    @property
    def spec(self):
        tensor = TensorSpec(name="x", datatype="UINT8", shape=(4,))
        return PipelineSpec(kind="text", inputs=(tensor,), outputs=(tensor,))

    def preprocess(self, item, options, out):
        time.sleep(int(bytes(item.data)) / 1000)
        return Prepared(tensors=[np.zeros((1, 4), np.uint8)])

    def postprocess(self, outputs, context, options):
        return [Text("done") for _ in outputs[0]]

    def example(self):
        return RawInput(kind="text", data=b"0")
"""
ROWS = 8
STEADY_MS = 20.0 + ROWS * 10.0
PEAK = ROWS / STEADY_MS * 1e3
WAIT_MS = 5.0
SPARE_MS = 40.0
"""For a busy machine with two cores."""
PATIENCE_S = 0.6
TWIN_ROWS, TWIN_MS = 2, 20.0
NO_PAUSE = "0"


@pytest.fixture(scope="module")
def paced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """`steady`: 20 ms and 10 ms a row, up to 8 rows. `twin`: 20 ms, up to 2 rows; callers ask for 10 ms of decoding."""
    root = simulated_repository(tmp_path_factory.mktemp("paced") / "models", "steady", a_ms=20.0, b_ms=10.0)
    simulated_repository(root, "twin", a_ms=TWIN_MS, b_ms=0.0)
    for name, rows in (("steady", ROWS), ("twin", TWIN_ROWS)):
        (root / name / "pause.py").write_text(PIPELINE)
        batching = json.dumps({"max_rows": rows, "max_wait_ms": WAIT_MS})
        (root / name / "model.yaml").write_text(f"pipeline: pause:Pause\nbackend: simulated\nbatching: {batching}\n")
    site = Site(tmp_path_factory.mktemp("paced-site"), root, pool={"processes": 1})
    with serving(site):
        yield site


def count(site: Site, metric: str, model: str) -> float:
    start = f'{metric}{{model="{model}"}} '
    lines = site.get("/metrics")[1].splitlines()
    return sum(float(line.removeprefix(start)) for line in lines if line.startswith(start))


@pytest.mark.parametrize("kind", ["poisson", "bursts of a batch and a half"])
def test_at_60_percent_load_the_queue_time_stays_below_one_batch_and_the_wait(paced: Site, kind: str) -> None:
    rate, seconds = 0.6 * PEAK, 2.0
    load = (
        poisson(5, rate=rate, seconds=seconds) if kind == "poisson" else bursts(12, every_s=12 / rate, seconds=seconds)
    )
    sent = send(paced.grpc, "steady", NO_PAUSE, [arrival.at_s for arrival in load], timeout_s=5.0)
    assert set(sent.outcomes) == {"ok"}
    assert sent.queued_ms(0.98) <= STEADY_MS + WAIT_MS + SPARE_MS


def busy_ms(site: Site, model: str) -> float:
    """What the worker has reported of all batches so far: copy and computation."""
    stats = json.loads(site.get(f"/v2/models/{model}/stats")[1])["model_stats"][0]["batch_stats"]
    return sum(batch[part]["ns"] for batch in stats for part in ("compute_input", "compute_infer")) / 1e6


def test_decoding_and_device_overlap(paced: Site) -> None:
    """20 ms to decode a batch's worth, 20 ms on the device, always more callers than both can hold.

    Idle share: the part of the time in which the worker computed nothing, by its own reports.
    """
    keep_sending(paced.grpc, "twin", "10", callers=4, seconds=0.2)  # costs are learned, and the clients are warm
    before_ms, start_s = busy_ms(paced, "twin"), time.monotonic()
    answered = keep_sending(paced.grpc, "twin", "10", callers=16, seconds=2.0)
    took_s = time.monotonic() - start_s
    idle_share = 1 - (busy_ms(paced, "twin") - before_ms) / (took_s * 1e3)
    in_turn = TWIN_ROWS / (2 * TWIN_MS) * 1e3
    assert answered / took_s > 1.5 * in_turn
    assert idle_share < 0.15


def test_overload_is_refused_and_answered_at_the_peak_and_over_within_half_a_second(paced: Site) -> None:
    """Four times what the model can do, three times in a row: the memory stays as it is after the first one."""
    seconds, memory, late, calls = 1.2, list[int](), 0, 0
    rows, nobody = (
        count(paced, "headrace_rows_total", "steady"),
        count(paced, "headrace_rows_for_nobody_total", "steady"),
    )
    with Client(paced.grpc, max_attempts=1) as client:
        for seed in range(3):
            plan = [arrival.at_s for arrival in poisson(seed, rate=4 * PEAK, seconds=seconds)]
            sent = send(paced.grpc, "steady", NO_PAUSE, plan, timeout_s=PATIENCE_S)
            assert set(sent.outcomes) <= {"ok", "overloaded", "deadline_exceeded"}
            assert sent.outcomes["overloaded"] >= 0.5 * len(plan)
            late, calls = late + sent.outcomes["deadline_exceeded"], calls + len(plan)
            assert len(sent.ok) / (seconds + PATIENCE_S) >= 0.6 * PEAK
            over_s = time.monotonic()
            eventually("an empty server", lambda: not any(paced.debug()["in_flight"].values()), 0.5)
            client.predict([Text(NO_PAUSE)], model="steady", timeout_s=2.0)
            assert time.monotonic() - over_s <= 0.5
            memory.append(proportional_bytes(process.pid for process in paced.processes()))
    assert late <= 0.04 * calls  # twice the target, for a machine that has other things to do
    assert count(paced, "headrace_rows_for_nobody_total", "steady") - nobody <= 0.02 * (
        count(paced, "headrace_rows_total", "steady") - rows
    )
    growth = [after - before for before, after in itertools.pairwise(memory)]
    assert max(growth) <= 4 * 1024 * 1024, memory
