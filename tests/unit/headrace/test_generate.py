import asyncio
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace import generate
from headrace.cli import app
from headrace.client_text import GenerateOptions
from headrace.generate import Wanted, run
from headrace.generate_command import _prompts
from headrace.many_inputs import Server
from shared import errors
from shared.errors import StartupError
from tests.support.fake_flow import VERSION, Flow, State, serving

PLAIN = Wanted("", GenerateOptions(max_tokens=7, seed=None))


async def ran(flow: Flow, prompts: list[str], wanted: Wanted = PLAIN, *, as_json: bool = False) -> int:
    """The command against a real server over a fake flow."""
    async with serving(flow, State()) as running:
        server = Server(running.address, 5.0)
        return await asyncio.to_thread(run, prompts, wanted, server, as_json=as_json)


async def test_one_text_is_printed_while_it_grows(capsys: pytest.CaptureFixture[str]) -> None:
    flow = Flow()
    assert await ran(flow, ["ab\nc"]) == 0
    assert capsys.readouterr().out == "AB\nC\n"
    assert flow.requests[0].options == {"max_tokens": 7}


async def test_a_text_that_ends_its_line_gets_no_second_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert await ran(Flow(), ["ab\n"]) == 0
    assert capsys.readouterr().out == "AB\n"


async def test_json_has_the_text_and_how_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert await ran(Flow(), ["ab"], as_json=True) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["prompt"], row["text"], row["model"], row["version"]) == ("ab", "AB", "fake", VERSION)
    assert row["finished"] == {"reason": "length", "prompt_tokens": 2, "completion_tokens": 2}
    assert row["server_timing"]["first_ms"] == 1.0


async def test_json_has_the_tokens_where_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert await ran(Flow(), ["ab"], Wanted("", GenerateOptions(logprobs=0)), as_json=True) == 0
    first, _ = json.loads(capsys.readouterr().out)["tokens"]
    assert first == {"id": 65, "text": "A", "bytes": [65], "logprob": -0.5, "alternatives": []}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([""], "the prompt is empty"),
        (["a", "--logprobs", "2"], "--logprobs needs --json"),
        (["a", "--top-p", "0"], "--top-p is 0: it is above 0 and at most 1"),
        (["", "--file", "prompts.txt"], "give a prompt or --file"),
    ],
)
def test_what_can_not_be_asked_is_said_before_anything_is_sent(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["generate", *arguments])
    assert result.exit_code != 0
    assert said in f"{result.output} {result.exception}"


async def test_many_prompts_are_answered_in_their_order_and_no_more_at_a_time_than_may(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flow = Flow()
    flow.gate = asyncio.Event()
    prompts = [f"p{number}" for number in range(40)]
    running = asyncio.create_task(ran(flow, prompts, as_json=True))
    await flow.until(lambda flow: flow.running == generate.IN_FLIGHT, "as many as may to be on their way")
    flow.gate.set()
    assert await running == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == [prompt.upper() for prompt in prompts]
    assert flow.peak == generate.IN_FLIGHT


async def test_many_prompts_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert await ran(Flow(), ["ab", "cd"]) == 0
    assert capsys.readouterr().out == "ab\nAB\n\ncd\nCD\n\n"


async def test_a_failure_is_one_line_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    flow = Flow()
    flow.fail = errors.InvalidInput("the prompt has 9 tokens")
    assert await ran(flow, ["ab"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "headrace: the prompt has 9 tokens\n")


async def test_failures_of_many_are_rows_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    flow = Flow()
    flow.fail = errors.InvalidInput("no")
    assert await ran(flow, ["ab", "cd"], as_json=True) == 1
    captured = capsys.readouterr()
    assert [json.loads(line)["error"]["reason"] for line in captured.out.splitlines()] == ["invalid_input"] * 2
    assert "2 of 2 texts could not be generated" in captured.err


@pytest.mark.parametrize(
    ("wanted", "sent"),
    [
        (Wanted("", GenerateOptions(), chat=True), [["user", "hi"]]),
        (Wanted("", GenerateOptions(), system="be kind"), [["system", "be kind"], ["user", "hi"]]),
    ],
)
async def test_conversations(wanted: Wanted, sent: list[list[str]]) -> None:
    flow = Flow()
    assert await ran(flow, ["hi"], wanted) == 0
    (raw,) = flow.requests[0].inputs
    assert (raw.kind, json.loads(bytes(raw.data))) == ("chat", sent)


def test_what_steers_a_terminal_is_shown_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert generate._safe("a\x1b[2Jb\n") == "a\x1b[2Jb\n"  # a file gets what was generated
    monkeypatch.setattr("sys.stdout", _Terminal())
    assert generate._safe("a\x1b[2Jb\n\tc") == "a\\x1b[2Jb\n\tc"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_prompts_of_a_file_are_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n two\r\nthree")
    assert _prompts(None, file) == ["one", " two", "three"]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\n \n", "is empty"), (b"ok\n\xff", "is not UTF-8 at byte 3")],
)
def test_a_file_without_prompts(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    with pytest.raises(StartupError, match=said):
        _prompts(None, file)


def test_a_prompt_and_a_file_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="not both"):
        _prompts("ab", tmp_path / "prompts.txt")
    with pytest.raises(StartupError, match="can't be read"):
        _prompts(None, tmp_path / "prompts.txt")


async def test_standard_input_is_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    flow = Flow()
    async with serving(flow, State()) as running:
        result = await asyncio.to_thread(
            CliRunner().invoke, app, ["generate", "-", "--address", running.address, "--stop", "x"], "from a pipe"
        )
    assert (result.exit_code, result.output) == (0, "FROM A PIPE\n")
    assert flow.requests[0].options == {"stop": ["x"]}
