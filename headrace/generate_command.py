"""The command `headrace generate`, as the command line takes it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.options import AddressOption, JsonOption
from shared.errors import ExitCode, StartupError

MAX_PROMPT_BYTES = 64 * 1024 * 1024
"""Of standard input or a file of prompts: a bound for a pipe that never ends."""


def register(app: typer.Typer) -> None:
    """Put the command where it belongs."""
    app.command("generate")(generate)


def generate(  # noqa: PLR0913 - one parameter per option
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; - or nothing: standard input.", show_default=False)
    ] = None,
    *,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Many prompts, one a line, instead.", show_default=False)
    ] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Model name; not needed when only one generates.")] = "",
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", min=1, help="Tokens to add, at most.", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="0: always the likeliest token; higher is more varied.", show_default=False),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from this share of probability, above 0 to 1.", show_default=False),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="Draw from so many of the likeliest tokens.", show_default=False)
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            min=0.1, max=10, help="Above 1: tokens that have occurred become less likely.", show_default=False
        ),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=20,
            help="With --json: each token with its log probability, and so many of the likeliest.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The same seed gives the same text.", show_default=False)
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text. May be repeated.", show_default=False)
    ] = None,
    beams: Annotated[
        int | None, typer.Option(min=1, help="Keep so many continuations (beam search).", show_default=False)
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is said to the model, which answers it.")] = False,
    system: Annotated[
        str, typer.Option(help="How it is to answer: said before the prompt. Means --chat.", show_default=False)
    ] = "",
    address: AddressOption = "",
    timeout: Annotated[float, typer.Option("--timeout", "-t", min=0.001, help="Seconds per text.")] = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Generate text with a running server, and show it while it grows. Exit code 1 when any text failed.

    Examples:
        headrace generate "The river" --max-tokens 50

        headrace generate "Name three colours." --chat --temperature 0.7 --seed 1

        headrace generate --file prompts.txt --json | jq -r .text
    """
    from headrace.client_text import GenerateOptions  # noqa: PLC0415 - imports gRPC
    from headrace.generate import Wanted, run  # noqa: PLC0415
    from headrace.many_inputs import Server  # noqa: PLC0415
    from shared.settings_loader import load  # noqa: PLC0415 - imports pydantic

    if top_p is not None and not 0 < top_p <= 1:
        raise StartupError(ExitCode.BAD_SETTINGS, f"--top-p is {top_p:g}: it is above 0 and at most 1")
    if logprobs is not None and not as_json:
        raise StartupError(ExitCode.BAD_SETTINGS, "--logprobs needs --json: they are told there")
    prompts = _prompts(prompt, file)
    options = GenerateOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
        logprobs=logprobs,
        seed=seed,
        stop=stop or None,
        beams=beams,
    )
    server = Server(address or load(None).settings.gateway.grpc_address, timeout)
    raise typer.Exit(run(prompts, Wanted(model, options, system, chat), server, as_json=as_json))


def _prompts(prompt: str | None, file: Path | None) -> list[str]:
    """What to continue. Raises StartupError."""
    if file is not None and prompt is not None:
        raise StartupError(ExitCode.BAD_SETTINGS, "give a prompt or --file, not both")
    if prompt == "":
        raise StartupError(ExitCode.BAD_SETTINGS, "the prompt is empty: it has at least one character")
    if file is None:
        return [_decoded(_standard_input(), "standard input") if prompt is None or prompt == "-" else prompt]
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise StartupError(ExitCode.BAD_SETTINGS, f"{file} can't be read: {error.strerror or error}") from None
    lines = [line for line in _decoded(data, str(file)).splitlines() if line.strip()]
    if not lines:
        raise StartupError(ExitCode.BAD_SETTINGS, f"{file} has no prompt: it holds one a line")
    return lines


def _standard_input() -> bytes:
    if sys.stdin.isatty():
        raise StartupError(ExitCode.BAD_SETTINGS, 'no prompt: headrace generate "The river", or give it by a pipe')
    return sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)


def _decoded(data: bytes, name: str) -> str:
    if len(data) > MAX_PROMPT_BYTES:
        raise StartupError(ExitCode.BAD_SETTINGS, f"{name} has over {MAX_PROMPT_BYTES >> 20} MiB, too much for prompts")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise StartupError(ExitCode.BAD_SETTINGS, f"{name} is not UTF-8 at byte {error.start}") from None
    if not text.strip():
        raise StartupError(ExitCode.BAD_SETTINGS, f"{name} is empty: a prompt has at least one character")
    return text
