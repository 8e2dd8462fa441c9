import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import grpc_testing
import pytest

import headrace
from headrace import Client
from headrace.client_errors import InferenceError, Unavailable
from headrace.client_results import Outcome
from protos.headrace.v1 import inference_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"]
PREDICT = SERVICE.methods_by_name["Predict"]
STREAM = SERVICE.methods_by_name["PredictStream"]

Fake = Any
"""grpcio-testing has no types."""

HEAVY = ("torch", "numpy", "cv2", "pydantic", "google.rpc", "shared", "gateway")


def answer(name: str = "cat") -> pb.PredictResponse:
    classification = pb.Classification(labels=[pb.Label(index=1, name=name, score=0.5)])
    return pb.PredictResponse(
        model="m", version="v", request_id="r", results=[pb.Result(classification=classification)]
    )


@pytest.fixture
def channel() -> Fake:
    return grpc_testing.channel([SERVICE], grpc_testing.strict_real_time())


@pytest.fixture
def thread() -> Iterator[futures.ThreadPoolExecutor]:
    with futures.ThreadPoolExecutor(1) as pool:
        yield pool


def fail(rpc: Fake, code: grpc.StatusCode, **trailers: str) -> None:
    rpc.terminate(None, [(key.replace("_", "-"), value) for key, value in trailers.items()], code, "later")


def test_classify_sends_what_was_asked_and_returns_what_was_answered(
    channel: Fake, thread: futures.ThreadPoolExecutor
) -> None:
    client = Client(channel=channel)
    call = thread.submit(client.classify, b"jpeg", top_k=1, model="m", version="0123456789abcdef")

    _, request, rpc = channel.take_unary_unary(PREDICT)
    rpc.send_initial_metadata(())
    rpc.terminate(answer(), [("server-timing", 'run;dur=2.5, rows;desc="4"')], grpc.StatusCode.OK, "")
    result = call.result(5)

    assert (request.model, request.version, request.options.top_k) == ("m", "0123456789abcdef", 1)
    assert [one.image for one in request.inputs] == [b"jpeg"]
    assert (result.top.name, result.top.index, result.top.score) == ("cat", 1, 0.5)
    assert (result.model, result.version, result.request_id) == ("m", "v", "r")
    assert (result.server_timing.run_ms, result.server_timing.batch_rows) == (2.5, 4)


def test_detect_sends_its_options_and_returns_boxes(channel: Fake, thread: futures.ThreadPoolExecutor) -> None:
    client = Client(channel=channel)
    call = thread.submit(client.detect, b"jpeg", model="m", score_threshold=0.5, max_detections=3, classes=["a", "b"])

    _, request, rpc = channel.take_unary_unary(PREDICT)
    box = pb.Detection(label=pb.Label(index=1, name="cat", score=0.5), left=1, top=2, right=3, bottom=4)
    message = pb.PredictResponse(model="m", version="v", request_id="r")
    message.results.add(detections=pb.Detections(detections=[box], width=5, height=6))
    rpc.send_initial_metadata(())
    rpc.terminate(message, [("server-timing", "run;dur=2.5")], grpc.StatusCode.OK, "")
    result = call.result(5)

    options = request.options
    assert (request.model, options.score_threshold, options.max_detections) == ("m", 0.5, 3)
    assert list(options.classes) == ["a", "b"]
    assert not options.HasField("iou_threshold")
    (found,) = result.detections
    assert (found.label.name, found.left, found.top, found.right, found.bottom) == ("cat", 1, 2, 3, 4)
    assert (result.width, result.height, result.model, result.server_timing.run_ms) == (5, 6, "m", 2.5)


def test_another_tasks_answer_is_named(channel: Fake, thread: futures.ThreadPoolExecutor) -> None:
    client = Client(channel=channel)
    call = thread.submit(client.detect, b"jpeg")

    rpc = channel.take_unary_unary(PREDICT)[2]
    rpc.send_initial_metadata(())
    rpc.terminate(answer(), (), grpc.StatusCode.OK, "")

    with pytest.raises(TypeError, match=r"model m answers Classification, not Detections; use predict\(\)"):
        call.result(5)


def test_predict_sends_many_inputs_and_options(channel: Fake, thread: futures.ThreadPoolExecutor) -> None:
    client = Client(channel=channel)
    call = thread.submit(client.predict, [b"a", b"b"], options={"top_k": 2}, partial_results=True)

    _, request, rpc = channel.take_unary_unary(PREDICT)
    rpc.send_initial_metadata(())
    rpc.terminate(answer(), (), grpc.StatusCode.OK, "")

    assert call.result(5).results[0].top.name == "cat"
    assert [one.image for one in request.inputs] == [b"a", b"b"]
    assert request.partial_results


def test_unavailable_with_a_pushback_is_tried_again(channel: Fake, thread: futures.ThreadPoolExecutor) -> None:
    client = Client(channel=channel)
    call = thread.submit(client.classify, b"jpeg")

    fail(channel.take_unary_unary(PREDICT)[2], grpc.StatusCode.UNAVAILABLE, grpc_retry_pushback_ms="1")
    _, _, rpc = channel.take_unary_unary(PREDICT)
    rpc.send_initial_metadata(())
    rpc.terminate(answer(), (), grpc.StatusCode.OK, "")

    assert call.result(5).top.name == "cat"


