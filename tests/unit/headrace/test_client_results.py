import dataclasses

import pytest

from headrace import client_read as read
from headrace import client_results as results
from headrace.client_errors import InvalidRequest
from protos.headrace.v1 import inference_pb2 as pb

TIMING = (
    "admit;dur=0.100, wait;dur=0.200, prepare;dur=1.5, batch;dur=2, copy;dur=0.3, run;dur=4.25, finish;dur=0, "
    'rows;desc="8", version;desc="0123456789abcdef", novel;dur=9'
)


def test_server_timing_is_read_and_what_is_unknown_left_out() -> None:
    timing = results.ServerTiming.parse(TIMING)

    assert timing == results.ServerTiming(0.1, 0.2, 1.5, 2.0, 0.3, 4.25, 0.0, batch_rows=8)


@pytest.mark.parametrize("header", ["", "nonsense", "run;dur=x", ";dur=1"])
def test_a_missing_or_odd_server_timing_is_no_failure(header: str) -> None:
    assert results.ServerTiming.parse(header) == results.ServerTiming()


def test_every_kind_of_result_comes_out_typed() -> None:
    label = pb.Label(index=1, name="cat", score=0.5)
    message = pb.PredictResponse(
        model="m",
        version="v",
        request_id="r",
        results=[
            pb.Result(classification=pb.Classification(labels=[label])),
            pb.Result(
                detections=pb.Detections(
                    detections=[pb.Detection(label=label, left=1, top=2, right=3, bottom=4)], width=5, height=6
                )
            ),
            pb.Result(embedding=pb.Embedding(values=[0.5], tokens=7, truncated=True)),
            pb.Result(
                entities=pb.Entities(entities=[pb.Entity(label=label, start=2, end=4, text="ab")], truncated=True)
            ),
            pb.Result(tensors=pb.TensorList(tensors=[pb.Tensor(name="x", datatype="UINT8", shape=[1, 1], data=b"a")])),
            pb.Result(text=pb.TextResult(text="hello")),
            pb.Result(error=pb.Error(code=3, message="bad", reason="invalid_input")),
        ],
    )
    cat = results.Label(1, "cat", 0.5)

    *good, bad = read.prediction(message, TIMING).results

    assert good == [
        results.Classification((cat,)),
        results.Detections((results.Detection(cat, 1.0, 2.0, 3.0, 4.0),), 5, 6),
        results.Embedding((0.5,), tokens=7, truncated=True),
        results.Entities((results.Entity(cat, 2, 4, "ab"),), truncated=True),
        results.Tensors((results.Tensor("x", "UINT8", (1, 1), b"a"),)),
        results.Text("hello"),
    ]
    assert isinstance(bad, InvalidRequest)
    assert (bad.text, bad.reason, bad.request_id) == ("bad", "invalid_input", "r")
    assert results.Classification((cat,)).top is cat


def test_results_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        results.Label(1, "cat", 0.5).name = "dog"  # type: ignore[misc]  # what is tested


def test_another_tasks_answer_is_no_classification() -> None:
    message = pb.PredictResponse(model="m", results=[pb.Result(text=pb.TextResult(text="hello"))])

    with pytest.raises(TypeError, match="model m answers Text, not Classification; use predict"):
        read.classified(message, "")


def test_a_kind_from_the_future_says_to_update() -> None:
    with pytest.raises(TypeError, match="update headrace-client"):
        read.prediction(pb.PredictResponse(results=[pb.Result()]), "")
