"""What people send by mistake or on purpose: a clear status, no harm, and the next request works."""

import contextlib
import http.client
import math
import re
import signal
import struct
import sys
import zlib
from collections.abc import Callable

import cv2
import grpc
import numpy as np
import pytest

from protos.headrace.v1 import inference_pb2 as pb
from protos.headrace.v1 import inference_pb2_grpc as pb_grpc
from tests.support.stack import Process, Site

INVALID, NOT_FOUND, EXHAUSTED = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
INSIDES = re.compile(
    r"/dev/shm|psm_|ipc://|/tmp/|\.py\b|Traceback|headrace-test|memfd|pid \d|slot|/root|/home|0x[0-9a-f]{6}"
)


def png_bomb(width: int = 30_000, height: int = 30_000) -> bytes:
    """A 1-bit PNG of many pixels in few bytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = zlib.compress(bytes((width + 7) // 8 + 1) * height, 9)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def image(data: bytes, **fields: object) -> pb.PredictRequest:
    return pb.PredictRequest(model="sim", inputs=[pb.Input(image=data)], **fields)  # type: ignore[arg-type]  # the test's business


CASES: dict[str, tuple[Callable[[bytes], pb.PredictRequest], grpc.StatusCode, str]] = {
    "no input": (lambda _j: pb.PredictRequest(model="sim"), INVALID, "inputs"),
    "input with no field": (lambda _j: pb.PredictRequest(model="sim", inputs=[pb.Input()]), INVALID, r"inputs\[0\]"),
    "empty image": (lambda _j: image(b""), INVALID, "image"),
    "not an image": (lambda _j: image(b"hello, I am a text" * 10), INVALID, "image"),
    "truncated image": (lambda j: image(j[: len(j) // 2]), INVALID, "image"),
    "only a header": (lambda j: image(j[:20]), INVALID, "image"),
    "text for an image model": (
        lambda _j: pb.PredictRequest(model="sim", inputs=[pb.Input(text="a cat")]),
        INVALID,
        "text|image",
    ),
    "tensors for an image model": (
        lambda _j: pb.PredictRequest(model="sim", inputs=[pb.Input(tensors=pb.TensorList())]),
        INVALID,
        "tensors|image",
    ),
    "too many pixels": (lambda _j: image(png_bomb()), INVALID, r"pool\.max_pixels"),
    "unknown model": (lambda j: pb.PredictRequest(model="nobody", inputs=[pb.Input(image=j)]), NOT_FOUND, "nobody"),
    "path as a model": (
        lambda j: pb.PredictRequest(model="../../etc/passwd", inputs=[pb.Input(image=j)]),
        INVALID,
        "model",
    ),
    "no model though two are served": (lambda j: pb.PredictRequest(inputs=[pb.Input(image=j)]), INVALID, "model"),
    "unknown version": (lambda j: image(j, version="0" * 16), NOT_FOUND, "version"),
    "top_k of 0": (lambda j: image(j, options=pb.Options(top_k=0)), INVALID, "top_k"),
    "top_k of 2^31": (lambda j: image(j, options=pb.Options(top_k=2**31)), INVALID, "top_k"),
    "top_k over what leaves the worker": (lambda j: image(j, options=pb.Options(top_k=500)), INVALID, "max_top_k"),
    "id with a newline": (lambda j: image(j, request_id="a\nb"), INVALID, "request_id"),
    "id of 10 KB": (lambda j: image(j, request_id="x" * 10_000), INVALID, "request_id"),
    "too many inputs": (
        lambda _j: pb.PredictRequest(model="sim", inputs=[pb.Input(image=b"x")] * 300),
        EXHAUSTED,
        r"admission\.max_inputs_per_request",
    ),
    "one bad image of three": (
        lambda j: pb.PredictRequest(model="sim", inputs=[pb.Input(image=d) for d in (j, b"bad", j)]),
        INVALID,
        r"inputs\[1\]",
    ),
}


@pytest.fixture(scope="module")
def stub(site: Site) -> pb_grpc.InferenceStub:
    return pb_grpc.InferenceStub(grpc.insecure_channel(site.grpc, [("grpc.max_send_message_length", -1)]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mistake_has_a_status_that_names_it_and_harms_nobody(
    stub: pb_grpc.InferenceStub, jpeg: bytes, case: str
) -> None:
    make, code, names = CASES[case]
    with pytest.raises(grpc.RpcError) as caught:
        stub.Predict(make(jpeg), timeout=10)
    error = caught.value
    assert isinstance(error, grpc.Call)
    assert error.code() == code, error.details()
    details = error.details() or ""
    assert re.search(names, details), details
    assert not INSIDES.search(details), details
    assert len(details) < 1000
    assert stub.Predict(image(jpeg), timeout=10).results


def test_an_image_bomb_is_refused_before_it_is_decoded(site: Site, stub: pb_grpc.InferenceStub) -> None:
    before = site.pool_pids()
    for _ in range(10):
        with pytest.raises(grpc.RpcError):
            stub.Predict(image(png_bomb()), timeout=5)
    assert site.pool_pids() == before


def test_a_message_over_the_limit(stub: pb_grpc.InferenceStub, jpeg: bytes) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Predict(image(bytes(5 * 1024 * 1024)), timeout=10)
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() == EXHAUSTED
    assert stub.Predict(image(jpeg), timeout=10).results


def test_garbage_instead_of_a_message(site: Site, stub: pb_grpc.InferenceStub, jpeg: bytes) -> None:
    with grpc.insecure_channel(site.grpc) as channel:
        call = channel.unary_unary("/headrace.v1.Inference/Predict")
        for garbage in (b"\xff" * 100, b"\x22\xff\xff\xff\x7f", b"\x0a\x80"):
            with pytest.raises(grpc.RpcError) as caught:
                call(garbage, timeout=5)
            assert isinstance(caught.value, grpc.Call)
            assert caught.value.code() == INVALID
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/headrace.v1.Inference/Nothing")(b"", timeout=5)
        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert stub.Predict(image(jpeg), timeout=10).results


def test_an_unknown_model_name_is_no_metric_label(site: Site, stub: pb_grpc.InferenceStub, jpeg: bytes) -> None:
    for number in range(50):
        with pytest.raises(grpc.RpcError):
            stub.Predict(pb.PredictRequest(model=f"made-up-{number}", inputs=[pb.Input(image=jpeg)]), timeout=5)
    assert "made-up" not in site.get("/metrics")[1]


def test_an_expired_deadline_is_not_decoded(site: Site, jpeg: bytes) -> None:
    def jobs() -> int:
        return sum(process["jobs"] for process in site.debug()["pool"])

    # A gRPC client would answer itself; this one waits as long as it takes, so that it is the server that says no.
    path = "/v1/classify?model=sim&timeout_ms=0.001"
    before, calls = jobs(), 30
    with contextlib.closing(http.client.HTTPConnection(site.http, timeout=10)) as connection:
        for _ in range(calls):
            connection.request("POST", path, body=jpeg)
            answer = connection.getresponse()
            answer.read()
            assert (answer.status, answer.headers["error-reason"]) == (504, "deadline_exceeded")
    assert jobs() - before < calls / 2  # some are the server's own: it tries models that nobody asks


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 3), (2, 1, 3), (1, 5000, 3), (3000, 2, 3), (4000, 3000, 3)],
    ids=lambda shape: "x".join(map(str, shape)),
)
@pytest.mark.parametrize("value", [0, 255])
def test_extreme_but_valid_images_are_answered(
    stub: pb_grpc.InferenceStub, shape: tuple[int, int, int], value: int
) -> None:
    data = cv2.imencode(".png", np.full(shape, value, np.uint8))[1].tobytes()
    answer = stub.Predict(image(data), timeout=20)
    assert all(math.isfinite(label.score) for label in answer.results[0].classification.labels)


def test_partial_results_keep_the_good_ones(stub: pb_grpc.InferenceStub, jpeg: bytes) -> None:
    request = pb.PredictRequest(
        model="sim", inputs=[pb.Input(image=data) for data in (jpeg, b"bad", jpeg)], partial_results=True
    )
    kinds = [result.WhichOneof("kind") for result in stub.Predict(request, timeout=10).results]
    assert kinds == ["classification", "error", "classification"]


def test_partial_results_also_keep_inputs_that_can_not_even_be_read(stub: pb_grpc.InferenceStub, jpeg: bytes) -> None:
    inputs = [pb.Input(), pb.Input(image=b""), pb.Input(image=jpeg), pb.Input(text="a cat")]
    results = stub.Predict(pb.PredictRequest(model="sim", inputs=inputs, partial_results=True), timeout=10).results
    assert [result.WhichOneof("kind") for result in results] == ["error", "error", "classification", "error"]
    assert [result.error.reason for result in results if result.WhichOneof("kind") == "error"] == ["invalid_input"] * 3


def test_a_failed_call_has_its_machine_readable_reason(stub: pb_grpc.InferenceStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Predict(image(b"no image"), timeout=5)
    assert isinstance(caught.value, grpc.Call)
    trailers = dict(caught.value.trailing_metadata() or ())
    assert trailers["request-id"]
    assert b"invalid_input" in trailers["grpc-status-details-bin"]  # type: ignore[operator]  # binary trailers are bytes


def test_no_refusal_is_an_assert(own_site: Site, jpeg: bytes) -> None:
    """With PYTHONOPTIMIZE=2 no `assert` is executed: everything is refused as before."""
    argv = [sys.executable, "-m", "headrace", "serve", "--config", str(own_site.config)]
    with Process(argv, own_site.folder, {"PYTHONOPTIMIZE": "2"}) as process:
        process.wait_line("Headrace is ready")
        assert {one.environ()["PYTHONOPTIMIZE"] for one in own_site.processes()} == {"2"}
        with grpc.insecure_channel(own_site.grpc) as channel:
            stub = pb_grpc.InferenceStub(channel)
            for case in CASES.keys() - {"no model though two are served"}:
                make, code, _ = CASES[case]
                with pytest.raises(grpc.RpcError) as caught:
                    stub.Predict(make(jpeg), timeout=10)
                assert isinstance(caught.value, grpc.Call)
                assert (case, caught.value.code()) == (case, code)
            assert stub.Predict(image(jpeg), timeout=10).results
        process.signal(signal.SIGINT)
        assert process.wait() == 0
