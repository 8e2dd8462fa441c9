"""A thousand photos of 12 megapixels that wait cost the server what they are long, encoded, and a fixed window."""

from pathlib import Path

import cv2
import grpc
import numpy as np
import pytest

from protos.headrace.v1 import inference_pb2 as pb
from protos.headrace.v1 import inference_pb2_grpc as pb_grpc
from tests.support.memory import proportional_bytes
from tests.support.stack import Site, eventually, serving, simulated_repository

WAITING = 1000
WINDOW_BYTES = 256 * 1024 * 1024
"""The heap that the gateway keeps free for what comes next (gateway.__main__), which gRPC's own pieces of messages have
passed through; calls and decoders fit into it, too. A second copy of what waits does not."""
BATCH_MS = 400.0
DECODED_AHEAD = 3
"""Batches of one row: one runs, one is staged, one is being prepared."""


@pytest.fixture
def large_jpeg() -> bytes:
    """4000 x 3000, about half a megabyte."""
    small = np.random.default_rng(2).integers(0, 255, (30, 40, 3), np.uint8)
    image = cv2.resize(small, (4000, 3000), interpolation=cv2.INTER_CUBIC)
    return cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 60])[1].tobytes()


def test_waiting_requests_hold_their_encoded_bytes_and_no_more(tmp_path: Path, large_jpeg: bytes) -> None:
    repository = simulated_repository(tmp_path / "models", a_ms=BATCH_MS, b_ms=0.0)
    site = Site(tmp_path / "site", repository, batching={"max_rows": 1}, admission={"max_bytes": 2 << 30})
    request = pb.PredictRequest(inputs=[pb.Input(image=large_jpeg)])
    with serving(site), grpc.insecure_channel(site.grpc) as channel:
        stub = pb_grpc.InferenceStub(channel)
        stub.Predict(request, timeout=20)
        before, jobs = memory(site), prepared(site)
        answered = site.debug()["models"][0]["answered"]
        calls = [stub.Predict.future(request, timeout=600) for _ in range(WAITING)]

        def waiting() -> int:
            return int(site.debug()["in_flight"]["requests"])

        def ended() -> int:
            return int(site.debug()["models"][0]["answered"]) - answered

        eventually("all to be in the server", lambda: waiting() + ended() >= WAITING, 20.0)
        during = memory(site)
        assert len(large_jpeg) > 300_000
        assert during - before <= WAITING * len(large_jpeg) + WINDOW_BYTES
        assert prepared(site) - jobs <= ended() + DECODED_AHEAD + 2  # and what came meanwhile
        for call in calls:
            call.cancel()
        eventually("the server to be empty again", lambda: not waiting(), 5.0)
        assert not site.debug()["arena"]["leased"]


def memory(site: Site) -> int:
    return proportional_bytes(process.pid for process in site.processes())


def prepared(site: Site) -> int:
    return sum(int(process["jobs"]) for process in site.debug()["pool"])