def test_attempts_are_bounded(channel: Fake, thread: futures.ThreadPoolExecutor) -> None:
    client = Client(channel=channel, max_attempts=2)
    call = thread.submit(client.classify, b"jpeg")

    for _ in range(2):
        fail(channel.take_unary_unary(PREDICT)[2], grpc.StatusCode.UNAVAILABLE, grpc_retry_pushback_ms="1")

    with pytest.raises(Unavailable, match="later") as caught:
        call.result(5)
    assert caught.value.retry_after_ms == 1


@pytest.mark.parametrize(
    ("code", "trailers"),
    [
        (grpc.StatusCode.UNAVAILABLE, {}),
        (grpc.StatusCode.UNAVAILABLE, {"grpc_retry_pushback_ms": "-1"}),
        (grpc.StatusCode.UNAVAILABLE, {"grpc_retry_pushback_ms": "60000"}),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, {"grpc_retry_pushback_ms": "1"}),
        (grpc.StatusCode.INTERNAL, {}),
    ],
    ids=["no pushback", "pushback says no", "later than the deadline", "overloaded", "internal"],
)
def test_nothing_else_is_tried_again(
    channel: Fake, thread: futures.ThreadPoolExecutor, code: grpc.StatusCode, trailers: dict[str, str]
) -> None:
    client = Client(channel=channel, timeout_s=20.0)
    call = thread.submit(client.classify, b"jpeg")

    fail(channel.take_unary_unary(PREDICT)[2], code, **trailers)

    with pytest.raises(InferenceError) as caught:
        call.result(5)
    assert caught.value.code is code


def test_many_images_come_back_as_they_finish(channel: Fake, thread: futures.ThreadPoolExecutor) -> None:
    client = Client(channel=channel)
    call = thread.submit(list, client.classify_many([b"a", "/nowhere/b.jpg", b"c"], top_k=1, timeout_s=2.0))

    _, rpc = channel.take_stream_stream(STREAM)
    rpc.send_initial_metadata(())
    first, second = rpc.take_request(), rpc.take_request()
    rpc.requests_closed()
    rpc.send_response(pb.PredictStreamResponse(id=second.id, response=answer("c"), server_timing="run;dur=1"))
    rpc.send_response(
        pb.PredictStreamResponse(id=first.id, error=pb.Error(code=3, message="bad", reason="invalid_input"))
    )
    rpc.terminate((), grpc.StatusCode.OK, "")
    found: dict[int, Outcome] = {outcome.index: outcome for outcome in call.result(5)}

    assert (first.id, second.id, first.timeout_ms) == (0, 2, 2000)
    assert isinstance(found[0].error, InferenceError)
    assert isinstance(found[1].error, FileNotFoundError)
    assert found[2].result is not None
    assert found[2].result.server_timing.run_ms == 1.0
    assert [found[index].given for index in range(3)] == [b"a", "/nowhere/b.jpg", b"c"]


def test_a_broken_stream_raises(channel: Fake, thread: futures.ThreadPoolExecutor) -> None:
    client = Client(channel=channel)
    call = thread.submit(list, client.classify_many([b"a"]))

    _, rpc = channel.take_stream_stream(STREAM)
    rpc.send_initial_metadata(())
    rpc.take_request()
    rpc.terminate((), grpc.StatusCode.UNAVAILABLE, "gone")

    with pytest.raises(Unavailable, match="gone"):
        call.result(5)


def test_at_most_in_flight_images_are_taken_from_the_caller(channel: Fake, thread: futures.ThreadPoolExecutor) -> None:
    taken: list[int] = []
    more = threading.Event()

    def images() -> Iterator[bytes]:
        for number in range(5):
            taken.append(number)
            yield b"x"
        more.set()

    client = Client(channel=channel)
    call = thread.submit(list, client.classify_many(images(), in_flight=2))
    _, rpc = channel.take_stream_stream(STREAM)
    rpc.send_initial_metadata(())
    open_ids = [rpc.take_request().id, rpc.take_request().id]
    assert taken == [0, 1]

    for _ in range(3):
        rpc.send_response(pb.PredictStreamResponse(id=open_ids.pop(0), response=answer()))
        open_ids.append(rpc.take_request().id)
    assert taken == [0, 1, 2, 3, 4]
    for number in open_ids:
        rpc.send_response(pb.PredictStreamResponse(id=number, response=answer()))
    assert more.wait(5), "waited 5 s for the images to be used up"
    rpc.requests_closed()
    rpc.terminate((), grpc.StatusCode.OK, "")

    assert len(call.result(5)) == 5


def test_a_given_channel_stays_open(channel: Fake) -> None:
    with Client(channel=channel) as client:
        assert client


def test_the_package_is_light_and_names_only_what_it_has() -> None:
    code = (
        "import sys, headrace; assert 'grpc' not in sys.modules; headrace.Client; headrace.AsyncClient; "
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )

    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    assert printed == "[]\n"
    with pytest.raises(AttributeError, match="Klient"):
        _ = headrace.Klient  # type: ignore[attr-defined]  # what is tested
