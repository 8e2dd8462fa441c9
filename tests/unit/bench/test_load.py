import argparse

import pytest

from bench import load, payloads
from bench.arrivals import Phase
from protos.headrace.v1 import inference_pb2 as native
from protos.inference import grpc_service_pb2 as open_inference


def test_the_help_has_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load.parser().parse_args(["--help"])
    shown = capsys.readouterr().out
    examples = [
        line.replace("\\\n", " ") for line in load.EXAMPLES.replace("\\\n", " ").splitlines() if "-m bench.load" in line
    ]
    assert len(examples) == 4
    for example in examples:
        assert example.split()[:3] == ["python", "-m", "bench.load"]
        load.parser().parse_args(example.split()[3:])
    assert "bursts" in shown


def test_phases_and_mixes_are_read() -> None:
    given = load.parser().parse_args(["--phase", "poisson:rate=5,seconds=1", "--mix", "short=2,long=0.5"])
    assert given.phase == [Phase("poisson", 5, 1)]
    assert given.mix == {"short": 2.0, "long": 0.5}


@pytest.mark.parametrize(
    "arguments", [["--mix", "tiny=1"], ["--mix", "short=0"], ["--mix", "short=x"], ["--phase", "x"]]
)
def test_what_makes_no_sense_is_refused(arguments: list[str]) -> None:
    with pytest.raises((SystemExit, argparse.ArgumentTypeError)):
        load.parser().parse_args(arguments)


@pytest.mark.parametrize("kind", payloads.KINDS)
def test_sizes_differ_by_far_in_both_protocols(kind: str) -> None:
    for protocol in payloads.METHODS:
        short, medium, long = (len(payloads.request(protocol, kind, size, "m")) for size in payloads.SIZES)
        assert 3 * short < medium
        assert 3 * medium < long


def test_requests_are_what_their_services_read() -> None:
    image = payloads.image("medium")
    assert native.PredictRequest.FromString(payloads.request("native", "image", "medium", "m")).inputs[0].image == image
    request = open_inference.ModelInferRequest.FromString(payloads.request("open-inference", "image", "medium", "m"))
    assert request.model_name == "m"
    assert request.raw_input_contents[0] == len(image).to_bytes(4, "little") + image


def test_the_table_has_each_phase_each_size_and_all() -> None:
    found = {"planned": 2, "outcomes": {"ok": 1, "overloaded": 1}, "ok_ms": {"p50": 1.0, "p99": 2.0}}
    found |= {"refused_ms": {}, "sent_after_plan_ms": {"p99": 0.5}}
    phase = found | {"name": "poisson 5/s"}
    result = {"phases": [phase], "sizes": {"short": found, "long": found}, "total": found, "cpu_ms_per_call": 0.25}
    lines = load.open_table(result).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:-1]] == ["poisson 5/s", "size short", "size long", "all"]
    assert "0.250 ms of CPU a call" in lines[-1]
