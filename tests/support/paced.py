"""A server whose models and decoders only take time, in amounts that a test chooses: the machine is not the limit."""

import json
from collections.abc import Callable
from pathlib import Path

from shared.repository import Meta
from shared.repository_writer import add_version
from tests.support.stack import Site, simulated_repository

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
BRITTLE = """
import time

def build():
    def network(x):
        time.sleep(0.05)
        if (x == 13).any():
            raise ValueError("thirteen")
        return x
    return network
"""
BRITTLE_MODEL = """
pipeline: tensor
backend: numpy
network: net:build
preprocessing:
  inputs: [{name: x, datatype: FP32, shape: [1]}]
  outputs: [{name: x, datatype: FP32, shape: [1]}]
batching: {max_rows: 16}
"""
STEADY_ROWS, STEADY_MS, STEADY_WAIT_MS = 8, 100.0, 5.0
TWIN_ROWS, TWIN_MS, TWIN_WAIT_MS = 2, 20.0, 3000.0


def paced_site(folder: Path) -> Site:
    """Two pool processes, and the models

    steady    20 ms and 10 ms a row, up to 8 rows
    twin      20 ms, up to 2 rows; waits up to 3 s for company that is announced
    brittle   50 ms; raises for a batch with 13 in it

    A call of `steady` and `twin` is a text: the milliseconds that its preparation takes in a pool process.
    """
    root = simulated_repository(folder / "models", "steady", a_ms=20.0, b_ms=10.0)
    simulated_repository(root, "twin", a_ms=TWIN_MS, b_ms=0.0)
    batchings = {
        "steady": {"max_rows": STEADY_ROWS, "max_wait_ms": STEADY_WAIT_MS},
        "twin": {"max_rows": TWIN_ROWS, "max_wait_ms": TWIN_WAIT_MS},
    }
    for name, batching in batchings.items():
        (root / name / "pause.py").write_text(PIPELINE)
        text = f"pipeline: pause:Pause\nbackend: simulated\nbatching: {json.dumps(batching)}\n"
        (root / name / "model.yaml").write_text(text)
    (root / "brittle").mkdir()
    (root / "brittle" / "model.yaml").write_text(BRITTLE_MODEL)
    (root / "brittle" / "net.py").write_text(BRITTLE)
    add_version(root, "brittle", {"nothing.json": root / "brittle" / "net.py"}, Meta(source="test"), make_current=True)
    return Site(folder / "site", root, pool={"processes": 2})


def undisturbed(measure: Callable[[], None], tries: int = 3) -> None:
    """Measure until it holds, a few times at most: what else the machine does may spoil one run, a broken rule all."""
    for left in reversed(range(tries)):
        try:
            measure()
        except AssertionError:
            if not left:
                raise
        else:
            return
