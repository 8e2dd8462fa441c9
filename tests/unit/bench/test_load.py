import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import closed_loop, load, load_arguments, open_loop, payloads
from bench.arrivals import Phase
from bench.wire import NotThere, connecting
from protos.headrace.v1 import inference_pb2 as native
from protos.inference import grpc_service_pb2 as open_inference


def test_the_help_has_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_arguments.arguments("", ["--help"])
    shown = capsys.readouterr().out
    examples = [
        line.replace("\\\n", " ")
        for line in load_arguments.EXAMPLES.replace("\\\n", " ").splitlines()
        if "-m bench.load" in line
    ]
    assert len(examples) == 4
    for example in examples:
        assert example.split()[:3] == ["python", "-m", "bench.load"]
        load_arguments.arguments("", example.split()[3:])
    assert "bursts" in shown


def test_phases_and_mixes_are_read() -> None:
    given = load_arguments.arguments("", ["--phase", "poisson:rate=5,seconds=1", "--mix", "short=2,long=0.5"])
    assert given.phase == [Phase("poisson", 5, 1)]
    assert given.mix == {"short": 2.0, "long": 0.5}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--mix tiny=1", "'tiny=1' must be one of short, medium, long"),
        ("--mix short=0", "a weight above 0"),
        ("--mix short=x", "a weight above 0"),
        ("--phase x", "the kind must be one of"),
        ("--phase constant:rate=0,seconds=1", "has no calls"),
        ("--channels 0", "'0' must be a whole number, 1 or more"),
        ("--in-flight 0", "'0' must be a whole number, 1 or more"),
        ("--in-flight x", "'x' must be a whole number, 1 or more"),
        ("--deadline-ms -5", "'-5' must be a number, not below 0"),
        ("--deadline-ms 0", "'0' must be above 0"),
        ("--window-s nan", "'nan' must be a number, not below 0"),
        ("--payload no-such-file", "'no-such-file' can't be read: No such file"),
        ("--records no-such-folder/calls.csv", "must be a file in a folder that exists"),
        ("--address localhost", "'localhost' must be host:port"),
        ("--in-flight 3 --phase constant:rate=1,seconds=1", "give one of them"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_sentence(
    line: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load_arguments.arguments("", line.split())
    assert ended.value.code == 2
    assert why in capsys.readouterr().err.splitlines()[-1]


def test_every_option_has_a_help_with_its_default() -> None:
    options = [action for action in load_arguments.parser("")._actions if action.dest != "help"]
    assert [action.dest for action in options if "default" not in (action.help or "")] == []


def test_floats_fit_the_built_in_identity_unless_told_otherwise() -> None:
    assert load_arguments.arguments("", ["--input", "floats"]).mix == {"short": 1.0}
    assert load_arguments.arguments("", ["--input", "floats", "--mix", "long"]).mix == {"long": 1.0}
    given = load_arguments.arguments("", [])
    assert (given.mix, given.in_flight) == ({"medium": 1.0}, 16)


def test_a_payload_is_read_with_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "request").write_bytes(b"bytes")
    assert load_arguments.arguments("", ["--payload", str(tmp_path / "request")]).payload == {"request": b"bytes"}


def _fails(monkeypatch: pytest.MonkeyPatch, line: str) -> Any:  # noqa: ANN401 - an exit code
    monkeypatch.setattr(sys, "argv", ["load", *line.split()])
    with pytest.raises(SystemExit) as ended:
        load.main()
    return ended.value.code


@pytest.mark.parametrize("line", ["--in-flight 2", "--phase constant:rate=5,seconds=1 --wire http2"])
def test_without_a_server_a_sentence_names_the_address(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refused(*_: object) -> None:
        async with connecting("127.0.0.1:9"):
            raise ConnectionRefusedError("Connect call failed")

    monkeypatch.setattr(closed_loop, "run", refused)
    monkeypatch.setattr(open_loop.Sender, "run", refused)
    assert _fails(monkeypatch, f"{line} --address 127.0.0.1:9") == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "no gRPC server answered at 127.0.0.1:9: Connect call failed" in said


async def test_a_server_that_says_nothing_is_not_there_after_the_limit() -> None:
    with pytest.raises(NotThere, match=r"no gRPC server answered at here:1 within 0\.01 s"):
        async with connecting("here:1", limit_s=0.01):
            await asyncio.get_running_loop().create_future()


def test_when_nothing_was_ok_the_exit_code_and_a_sentence_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(*_: object) -> dict[str, Any]:
        return {"requests": 0, "p50_ms": None, "errors": {"NOT_FOUND": 3}, "samples": {"NOT_FOUND": "no such model"}}

    monkeypatch.setattr(closed_loop, "run", run)
    assert _fails(monkeypatch, "--json") == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["samples"] == {"NOT_FOUND": "no such model"}
    assert "not one call was ok: 3 NOT_FOUND: no such model" in shown.err


def test_one_ok_call_or_none_at_all_is_no_fault() -> None:
    assert load.nothing_ok({"total": {"outcomes": {"ok": 1, "expired": 9}}}) == ""
    assert load.nothing_ok({"total": {"outcomes": {}}}) == ""
    assert load.nothing_ok({"requests": 1, "errors": {"UNAVAILABLE": 9}}) == ""
    assert "none ended within the window" in load.nothing_ok({"requests": 0, "errors": {}, "samples": {}})
    late = {"total": {"outcomes": {"ok_late": 2}}, "samples": {"ok_late": "answered after its deadline"}}
    assert "2 ok_late: answered after its deadline" in load.nothing_ok(late)


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
    result["samples"] = {"overloaded": "the queue is full"}
    lines = load.open_table(result).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:-2]] == ["poisson 5/s", "size short", "size long", "all"]
    assert lines[-2] == "overloaded: the queue is full"
    assert "0.250 ms of CPU a call" in lines[-1]
